"""The Triton codec kernels on a GPU against the reference, on the same GPU tensors and on the CPU.

Decoding is bit-equal to the reference, sums of codes being exact in any order; only e5m2's range is
too wide for that. Encoding sums fp32 values in another order than the reference, which moves a
value that lies that near to the middle between two codes.
"""

import math
import random

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.common import ceil_div
from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig, reference
from tests.gpu.codec_cases import DTYPES, SIGNED, another, case_of
from tests.kernels.wires.taco import assert_alike, check_sums

CODES_APART = 1e-4
"""Share of codes that may differ, by one grid step."""
FILL = -4.25e4
"""What outputs hold before: kernels must write all of them."""

pytestmark = pytest.mark.usefixtures("filled_outputs")


def agree(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> None:
    """Assert that two wires are the same within the promise; two codes of a small one may differ.

    Args:
        a: uint8[chunks, bytes].
        b: like a.
        config: of the codec.
    """
    values = a.shape[0] * (a.shape[1] // config.bytes_per_group()) * config.group_size
    few_codes = 2
    if config.scales != "dual":
        # A bf16 step that rounds to its neighbour moves the codes of a whole group.
        few_codes = config.group_size
    assert_alike(a, b, config, CODES_APART + few_codes / max(values, 1))


def same_values(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> None:
    """Assert that decoded values are equal, for e5m2 to the rounding of fp32 and of their own type.

    Args:
        a: the kernel's values.
        b: the reference's.
        config: of the codec.
    """
    rtol = atol = 0.0
    if config.format == "fp8-e5m2" and b.numel():
        rtol = 2 * torch.finfo(b.dtype).eps
        atol = 1e-6 * float(b.float().nan_to_num(0.0).abs().max())
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return Gaussian values, a few rows far larger and a few far smaller than the rest.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        generator: of the values.
    """
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
    """Run every operation on x; the kernels of each are compiled, which is what takes the time.

    Args:
        x: on the GPU.
        config: of the codec.
        chunks: pieces of x.
        senders: whose wires are summed.
        into: what sums are encoded with; by default ``config``.
        decoded: whether sums are decoded, too.
    """
    shape = x.shape
    numel = x.numel()
    exact = reference.encode(x, config, chunks)
    wires = tk.encode(x, config, chunks)
    agree(exact, wires, config)
    agree(reference.encode(x.cpu(), config, chunks), wires.cpu(), config)

    out = tk.decode(wires, config, shape, x.dtype, out=torch.full_like(x, FILL))
    expected = reference.decode(wires, config, shape, x.dtype)
    same_values(out, expected, config)
    same_values(out.cpu(), reference.decode(wires.cpu(), config, shape, x.dtype), config)

    g = torch.Generator(device="cuda").manual_seed(numel)
    sent = [torch.randn(numel, device="cuda", generator=g).to(x.dtype) for _ in range(senders)]
    stack = torch.cat([tk.encode(values, config) for values in sent])
    check_sums(tk, stack, shape, config, agree, into or (config,), decoded)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_against_the_reference(format: str, group_size: int) -> None:
    """Run every pair of a format, group size, scales, type and operation, in random shapes."""
    rng = random.Random(group_size * 31 + len(format) + ord(format[-1]))
    case = case_of(format, group_size)
    shape = rng.randint(1, 300), rng.randint(1, 700)
    x = tensor(shape, case.dtype, torch.Generator().manual_seed(group_size))
    check(x, case.config, rng.randint(1, 8), rng.choice((1, 4, 7, 16)), case.into, case.decoded)


@pytest.mark.parametrize("dtype, senders", list(zip(DTYPES, (2, 8, 9), strict=True)), ids=str)
@pytest.mark.parametrize("format, group_size, hadamard", SIGNED)
def test_steps_with_a_sign(
    format: str, group_size: int, hadamard: bool, dtype: torch.dtype, senders: int
) -> None:
    """Every operation; sums that are decoded as two, unrolled, and in a loop."""
    config = CodecConfig(format, group_size, "signed", hadamard)
    x = tensor((77, 457 + senders), dtype, torch.Generator().manual_seed(senders))
    check(x, config, 3, senders, (config, another(config)))


@pytest.mark.parametrize("format, group_size, hadamard", SIGNED)
def test_steps_with_a_sign_of_values_of_one_sign(
    format: str, group_size: int, hadamard: bool
) -> None:
    """The near extreme of every group is on the far one's side of zero without a transform."""
    config = CodecConfig(format, group_size, "signed", hadamard)
    x = tensor((77, 458), torch.float16, torch.Generator().manual_seed(1)).abs()
    check(x, config, 3, 8, (config,))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("numel", [0, 1, 129, 2**23 + 128])
@pytest.mark.parametrize("format", FORMATS)
def test_sizes(format: str, numel: int, chunks: int) -> None:
    """Sizes go from nothing to more tiles than a grid has programs."""
    dtype = DTYPES[FORMATS.index(format) % 3]
    config = CodecConfig(format)
    x = tensor((numel,), dtype, torch.Generator().manual_seed(2))
    wires = tk.encode(x, config, chunks)
    assert wires.shape == (chunks, config.wire_bytes(config.chunk_numel(numel, chunks)))
    agree(reference.encode(x, config, chunks), wires, config)
    y = tk.decode(wires, config, x.shape, dtype, out=torch.full_like(x, FILL))
    same_values(y, reference.decode(wires, config, x.shape, dtype), config)


VIEWS = {
    "rows of whole groups": lambda base: base[:, :, :512],
    "exchanged dimensions": lambda base: base.transpose(0, 1)[:, :, 8:520],
    "no contiguous rows: copied": lambda base: base.permute(2, 0, 1),
    "too many dimensions: copied": lambda base: base.view(6, 5, 2, 16, 64).permute(2, 3, 0, 1, 4),
}
"""Slices and permutations of a tensor of 6 by 10 by 1024."""


def strided_base() -> torch.Tensor:
    """Return the tensor that views are of."""
    return tensor((6, 10, 1024), torch.bfloat16, torch.Generator().manual_seed(3))


def check_encode(x: torch.Tensor, config: CodecConfig, chunks: int) -> torch.Tensor:
    """Check that a view has a contiguous copy's bytes, and the reference's; return the wires."""
    wires = tk.encode(x, config, chunks)
    assert torch.equal(wires, tk.encode(x.contiguous(), config, chunks))
    agree(reference.encode(x, config, chunks), wires, config)
    return wires


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("format", ["fp8-e4m3", "int5"])
def test_strides(format: str, view: str, chunks: int) -> None:
    """Views are read and written in place, or copied where a kernel cannot walk them."""
    config = CodecConfig(format, 64)
    base = strided_base()
    x = VIEWS[view](base)
    wires = check_encode(x, config, chunks)
    storage = torch.full_like(base, -3.0)
    target = storage.as_strided(x.size(), x.stride(), x.storage_offset())
    assert tk.decode(wires, config, x.shape, x.dtype, out=target) is target
    assert torch.equal(target, reference.decode(wires, config, x.shape, x.dtype))
    assert int((storage != -3.0).sum()) <= x.numel(), "nothing is written beside the view"


@pytest.mark.parametrize("format", ["fp8-e4m3", "int5"])
def test_an_expanded_tensor_is_read(format: str) -> None:
    """Its first dimension has stride 0."""
    check_encode(strided_base().expand(2, 6, 10, 1024), CodecConfig(format, 64), 3)


EDGES = [
    (format, scales, hadamard)
    for format in FORMATS
    for scales in ("dual", "single", "signed")
    for hadamard in (True, False)
    if (scales != "signed" or format.startswith("int")) and (scales != "single" or hadamard)
]
"""Format, scales, whether transformed."""


def edge_values() -> torch.Tensor:
    """Return fp32[8, 128]: zeros, NaN, infinities, tiny, large, huge and Gaussian values."""
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(5)).cuda()
    x[0] = 0
    x[1, 77] = math.nan
    x[2, 0] = math.inf
    x[3, 127] = -math.inf
    x[4] *= 1e-12
    x[5] *= 1e30
    x[6] *= 1e38 / x[6].abs().max()
    return x


@pytest.mark.parametrize("format, scales, hadamard", EDGES)
def test_values_at_the_edges_agree_with_the_reference(
    format: str, scales: str, hadamard: bool
) -> None:
    check(edge_values(), CodecConfig(format, 128, scales, hadamard), 1, senders=2)


@pytest.mark.parametrize("format, scales, hadamard", EDGES)
def test_values_at_the_edges(format: str, scales: str, hadamard: bool) -> None:
    """NaN and infinity stay visible, in their group; zeros, tiny and huge values come through."""
    config = CodecConfig(format, 128, scales, hadamard)
    x = edge_values()
    wires = tk.encode(x, config, 1)
    decoded = tk.decode(wires, config, x.shape, torch.float32)
    assert (decoded[0] == 0).all()
    assert decoded[1:4].isnan().all()
    assert decoded[4:].isfinite().all()

    # The sum of two huge rows, 6, may pass fp32's range.
    stack = torch.cat([wires, wires])
    total = tk.decode_sum(stack, config, x.shape, torch.float32)
    again = tk.decode_sum_encode(stack, config, x.numel())
    for summed in (total, tk.decode(again[None], config, x.shape, torch.float32)):
        assert summed[1:4].isnan().all()
        assert summed[[0, 4, 5, 7]].isfinite().all()


LARGE = 2**31 + 2**20 + 3
"""Values: more than 2^31, of more than 2^32 bytes."""


@pytest.fixture
def large_tensor() -> torch.Tensor:
    """bf16[LARGE], Gaussian."""
    needed = 6 * LARGE
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    return torch.empty(LARGE, dtype=torch.bfloat16, device="cuda").normal_()


@pytest.mark.parametrize("chunks", [1, 2])
def test_encode_beyond_32_bits(chunks: int, large_tensor: torch.Tensor) -> None:
    """Both ends of every chunk are right; one chunk's codes alone have more than 2^31 bytes."""
    config = CodecConfig("int8", 128)
    wires = tk.encode(large_tensor, config, chunks)
    chunk = config.chunk_numel(LARGE, chunks)
    for row in range(chunks):
        start = row * chunk
        last = min(LARGE, start + chunk)
        for begin in (start, (last - 2**20) // 128 * 128):
            values = large_tensor[begin : min(last, begin + 2**20)]
            check_groups(wires[row], values, config, chunk, (begin - start) // 128)


def check_groups(
    wire: torch.Tensor, values: torch.Tensor, config: CodecConfig, chunk: int, first: int
) -> None:
    """Compare some groups of a chunk's wire with the reference's of their values.

    Args:
        wire: of the chunk.
        values: of the groups.
        config: of 8 bits and dual scales, groups of 128.
        chunk: values of the chunk.
        first: number of the first group.
    """
    expected = reference.encode(values, config)[0]
    groups = ceil_div(values.numel(), 128)
    codes = wire[first * 128 : (first + groups) * 128]
    assert float((codes != expected[: groups * 128]).float().mean()) < CODES_APART
    scales = wire[chunk : chunk + chunk // 128 * 4].view(torch.float32)
    expected_scales = expected[groups * 128 : groups * 132].view(torch.float32)
    torch.testing.assert_close(scales[first : first + groups], expected_scales, rtol=1e-6, atol=0)


def test_round_trip_beyond_32_bits(large_tensor: torch.Tensor) -> None:
    """No value is far from what it was: none is missed, and none is written elsewhere."""
    config = CodecConfig("int8", 128)
    wires = tk.encode(large_tensor, config, 2)
    decoded = tk.decode(wires, config, large_tensor.shape, large_tensor.dtype)
    parts = zip(decoded.split(2**26), large_tensor.split(2**26), strict=True)
    worst = max(float((result - exact).abs().max()) for result, exact in parts)
    assert 0 < worst < 0.2
