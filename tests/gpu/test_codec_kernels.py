"""The Triton codec kernels on a GPU against the reference, on the same GPU tensors and on the CPU."""

import math
import random

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig, reference
from tests.gpu.codec_cases import DTYPES, SIGNED, another, case_of
from tests.kernels.wires.taco import assert_alike, check_sums

# What the kernels promise. Decoding is bit-equal to the reference, sums of codes being exact in any order;
# only e5m2's range is too wide for that. Encoding sums fp32 values in another order than the reference, which
# moves a value that lies that near to the middle between two codes.
CODES_APART = 1e-4  # share of codes that may differ, by one grid step


pytestmark = pytest.mark.usefixtures("filled_outputs")


def agree(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> None:
    """Two wires are the same within the promise; small tensors may have two codes apart."""
    values = a.shape[0] * (a.shape[1] // config.bytes_per_group()) * config.group_size
    # a bf16 step that rounds to its neighbour moves the codes of a whole group
    few = config.group_size if config.scales != "dual" else 2
    assert_alike(a, b, config, CODES_APART + few / max(values, 1))


def same_values(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> None:
    """Decoded values are equal, or for e5m2 equal to the rounding of fp32 and of their own type."""
    if config.format == "fp8-e5m2":
        size = float(b.float().nan_to_num(0.0).abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a, b, rtol=2 * torch.finfo(b.dtype).eps, atol=1e-6 * size, equal_nan=True
        )
    else:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Gaussian values, a few rows far larger and a few far smaller than the rest."""
    x = torch.randn(shape, generator=generator)
    flat = x.view(-1)
    if flat.numel():
        flat[:: max(1, flat.numel() // 7)] *= 40
        flat[flat.numel() // 2 : flat.numel() // 2 + 300] *= 1e-5
    return x.to(dtype).cuda()


def check(
    x: torch.Tensor,
    config: CodecConfig,
    chunks: int,
    senders: int = 3,
    into: tuple[CodecConfig, ...] = (),
    decoded: bool = True,
) -> None:
    """Operations on x; the kernels of each are compiled, which is what takes the time."""
    shape, numel = x.shape, x.numel()
    exact = reference.encode(x, config, chunks)
    wires = tk.encode(x, config, chunks)
    agree(exact, wires, config)
    agree(reference.encode(x.cpu(), config, chunks), wires.cpu(), config)

    out = tk.decode(wires, config, shape, x.dtype, out=torch.full_like(x, -4.25e4))
    expected = reference.decode(wires, config, shape, x.dtype)
    same_values(out, expected, config)
    same_values(out.cpu(), reference.decode(wires.cpu(), config, shape, x.dtype), config)

    g = torch.Generator(device="cuda").manual_seed(numel)
    sent = [torch.randn(numel, device="cuda", generator=g).to(x.dtype) for _ in range(senders)]
    stack = torch.cat([tk.encode(one, config) for one in sent])
    check_sums(tk, stack, shape, config, agree, into or (config,), decoded)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_against_the_reference(format: str, group_size: int) -> None:
    """Every pair of a format, group size, scales, type and operation, in random shapes."""
    rng = random.Random(group_size * 31 + len(format) + ord(format[-1]))
    case = case_of(format, group_size)
    shape = rng.randint(1, 300), rng.randint(1, 700)
    x = tensor(shape, case.dtype, torch.Generator().manual_seed(group_size))
    check(x, case.config, rng.randint(1, 8), rng.choice((1, 4, 7, 16)), case.into, case.decoded)


@pytest.mark.parametrize("format, group_size, hadamard", SIGNED)
def test_steps_with_a_sign(format: str, group_size: int, hadamard: bool) -> None:
    """Every operation, every dtype; values of one sign, whose groups' near extreme is below zero."""
    config = CodecConfig(format, group_size, "signed", hadamard)
    for seed, dtype in enumerate(DTYPES):
        x = tensor((77, 457 + seed), dtype, torch.Generator().manual_seed(seed))
        check(x.abs() if seed == 1 else x, config, 3, (2, 8, 9)[seed], (config, another(config)))


@pytest.mark.parametrize("format", FORMATS)
def test_sizes(format: str) -> None:
    """From nothing to more tiles than a grid has programs."""
    g, dtype = torch.Generator().manual_seed(2), DTYPES[FORMATS.index(format) % 3]
    config = CodecConfig(format)
    for numel in (0, 1, 129, 2**23 + 128):
        for chunks in (1, 4):
            x = tensor((numel,), dtype, g)
            wires = tk.encode(x, config, chunks)
            assert wires.shape == (chunks, config.wire_bytes(config.chunk_numel(numel, chunks)))
            agree(reference.encode(x, config, chunks), wires, config)
            y = tk.decode(wires, config, x.shape, dtype, out=torch.full_like(x, -4.25e4))
            same_values(y, reference.decode(wires, config, x.shape, dtype), config)


@pytest.mark.parametrize("format", ["fp8-e4m3", "int5"])
def test_strides(format: str) -> None:
    """Slices and permutations, read and written in place, or copied where a kernel cannot walk them."""
    g = torch.Generator().manual_seed(3)
    config = CodecConfig(format, 64)
    base = tensor((6, 10, 1024), torch.bfloat16, g)
    views = (
        base[:, :, :512],  # rows of whole groups
        base.transpose(0, 1)[:, :, 8:520],
        base.permute(2, 0, 1),  # no contiguous rows: copied
        base.view(6, 5, 2, 16, 64).permute(2, 3, 0, 1, 4),  # too many dimensions: copied
        base.expand(2, 6, 10, 1024),
    )
    for x in views:
        for chunks in (1, 3):
            wires = tk.encode(x, config, chunks)
            assert torch.equal(wires, tk.encode(x.contiguous(), config, chunks))
            agree(reference.encode(x, config, chunks), wires, config)
            if x is views[-1]:
                continue
            storage = torch.full_like(base, -3.0)
            target = storage.as_strided(x.size(), x.stride(), x.storage_offset())
            assert tk.decode(wires, config, x.shape, x.dtype, out=target) is target
            assert torch.equal(target, reference.decode(wires, config, x.shape, x.dtype))
            assert int((storage != -3.0).sum()) <= x.numel()


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_values_at_the_edges(format: str, hadamard: bool) -> None:
    """NaN and infinity stay visible and stay in their group; zeros, tiny and huge values come through."""
    for kind in ["dual"] + ["single"] * hadamard + ["signed"] * format.startswith("int"):
        config = CodecConfig(format, 128, kind, hadamard)
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(5)).cuda()
        x[0] = 0
        x[1, 77], x[2, 0], x[3, 127] = math.nan, math.inf, -math.inf
        x[4] *= 1e-12
        x[5] *= 1e30
        x[6] *= 1e38 / x[6].abs().max()
        check(x, config, 1, senders=2)
        wires = tk.encode(x, config, 1)
        y = tk.decode(wires, config, x.shape, torch.float32)
        assert (y[0] == 0).all() and y[1:4].isnan().all() and y[4:].isfinite().all()
        stack = torch.cat([wires, wires])
        total = tk.decode_sum(stack, config, x.shape, torch.float32)
        assert total[1:4].isnan().all() and total[[0, 4, 5, 7]].isfinite().all()
        again = tk.decode_sum_encode(stack, config, x.numel())
        z = tk.decode(again[None], config, x.shape, torch.float32)
        assert z[1:4].isnan().all() and z[[0, 4, 5, 7]].isfinite().all()


def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 values and 2^32 bytes in one call; the ends must be right."""
    numel, config = 2**31 + 2**20 + 3, CodecConfig("int8", 128)
    if torch.cuda.mem_get_info()[0] < 5 * numel:
        pytest.skip(f"needs {5 * numel / 2**30:.0f} GiB of free device memory")
    x = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    wires = tk.encode(x, config, 2)
    C = config.chunk_numel(numel, 2)
    for chunk, start in ((0, 0), (1, C)):
        last = min(numel, start + C)
        for a in (start, (last - 2**20) // 128 * 128):
            b = min(last, a + 2**20)
            expected = reference.encode(x[a:b], config)[0]
            n, first = -(-(b - a) // 128), (a - start) // 128
            row = wires[chunk]
            differ = row[first * 128 : (first + n) * 128] != expected[: n * 128]
            assert float(differ.float().mean()) < CODES_APART
            s = row[C : C + C // 128 * 4].view(torch.float32)[first : first + n]
            torch.testing.assert_close(
                s, expected[n * 128 : n * 132].view(torch.float32), rtol=1e-6, atol=0
            )
    original = x.clone()
    tk.decode(wires, config, x.shape, x.dtype, out=x)
    parts = zip(x.split(2**26), original.split(2**26), strict=True)
    worst = max(float((found - exact).abs().max()) for found, exact in parts)
    assert 0 < worst < 0.2
