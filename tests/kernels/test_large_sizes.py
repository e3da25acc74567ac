"""Messages of 2^31 values and more: no product of a size and an index may pass 32 bits unseen.

The kernels run in Triton's interpreter, whose int32 wraps around as a GPU's does. Memory of that size is only
reserved: the operating system provides the few pages that the first and the last tile of a message touch.
"""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from taco_kernels.common.device import Device
from taco_kernels.common.packing import load_plane, load_words, store_plane, store_words
from taco_kernels.taco import CodecConfig
from taco_kernels.taco.outliers import BLOCK, LIST_BYTES
from taco_kernels.taco.spec import Spec, make_spec
from tests.kernels.interpreter import failures_of_scenarios
from tests.kernels.wires.taco import assert_alike

INTERPRETER = Device(multiprocessors=2**20, capability=(0, 0), interpret=True)
"""With so many multiprocessors that every tile of a persistent kernel has a program of its own."""
LONG = 2**16
"""Programs from which on a grid counts as long: of those only the first and the last program run."""


# The checks run in a program with the interpreter on; the tests are at the end.


@contextmanager
def ends_of_grids() -> Iterator[None]:
    """Run only the first and the last program of a long grid, and leave memory that is reserved as it is."""
    from triton.runtime import interpreter

    from taco_kernels.channel_norm import launch as channel_norm
    from taco_kernels.sdp4bit import launch as sdp4bit
    from taco_kernels.taco import launch as taco
    from taco_kernels.tah_quant import launch as tah_quant

    def ends(*bounds: int) -> range:
        if len(bounds) == 1 and bounds[0] > LONG:
            return builtins.range(0, bounds[0], bounds[0] - 1)
        return builtins.range(*bounds)

    torch.utils.deterministic.fill_uninitialized_memory = False
    with (
        mock.patch.object(interpreter, "range", ends, create=True),
        mock.patch.object(taco, "device_number", lambda index: INTERPRETER),
        mock.patch.object(sdp4bit, "device_for", lambda tensor: INTERPRETER),
        mock.patch.object(tah_quant, "device_for", lambda tensor: INTERPRETER),
        mock.patch.object(channel_norm, "device_for", lambda tensor: INTERPRETER),
    ):
        yield


