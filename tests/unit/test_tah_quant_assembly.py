"""The warps of TAH-Quant's kernels on the CPU: their assembly, lane by lane, against the reference."""

import math
import re

import numpy as np
import pytest
import torch

from taco_kernels.taco.reference import hadamard
from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.reference import bring_forward
from tests.unit import ptx_warp
from tests.unit.interpreter import output_interpreted

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.tah_quant import TahConfig, layout_of
from taco_kernels.tah_quant import encode_quads, launch, quads, rows
from taco_kernels.tah_quant.spec import spec_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LANES = np.arange(32)
ONE_EACH = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"
THREAD, ROW = LANES & 3, LANES >> 2


def main() -> None:
    """Print the fragments of a warp; under the interpreter."""
    import triton.language as tl

    @triton.jit
    def write(out):
        lane = tl.arange(0, 32)
        words = quads.fragments(lane)
        for i in tl.static_range(8):
            tl.store(out + 32 * i + lane, words[i])
        rows = encode_quads.row_fragments(lane)
        for i in tl.static_range(12):
            tl.store(out + 256 + 32 * i + lane, rows[i])
        numbers = encode_quads.number_fragments(lane)
        for i in tl.static_range(3):
            tl.store(out + 640 + 32 * i + lane, numbers[i])

    out = torch.zeros(23 * 32, dtype=torch.int32)
    write[(1,)](out)
    print(*out.tolist())


@pytest.fixture(scope="module")
def fragments() -> list[np.ndarray]:
    """The eight that decode_assembly takes, and the twelve and three of encode_assembly."""
    numbers = np.array(output_interpreted(__file__).split(), dtype=np.int64).astype(np.uint32)
    return list(numbers.reshape(23, 32))


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
    registers = {f"${13 + i}": word for i, word in enumerate(fragments[:8])}
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


@pytest.mark.parametrize("levels", (15, 7))
def test_encode(levels: int, fragments: list[np.ndarray]) -> None:
    """16 tiles, with and without an outlier, of zeros, and not finite: what the reference makes of them."""
    config = TahConfig(high_bits=levels.bit_length(), low_bits=2, high_ratio=1.0)
    layout = layout_of(config, (1, 16 * 64))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(levels))
    places = torch.arange(16) * 29 % 64
    x[torch.arange(0, 16, 2), places[::2]] *= 60
    x[3], x[4, 5], x[7, 9], x[8, :2] = 0.0, math.nan, -math.inf, 3e4
    x[9], x[10], x[11] = x[9].abs(), -x[10].abs(), x[11].sign() / 2  # of one sign; and of one magnitude,
    x[11, 7], x[12], x[13] = -1.0, x[11] * 0.9921875, x[11]  # the largest twice that, or just less: x[12]
    x[12, 7], x[12, 8], x[13, 8] = 1.0, 0.50390625, 1.0  # two that are above half of the largest: x[13]
    x = x.bfloat16()
    held = x.view(torch.int32).numpy().view(np.uint32)
    chunks = (4 * THREAD[:, None] + np.array([0, 1, 2, 3, 16, 17, 18, 19])).T
    registers = {f"${12 + 8 * r + j}": held[ROW + 8 * r, chunks[j]] for r in range(2) for j in range(8)}
    registers |= {"$28": THREAD.astype(np.uint32)}
    registers |= {f"${29 + i}": word for i, word in enumerate(fragments[8:20])}
    registers |= {f"${44 + i}": word for i, word in enumerate(fragments[20:])}
    registers |= {"$47": np.full(32, 0x3F800000, dtype=np.uint32)}
    for number, value in ((41, -levels), (42, 1 / levels), (43, 128.5)):
        registers[f"${number}"] = np.full(32, value, dtype=np.float32).view(np.uint32)
    text = encode_quads.encode_assembly.fn(True, rows.GRID.value)
    found = ptx_warp.run(text, registers, np.zeros(1, dtype=np.uint32))
    wire = reference.encode(x.view(1, -1), config)
    expected, _ = reference.code_values(wire, layout)
    pivots = reference.section(wire, "pivots", layout).numpy()
    scales = reference.section(wire, "scales", layout).numpy().view(np.uint32)
    magnitude = x.float().abs().nan_to_num(1e38)
    for r in range(2):
        tile = ROW + 8 * r
        finite = torch.isfinite(x.float()).all(dim=1).numpy()[tile]
        assert (found[f"${6 + r}"] == pivots[tile]).all()
        if r == 1:
            assert [pivots[i] >= 128 for i in (11, 12, 13)] == [True, False, False]
        assert (found[f"${4 + r}"] == scales[tile])[finite].all()
        assert (found[f"${4 + r}"][~finite] & 0x7FFF > 0x7C00).all()
        codes = np.zeros((32, 16), dtype=np.int64)
        for word, first in ((f"${2 * r}", 0), (f"${2 * r + 1}", 4)):
            for k in range(4):
                byte = found[word].astype(np.int64) >> 8 * k & 0xFF
                codes[:, first + k], codes[:, first + k + 8] = byte & 15, byte >> 4
        want = expected.numpy()[tile[:, None], 16 * THREAD[:, None] + np.arange(16)].astype(np.int64)
        assert (codes == want)[finite].all()
        total, weighted = (found[f"${n + r}"].view(np.float32)[finite] for n in (8, 10))
        there = torch.from_numpy(tile[finite])
        np.testing.assert_allclose(total, magnitude[there].sum(dim=1), rtol=1e-5, atol=1e-35)
        logarithms = magnitude.clamp(min=2.0**-126).log2() * magnitude
        np.testing.assert_allclose(weighted, logarithms[there].sum(dim=1), rtol=1e-3, atol=1e-3)


