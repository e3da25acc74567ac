"""The warps of TAH-Quant's kernels on the CPU: their assembly, lane by lane, against the reference."""

import numpy as np
import pytest
import torch

from taco_kernels.reference import hadamard
from taco_kernels.tah_quant.reference import bring_forward
from tests.unit import ptx_warp
from tests.unit.interpreter import output_interpreted

pytest.importorskip("triton")
from taco_kernels.tah_quant.kernels import quads

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LANES = np.arange(32)
THREAD, ROW = LANES & 3, LANES >> 2


def main() -> None:
    """Print the fragments of a warp; under the interpreter."""
    import triton
    import triton.language as tl

    @triton.jit
    def write(out):
        lane = tl.arange(0, 32)
        words = quads.fragments(lane)
        for i in tl.static_range(8):
            tl.store(out + 32 * i + lane, words[i])

    out = torch.zeros(256, dtype=torch.int32)
    write[(1,)](out)
    print(*out.tolist())


@pytest.fixture(scope="module")
def fragments() -> list[np.ndarray]:
    """The eight that decode_assembly takes."""
    numbers = np.array(output_interpreted(__file__).split(), dtype=np.int64).astype(np.uint32)
    return list(numbers.reshape(8, 32))


def nibble_word(codes: np.ndarray, first: int) -> np.ndarray:
    """Of codes [32, 16] below 16: ``first`` and the next three in low nibbles, those 8 on in high ones."""
    shifts = np.arange(0, 32, 8)
    pairs = codes[:, first : first + 4] | codes[:, first + 8 : first + 12] << 4
    return (pairs << shifts).sum(axis=1).astype(np.uint32)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("tiles", (16, 11))
def test_decode(kind: str, tiles: int, fragments: list[np.ndarray]) -> None:
    """16 tiles, or fewer, of both kinds and of steps and zero points that are not finite: to the last bit."""
    random = np.random.default_rng(tiles)
    codes, pivot = random.integers(0, 16, (16, 64)), random.integers(0, 64, 16)
    chosen = random.random(16) < 0.6
    step = (random.random(16) * 0.3).astype(np.float16).astype(np.float32)
    zero = (random.standard_normal(16) * 3).astype(np.float16).astype(np.float32)
    step[3], zero[5], chosen[:2] = np.nan, np.inf, (True, False)
    size, values = torch.finfo(DTYPES[kind]).bits // 8, torch.zeros(16 * 64, dtype=DTYPES[kind])
    registers = {f"${13 + i}": word for i, word in enumerate(fragments)}
    registers |= {"$21": THREAD, "$22": (ROW * 64 + THREAD * 8) * size, "$23": tiles - ROW}
    for r in range(2):
        tile = ROW + 8 * r
        held = codes[tile[:, None], 16 * THREAD[:, None] + np.arange(16)]
        registers |= {f"${1 + 2 * r}": nibble_word(held, 0), f"${2 + 2 * r}": nibble_word(held, 4)}
        registers[f"${5 + r}"] = np.where(chosen, pivot + 128, 0)[tile]
        floats = (step * np.where(chosen, 2.0**21, 2.0**24), np.where(chosen, 0.0, zero), zero * 8)
        for number, value in zip((7, 9, 11), floats, strict=True):
            registers[f"${number + r}"] = value.astype(np.float32).view(np.uint32)[tile]
    registers = {name: np.asarray(value).astype(np.uint32) for name, value in registers.items()}
    memory = values.view(torch.int32).numpy().view(np.uint32)
    ptx_warp.run(quads.decode_assembly.fn(kind), registers, memory)
    steps, zeros = torch.from_numpy(step), torch.from_numpy(zero)
    rotated = hadamard(torch.from_numpy(codes).float()) * (steps / 8)[:, None]
    rotated[:, 0] += zeros * 8
    rotated = bring_forward(rotated, torch.from_numpy(pivot))
    plain = zeros[:, None] + steps[:, None] * torch.from_numpy(codes)
    expected = torch.where(torch.from_numpy(chosen)[:, None], rotated, plain).to(DTYPES[kind])
    expected[tiles:] = 0
    assert torch.equal(values.view(16, 64).nan_to_num(7.0), expected.nan_to_num(7.0))


if __name__ == "__main__":
    main()