def reserved(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return zeros that take no memory until they are written."""
    return torch.empty(shape, dtype=dtype)


def random(numel: int, seed: int = 0) -> torch.Tensor:
    """Return Gaussian values, bf16[numel]."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).bfloat16()


@triton.jit
def plane_kernel(plane, loaded, groups, P: tl.constexpr, WORDS: tl.constexpr, C: tl.constexpr):
    """Fill the first tile of a plane of ``groups`` groups with sevens, and load it again."""
    first = tl.program_id(0) * C.R
    if WORDS:
        store_words(plane, tl.full([C.R * P // 2], 0x0707, tl.int16), first, groups, P, C)
        words = load_words(plane, first, groups, P, tl.int16, C)
        tl.store(loaded + tl.arange(0, C.R * P // 2), tl.reshape(words, [C.R * P // 2]))
    else:
        store_plane(plane, tl.full([C.R, P], 7, tl.uint8), first, groups, P, C)
        bytes = load_plane(plane, first, groups, P, C)
        tl.store(loaded + tl.arange(0, C.R * P), tl.reshape(bytes, [C.R * P]))


@ends_of_grids()
def check_planes() -> None:
    """Planes of 8, 4, 2 and 1 bits a value, by bytes and by words, of 2^31 bytes and more."""
    spec: Spec = make_spec(CodecConfig("int8", 128), 1024, INTERPRETER)
    for bytes_per_group in (128, 64, 32, 16):
        size = spec.R.value * bytes_per_group
        for words in (False, True):
            for groups in (2**31 // bytes_per_group, 2**31 // bytes_per_group + 2**20):
                plane = torch.zeros(size, dtype=torch.uint8)
                loaded = torch.zeros(size, dtype=torch.int32)
                plane_kernel[(1,)](plane, loaded, groups, bytes_per_group, words, spec)
                assert (plane == 7).all(), (bytes_per_group, words, groups)
                seven, count = (0x0707, size // 2) if words else (7, size)
                assert (loaded[:count] == seven).all(), (bytes_per_group, words, groups)


def parts_of_wire(config: CodecConfig, numel: int, first: int, groups: int) -> list[slice]:
    """Return where the codes, the scales and the list of some groups lie on a wire.

    Args:
        config: of the codec, in a format of 8 bits.
        numel: values of the wire.
        first: number of the first group.
        groups: how many there are; with outliers those of one block.
    """
    all_groups = config.chunk_numel(numel) // config.group_size
    scale_sizes = (4, 4) if config.scales == "dual" else (2,)
    parts = []
    begin = 0
    for size in (config.group_size, *scale_sizes):
        parts.append(slice(begin + first * size, begin + (first + groups) * size))
        begin += all_groups * size
    if config.outliers:
        block = first * config.group_size // BLOCK
        at = config.lists_at(numel) + block * LIST_BYTES
        parts.append(slice(at, at + LIST_BYTES))
    return parts


def wire_of_groups(
    wire: torch.Tensor, config: CodecConfig, numel: int, first: int, groups: int
) -> torch.Tensor:
    """Return the wire uint8[1, bytes] of some groups alone; arguments as of parts_of_wire."""
    parts = parts_of_wire(config, numel, first, groups)
    return torch.cat([wire[part] for part in parts])[None]


def put_wire_of_groups(
    wire: torch.Tensor, small: torch.Tensor, config: CodecConfig, numel: int, first: int
) -> None:
    """Write the wire of 16 groups alone where these groups lie on ``wire``."""
    parts = parts_of_wire(config, numel, first, 16)
    pieces = small[0].split([part.stop - part.start for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        wire[part] = piece


def assert_near(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that values are equal to the rounding of bf16 and of a code, and not all zeros."""
    assert b.any()
    torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=2**-4)


@ends_of_grids()
def check_taco(format: str, with_outliers: bool = False) -> None:
    """A message of 2^31 values and 2020 more, whose last group is not whole."""
    from taco_kernels.taco import launch, reference

    config = CodecConfig(format, 128, "dual", outliers=with_outliers)
    groups = 16
    tail = 2020
    numel = 2**31 + tail
    ends = {0: random(2048), 2**24: random(tail, seed=1)}  # by their first group
    for values in ends.values():
        values[5] = 1000.0  # an outlier, where the codec stores them
    small = {first: reference.encode(values, config) for first, values in ends.items()}

    x = reserved(numel, dtype=torch.bfloat16)
    for first, values in ends.items():
        x[first * 128 :][: len(values)] = values
    encoded = launch.encode(x, config)[0]
    for first, exact in small.items():
        result = wire_of_groups(encoded, config, numel, first, groups)
        assert_alike(exact, result, config, codes=0.004)

    wires = reserved(3, config.wire_bytes(numel))
    for wire in wires:
        for first, exact in small.items():
            put_wire_of_groups(wire, exact, config, numel, first)
    decoded = launch.decode(wires[:1], config, (numel,), torch.bfloat16)
    total_of_two = launch.decode_sum(wires[:2], config, (numel,), torch.bfloat16)
    total_of_three = launch.decode_sum(wires, config, (numel,), torch.bfloat16)
    again = launch.decode_sum_encode(wires, config, numel)
    for first, exact in small.items():
        shape = ends[first].shape
        value = reference.decode(exact, config, shape, torch.float32)
        begin = first * 128
        assert_near(decoded[begin:][: len(value)], value)
        assert_near(total_of_two[begin:][: len(value)], 2 * value)
        assert_near(total_of_three[begin:][: len(value)], 3 * value)
        summed = reference.decode_sum_encode(exact.expand(3, -1), config, len(value))
        result = wire_of_groups(again, config, numel, first, groups)
        assert_alike(summed[None], result, config, codes=0.004)


@ends_of_grids()
def check_long_rows() -> None:
    """Two rows of 2^31 values and 2048 more, in a tensor that is 128 wider."""
    from taco_kernels.taco import launch, reference

    config = CodecConfig("int8", 128, "single")
    width = 2**31 + 2048
    x = reserved(2, width + 128, dtype=torch.bfloat16)[:, :width]
    values = random(2048)
    x[0, :2048] = values
    x[1, -2048:] = values
    exact = reference.encode(values, config)
    encoded = launch.encode(x, config)[0]
    for first in (0, 2 * width // 128 - 16):
        result = wire_of_groups(encoded, config, 2 * width, first, 16)
        assert_alike(exact, result, config, codes=0.004)
    out = reserved(2, width + 128, dtype=torch.bfloat16)[:, :width]
    launch.decode(encoded[None], config, (2, width), torch.bfloat16, out=out)
    assert_near(out[0, :2048], values)
    assert_near(out[1, -2048:], values)


@ends_of_grids()
def check_sdp4bit(rotated: bool) -> None:
    """A row of 2^31 values in 8 bits: quantised, summed, requantised and added to weights."""
    from taco_kernels.sdp4bit import GroupFormat, launch, reference

    format = GroupFormat(8, 128, rotated)
    end = 2048
    rest = 2**31
    numel = rest + end
    values = random(end)
    exact = reference.quantize(values[None], format)[0]
    expected = reference.sum_dequantize(exact[None, None], format, torch.empty(1, end))[0]

    def assert_ends(wire: torch.Tensor) -> None:
        """A wire of the row has the bytes of the small one at both ends."""
        for first in (0, rest):
            assert torch.equal(wire[first : first + end], exact[:end])
            steps = wire[numel + first // 128 * 4 :][: end // 128 * 4]
            assert torch.equal(steps, exact[end : end + end // 128 * 4])

    x = reserved(1, numel, dtype=torch.bfloat16)
    x[0, :end] = values
    x[0, rest:] = values
    wires = launch.quantize(x, format)
    assert_ends(wires[0])
    total = launch.sum_dequantize(wires[None], format, torch.empty_like(x))
    for first in (0, rest):
        assert_near(total[0, first : first + end], expected)
    del total
    assert_ends(launch.sum_requantize(wires[None], format, numel, format)[0])
    if not rotated:
        zeros = reserved(numel, dtype=torch.bfloat16)
        assert_ends(launch.quantize_difference(x[0], zeros, format)[0])
        launch.add_dequantized(wires, format, x)
        for first in (0, rest):
            assert_near(x[0, first : first + end], values + expected)


@ends_of_grids()
def check_tah_quant() -> None:
    """A flat tensor of 2^31 values and 2054 more, without extra bits."""
    from taco_kernels.tah_quant import TahConfig, launch, reference

    config = TahConfig(high_bits=4, low_bits=4)
    whole_tiles = 2048
    numel = 2**31 + whole_tiles + 6
    values = random(whole_tiles + 6)
    layout = reference.layout_of(config, (numel,))
    small = reference.layout_of(config, values.shape)
    exact = reference.encode(values, config)
    x = reserved(numel, dtype=torch.bfloat16)
    x[:whole_tiles] = values[:whole_tiles]
    x[2**31 :] = values
    with mock.patch.object(
        torch, "zeros", torch.empty
    ):  # torch.zeros would touch all of its memory
        wire = launch.encode(x, config)
    result = launch.decode(wire, config, (numel,), torch.bfloat16)
    for name, bytes in (("base0", 32), ("scales", 4), ("pivots", 1)):
        section = reference.section(wire, name, layout)
        expected = reference.section(exact, name, small)
        tiles = whole_tiles // 64
        assert torch.equal(section[: tiles * bytes], expected[: tiles * bytes]), name
        assert torch.equal(section[2**31 // 64 * bytes :], expected), name
    decoded = reference.decode(exact, config, values.shape, torch.bfloat16)
    assert_near(result[:whole_tiles], decoded[:whole_tiles])
    assert_near(result[2**31 :], decoded)


@ends_of_grids()
def check_channel_norm() -> None:
    """2049 tokens of 2^20 channels, of mean 0 and spread 1."""
    from taco_kernels.channel_norm import launch, reference

    config = CodecConfig("int8", 128, "single", hadamard=False)
    channels = 2**20
    tokens = 2**11 + 1
    layout = reference.ChannelNormLayout(tokens, channels, config)
    x = reserved(tokens, channels, dtype=torch.bfloat16)
    values = random(2048)
    x[0, :2048] = values
    x[-1, -2048:] = values

    def statistics(x, result, robust) -> torch.Tensor:
        """Means of 0 and spreads of 1, without reading all of x."""
        result[channels:] = 1.0
        return torch.ones(channels)

    with mock.patch.object(launch, "_statistics", statistics):
        wire = launch.encode(x, layout)
    decoded = launch.decode(wire, layout, torch.bfloat16)
    assert_near(decoded[0, :2048], values)
    assert_near(decoded[-1, -2048:], values)


@ends_of_grids()
def check_channel_statistics() -> None:
    """2^24 tokens of 128 channels, and 128 tokens more, of which the partial statistics are right."""
    from taco_kernels.channel_norm import launch

    channels = 128
    tile = launch.TILE_TOKENS
    tokens = 2**24 + tile
    tiles = tokens // tile
    x = reserved(tokens, channels, dtype=torch.bfloat16)
    partials = reserved(tiles, 4, channels, dtype=torch.float32)
    values = random(tile * channels).view(tile, channels)
    x[-tile:] = values
    launch.partial_kernel[(tiles, channels // launch.TILE_CHANNELS)](
        x, partials, tokens, channels, TOKENS=tile, CHANNELS=launch.TILE_CHANNELS, ROBUST=False
    )
    mean = values.float().mean(0)
    squares = (values.float() - mean).square().sum(0)
    assert_near(partials[-1, 0], mean)
    torch.testing.assert_close(partials[-1, 1], squares, rtol=1e-4, atol=0)
    assert (partials[-1, 2] == tile).all()


@ends_of_grids()
def check_lossless() -> None:
    """The most fp32 values that a row may have: more than 2^32 bytes of them, and of the payload."""
    from taco_kernels.lossless import launch
    from taco_kernels.lossless.reference import TILE, LosslessLayout

    layout = LosslessLayout(2**31 - TILE - 5, torch.float32)
    assert layout.payload_bytes > 2**32
    values = torch.randn(TILE - 5, generator=torch.Generator().manual_seed(3))
    x = reserved(1, layout.numel, dtype=torch.float32)
    x[0, : len(values)] = values
    x[0, -len(values) :] = values
    decoded = launch.decode(launch.encode(x, layout), layout)
    assert torch.equal(decoded[0, : len(values)], values)
    assert torch.equal(decoded[0, -len(values) :], values)


@ends_of_grids()
def check_bitmap_sparse() -> None:
    """A shard of 2^31 values and 1000 more; of its last row those from 1.0 on are sent."""
    from taco_kernels.bitmap_sparse import launch, reference

    numel = 2**31 + 1000
    layout = reference.BitmapLayout(numel, 2**-20, 8)
    x = reserved(1, numel, dtype=torch.float32)
    values = random(1000).float()
    x[0, -1000:] = values
    wires = launch.encode(x, torch.tensor([1.0]), layout)
    total = launch.decode_sum(wires, layout)
    assert_near(total[-1000:], torch.where(values.abs() >= 1.0, values, 0.0))


SCENARIOS = {
    "planes": check_planes,
    "taco int8": partial(check_taco, "int8"),
    "taco fp8-e4m3": partial(check_taco, "fp8-e4m3"),
    "taco int8 with outliers": partial(check_taco, "int8", with_outliers=True),
    "taco in strided rows": check_long_rows,
    "sdp4bit rotated": partial(check_sdp4bit, True),
    "sdp4bit not rotated": partial(check_sdp4bit, False),
    "tah_quant of one flat row": check_tah_quant,
    "channel_norm": check_channel_norm,
    "channel_norm's statistics": check_channel_statistics,
    "lossless": check_lossless,
    "bitmap_sparse": check_bitmap_sparse,
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_ends_of_a_large_message(scenario: str, failures: dict[str, str]) -> None:
    """The first and the last groups of more than 2^31 values are those of the reference."""
    assert not failures[scenario], failures[scenario]


@pytest.mark.parametrize("family", ["taco", "sdp4bit", "tah_quant"])
def test_more_than_kernels_can_count_is_refused(family: str) -> None:
    """The refusal comes before anything is launched, in a line that says what to do."""
    from taco_kernels.sdp4bit import GroupFormat
    from taco_kernels.sdp4bit import launch as sdp4bit
    from taco_kernels.taco import launch as taco
    from taco_kernels.tah_quant import TahConfig
    from taco_kernels.tah_quant import launch as tah_quant

    x = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"in one call, of at most .*; use .*smaller messages"):
        if family == "taco":
            taco.encode(x.expand(2**38), CodecConfig("int8"))
        elif family == "sdp4bit":
            sdp4bit.quantize(x.expand(2**36, 1), GroupFormat(8, 128))
        else:
            layout = tah_quant.layout_of(TahConfig(), (2**20, 2**17))
            tah_quant._start(tah_quant.encode_kernel, layout, (x,), ())
