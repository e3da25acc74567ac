"""What the pages advise of every kernel, as calls that launch it; tensors lie on the host."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.bitmap_sparse import launch as bitmap_sparse
from taco_kernels.channel_norm import launch as channel_norm
from taco_kernels.channel_norm.reference import ChannelNormLayout
from taco_kernels.lossless import LosslessLayout
from taco_kernels.lossless import launch as lossless
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.sdp4bit import launch as sdp4bit
from taco_kernels.sdp4bit.reference import BITS
from taco_kernels.sdp4bit.reference import GROUP_SIZES as SDP4BIT_GROUPS
from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig
from taco_kernels.taco import launch as taco
from taco_kernels.tah_quant import ALLOCATIONS, TILE_SIZES, TahConfig
from taco_kernels.tah_quant import launch as tah_quant

LAUNCHERS = (
    *(taco, collectives, sdp4bit, tah_quant),
    *(bitmap_sparse, channel_norm, lossless),
)
"""Modules that have the kernels."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SENDERS = (2, 4, 8, 16)
"""Up to 4 or 8 senders' loads are written out in TACO's sums (Spec.UNROLLED)."""
NUMEL = 2**16


class Setting(NamedTuple):
    """What launches kernels."""

    family: str
    name: str
    call: Callable[[], object]


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Of the wire's type, if no other."""
    return torch.zeros(shape, dtype=dtype)


def text(*values: object) -> str:
    """A name."""
    return " ".join(str(value).removeprefix("torch.") for value in values)


def configs() -> Iterator[CodecConfig]:
    """TACO's default, signed integers, what goes back between stages; and some that once failed."""
    for outliers in (False, True):
        yield CodecConfig("fp8-e4m3", outliers=outliers)
        for format, group_size in itertools.product(FORMATS[2:], GROUP_SIZES[:3]):
            yield CodecConfig(format, group_size, "signed", outliers=outliers)
        for group_size in (32, 64):
            yield CodecConfig("int6", group_size, "single", False, outliers)
    yield from (CodecConfig("fp8-e4m3", 256), CodecConfig("int8"), CodecConfig("int8", 256, "signed"))


def config_text(config: CodecConfig) -> str:
    """Its name."""
    plain, outliers = " plain" * (not config.hadamard), " outliers" * config.outliers
    return f"{config.format} {config.group_size} {config.scales}{plain}{outliers}"