def compiled(kernel, operation: str, allocation: str, constants: dict[str, int], capability: int = 90):
    """``kernel`` as a bf16 tensor of whole tiles needs it, for sm_``capability``."""
    config = TahConfig(allocation=allocation)
    tuning = launch.tuning_of(operation, config, torch.bfloat16)
    spec = spec_of(layout_of(config, (256, 1, 1024)), tuning.tiles, tuning.stages, False)
    pointers = dict.fromkeys(("scales", "slots", "sums"), "*i32") | {"x": "*bf16"}
    pointers |= dict.fromkeys(("base", "extra", "pivots"), "*u8")
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name == "C" or name in constants:
            signature[name], values[i,] = "constexpr", spec if name == "C" else constants[name]
        else:
            signature[name] = pointers.get(name, "i32")
        if name in pointers:
            attributes[i,] = [["tt.divisibility", 16]]
    options = dict(num_warps=tuning.warps, maxnreg=tuning.registers, enable_fp_fusion=operation == "encode")
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("constants", ({}, {"tiles": 1}), ids=("many tiles", "one"))
def test_encode_has_one_element_a_thread(constants: dict[str, int]) -> None:
    """As decode below."""
    kernel = compiled(launch.encode_kernel, "encode", "token", constants)
    layouts = set(re.findall(r"#ttg\.\w+<{.*?}>", kernel.asm["ttgir"]))
    assert layouts == {ONE_EACH}
    assert kernel.metadata.shared == 0 and kernel.asm["ptx"].count("mma.sync") == 48


def test_encode_needs_no_later_device() -> None:
    """sm_80 has bf16's fused multiply-add alone: no product, sum or comparison of pairs."""
    kernel = compiled(launch.encode_kernel, "encode", "token", {}, 80)
    assert ".target sm_80" in kernel.asm["ptx"] and kernel.metadata.shared == 0


@pytest.mark.parametrize("constants", ({}, {"per_unit": 1}, {"tiles": 1, "per_unit": 1}))
def test_decode_has_one_element_a_thread(constants: dict[str, int]) -> None:
    """What the assembly takes for granted: thread i of a program has element i of a tensor."""
    kernel = compiled(launch.decode_kernel, "decode", "token", constants)
    layouts = set(re.findall(r"#ttg\.\w+<{.*?}>", kernel.asm["ttgir"]))
    assert layouts == {ONE_EACH} and kernel.metadata.shared == 0
    assert kernel.asm["ptx"].count("mma.sync") == 16


if __name__ == "__main__":
    main()