def part_of_rows(dtype: torch.dtype) -> torch.Tensor:
    """NUMEL values that are not contiguous, in rows that are whole groups."""
    return zeros(NUMEL // 1024, 2048, dtype=dtype)[:, :1024]


def of_taco() -> Iterator[Setting]:
    """The codec's four operations."""

    def encode(config, dtype, numel=NUMEL) -> None:
        taco.encode(zeros(numel, dtype=dtype), config, 4)

    def decode(config, dtype, numel=NUMEL) -> None:
        wires = zeros(4, config.wire_bytes(config.chunk_numel(numel, 4)))
        taco.decode(wires, config, (numel,), dtype)

    def decode_sum(config, dtype, senders=4, numel=NUMEL) -> None:
        taco.decode_sum(zeros(senders, config.wire_bytes(numel)), config, (numel,), dtype)

    def decode_sum_encode(config, senders, numel=NUMEL, config_out=None) -> None:
        wires = zeros(senders, config.wire_bytes(numel))
        taco.decode_sum_encode(wires, config, numel, config_out=config_out)

    def encode_strided(config, dtype) -> None:
        taco.encode(part_of_rows(dtype), config, 4)

    def decode_strided(config, dtype) -> None:
        out = part_of_rows(dtype)
        taco.decode(zeros(4, config.wire_bytes(NUMEL // 4)), config, out.shape, dtype, out)

    def decode_sum_strided(config, dtype) -> None:
        out = part_of_rows(dtype)
        taco.decode_sum(zeros(4, config.wire_bytes(NUMEL)), config, out.shape, dtype, out)

    def encode_rows(config, dtype) -> None:
        taco.encode(zeros(NUMEL, dtype=dtype), config, 32)

    def decode_rows(config, dtype) -> None:
        taco.decode(zeros(32, config.wire_bytes(NUMEL // 32)), config, (NUMEL,), dtype)

    for config in configs():
        name = config_text(config)
        for operation in (encode, decode, decode_sum):
            call = partial(operation, config, torch.bfloat16)
            yield Setting("taco", f"{operation.__name__} {name} bfloat16", call)
            call = partial(operation, config, torch.bfloat16, numel=NUMEL + 100)  # the last group not whole
            yield Setting("taco", f"{operation.__name__} {name} bfloat16 tail", call)
        for senders in SENDERS:
            call = partial(decode_sum, config, torch.bfloat16, senders)
            yield Setting("taco", f"decode_sum {name} bfloat16 of {senders}", call)
            call = partial(decode_sum_encode, config, senders)
            yield Setting("taco", f"decode_sum_encode {name} of {senders}", call)
        call = partial(decode_sum_encode, config, 4, NUMEL + 100)
        yield Setting("taco", f"decode_sum_encode {name} of 4 tail", call)
        # tokens of 2048 values, and rows of a larger tensor
        for operation in (encode_rows, decode_rows, encode_strided, decode_strided, decode_sum_strided):
            call = partial(operation, config, torch.bfloat16)
            yield Setting("taco", f"{operation.__name__} {name} bfloat16", call)
    first, second = CodecConfig("int6", scales="signed"), CodecConfig("int4", scales="signed")
    call = partial(decode_sum_encode, first, 4, config_out=second)
    yield Setting("taco", "decode_sum_encode int6 to int4 128 signed of 4", call)


def of_symmetric_memory() -> Iterator[Setting]:
    """The collectives of four ranks, whose addresses are not used."""

    def call(operation, config, dtype, shard=NUMEL // 4) -> None:
        memory = zeros(channel_bytes(4, 8))
        channel = Channel([memory.data_ptr()] * 4, 0, torch.device("cpu"), 8, 1.0)
        if operation == "all_gather":
            wire = zeros(1, config.wire_bytes(shard))
            collectives.all_gather_encoded(channel, wire, (1, shard), dtype, config)
        else:
            getattr(collectives, operation)(channel, zeros(4, shard, dtype=dtype), config)

    for config in configs():
        for operation in ("all_reduce", "reduce_scatter", "all_gather") if not config.outliers else ():
            name = f"{operation} {config_text(config)} bfloat16"
            yield Setting("symmetric_memory", name, partial(call, operation, config, torch.bfloat16))
            tail = partial(call, operation, config, torch.bfloat16, NUMEL // 4 + 25)
            yield Setting("symmetric_memory", f"{name} tail", tail)


def of_sdp4bit() -> Iterator[Setting]:
    """Its five operations."""

    def quantize(format, dtype) -> None:
        sdp4bit.quantize(zeros(4, NUMEL, dtype=dtype), format)

    def sum_dequantize(format, dtype) -> None:
        wires = zeros(4, 4, format.wire_bytes(NUMEL))
        sdp4bit.sum_dequantize(wires, format, zeros(4, NUMEL, dtype=dtype))

    def quantize_difference(format, dtype) -> None:
        sdp4bit.quantize_difference(zeros(NUMEL, dtype=dtype), zeros(NUMEL, dtype=dtype), format)

    def add_dequantized(format, dtype) -> None:
        sdp4bit.add_dequantized(zeros(4, format.wire_bytes(NUMEL)), format, zeros(4, NUMEL, dtype=dtype))

    def sum_requantize(format, target) -> None:
        sdp4bit.sum_requantize(zeros(4, 4, format.wire_bytes(NUMEL)), format, NUMEL, target)

    for bits, group, rotated in itertools.product(BITS, SDP4BIT_GROUPS, (False, True)):
        format, name = GroupFormat(bits, group, rotated), text(f"int{bits}", group, *["rotated"] * rotated)
        plain = () if rotated else (quantize_difference, add_dequantized)
        for operation, dtype in itertools.product((quantize, sum_dequantize, *plain), DTYPES):
            call = partial(operation, format, dtype)
            yield Setting("sdp4bit", text(operation.__name__, name, dtype), call)
        for target in (GroupFormat(bits, 128, rotated) for bits in BITS):
            call = partial(sum_requantize, format, target)
            yield Setting("sdp4bit", f"sum_requantize {name} to int{target.bits}", call)


def of_tah_quant() -> Iterator[Setting]:
    """Encode and decode, each several kernels."""

    def call(config, dtype) -> None:
        x = zeros(64, 4, 1024, dtype=dtype)
        tah_quant.decode(tah_quant.encode(x, config), config, x.shape, dtype)

    widths = ((4, 3), (4, 2), (3, 2), (4, 4), (3, 3), (2, 2))
    for values in itertools.product(TILE_SIZES, widths, ALLOCATIONS, DTYPES):
        tile, width, units, dtype = values
        config = TahConfig(tile, *width, allocation=units)
        name = text(tile, *width, units, dtype)
        yield Setting("tah_quant", name, partial(call, config, dtype))


def of_gradients() -> Iterator[Setting]:
    """Sparse values."""

    def packed(bits, remembered) -> None:
        x, layout = zeros(4, NUMEL, dtype=torch.float32), BitmapLayout(NUMEL, 0.2, bits)
        bitmap_sparse.encode(x, x[:, 0], layout, x if remembered else None)
        bitmap_sparse.decode_sum(zeros(4, layout.wire_bytes), layout)

    for values in itertools.product((8, 16), (False, True)):
        yield Setting("bitmap_sparse", text(*values), partial(packed, *values))


def of_channels() -> Iterator[Setting]:
    """Normalised channels."""

    def call(config, dtype) -> None:
        x, layout = zeros(64, 1024, dtype=dtype), ChannelNormLayout(64, 1024, config)
        channel_norm.decode(channel_norm.encode(x, layout), layout, dtype)

    formats = itertools.product(
        ("int4", "int5", "int6"), GROUP_SIZES[:3], ("single", "signed"), (False, True)
    )
    for format, group_size, scales, outliers in formats:
        config = CodecConfig(format, group_size, scales, hadamard=False, outliers=outliers)
        name = f"{config_text(config)} bfloat16"
        yield Setting("channel_norm", name, partial(call, config, torch.bfloat16))


def of_lossless() -> Iterator[Setting]:
    """Nothing is rounded."""

    def call(dtype, numel, target) -> None:
        x, layout = zeros(4, numel, dtype=dtype), LosslessLayout(numel, dtype)
        payloads = lossless.encode(x, layout)
        lossless.decode(payloads, layout)
        lossless.decode_sum(payloads[None], layout, target)

    for values in itertools.product((torch.bfloat16, torch.float32), (NUMEL, NUMEL + 100), DTYPES):
        yield Setting("lossless", text(*values), partial(call, *values))


def every_setting() -> list[Setting]:
    """All of them."""
    families = (
        of_taco,
        of_symmetric_memory,
        of_sdp4bit,
        of_tah_quant,
        of_gradients,
        of_channels,
        of_lossless,
    )
    return [setting for family in families for setting in family()]
