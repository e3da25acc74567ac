"""Calls that launch kernels in advised settings, whose tensors lie on the host: by family and name."""

from functools import partial

import torch

from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.bitmap_sparse import launch as bitmap_sparse
from taco_kernels.channel_norm import launch as channel_norm
from taco_kernels.channel_norm.reference import ChannelNormLayout
from taco_kernels.lossless import LosslessLayout
from taco_kernels.lossless import launch as lossless
from taco_kernels.residual_norm import launch as residual_norm
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.sdp4bit import launch as sdp4bit
from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import CodecConfig
from taco_kernels.taco import launch as taco
from taco_kernels.tah_quant import TahConfig
from taco_kernels.tah_quant import launch as tah_quant

LAUNCHERS = (
    taco,
    collectives,
    sdp4bit,
    tah_quant,
    bitmap_sparse,
    channel_norm,
    lossless,
    residual_norm,
)
"""Modules that have the kernels."""
NUMEL = 2**16
TAIL = NUMEL + 100
"""Values of a tensor whose last group is not whole."""
BF16 = torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return zeros, by default of the wires' type."""
    return torch.zeros(shape, dtype=dtype)


def encode(config: CodecConfig, numel: int = NUMEL) -> None:
    """Launch TACO's encode of four chunks."""
    taco.encode(zeros(numel, dtype=BF16), config, 4)


def decode(config: CodecConfig, numel: int = NUMEL) -> None:
    """Launch TACO's decode of four chunks."""
    wires = zeros(4, config.wire_bytes(config.chunk_numel(numel, 4)))
    taco.decode(wires, config, (numel,), BF16)


def decode_sum(config: CodecConfig) -> None:
    """Launch TACO's sum of four senders."""
    taco.decode_sum(zeros(4, config.wire_bytes(NUMEL)), config, (NUMEL,), BF16)


def collective(operation: str, config: CodecConfig, ranks: int = 4) -> None:
    """Launch a collective of ranks whose addresses are not used."""
    memory = zeros(channel_bytes(ranks, 8))
    channel = Channel([memory.data_ptr()] * ranks, 0, torch.device("cpu"), 8, 1.0)
    getattr(collectives, operation)(channel, zeros(4, NUMEL // 4, dtype=BF16), config)


def of_sdp4bit() -> None:
    """Launch SDP4Bit's kernels of gradients, of four ranks."""
    format = GroupFormat(8, 128, True)
    sdp4bit.quantize(zeros(4, NUMEL, dtype=BF16), format)
    wires = zeros(4, 4, format.wire_bytes(NUMEL))
    sdp4bit.sum_requantize(wires, format, NUMEL, GroupFormat(4, 128, True))


def of_residual_norm() -> None:
    """Launch both kernels on rows of 2048, as a layer norm."""
    rows = zeros(64, 2048, dtype=BF16)
    gamma = zeros(2048, dtype=BF16)
    normed = residual_norm.forward(rows, rows, gamma, gamma, gamma, 1e-5)
    residual_norm.backward(rows, rows, normed, gamma, True)


def of_tah_quant() -> None:
    """Launch TAH-Quant's encode and decode."""
    x = zeros(64, 4, 1024, dtype=BF16)
    config = TahConfig()
    tah_quant.decode(tah_quant.encode(x, config), config, x.shape, BF16)


def of_bitmap_sparse() -> None:
    """Launch the kernels of sparse shards, of four ranks."""
    x = zeros(4, NUMEL, dtype=torch.float32)
    layout = BitmapLayout(NUMEL, 0.2, 16)
    bitmap_sparse.encode(x, x[:, 0], layout, x)
    bitmap_sparse.decode_sum(zeros(4, layout.wire_bytes), layout)


def of_channel_norm() -> None:
    """Launch the kernels of normalised channels."""
    config = CodecConfig("int6", 64, "single", hadamard=False, outliers=True)
    x = zeros(64, 1024, dtype=BF16)
    layout = ChannelNormLayout(64, 1024, config)
    channel_norm.decode(channel_norm.encode(x, layout), layout, BF16)


def of_lossless() -> None:
    """Launch the lossless kernels, of four ranks."""
    x = zeros(4, TAIL, dtype=BF16)
    layout = LosslessLayout(TAIL, BF16)
    payloads = lossless.encode(x, layout)
    lossless.decode(payloads, layout)
    lossless.decode_sum(payloads[None], layout, BF16)


OUTLIERS = CodecConfig("fp8-e4m3", outliers=True)
SETTINGS = {
    "taco decode_sum fp8-e4m3": partial(decode_sum, CodecConfig("fp8-e4m3")),
    "taco encode fp8-e4m3 outliers tail": partial(encode, OUTLIERS, TAIL),
    "taco encode fp8-e4m3 256": partial(encode, CodecConfig("fp8-e4m3", 256)),
    "taco decode int6 signed outliers tail": partial(
        decode, CodecConfig("int6", 128, "signed", outliers=True), TAIL
    ),
    "symmetric_memory reduce_scatter int8 256 signed": partial(
        collective, "reduce_scatter", CodecConfig("int8", 256, "signed")
    ),
    "symmetric_memory all_reduce int6 signed outliers": partial(
        collective, "all_reduce", CodecConfig("int6", 128, "signed", outliers=True)
    ),
    "symmetric_memory all_reduce int6 signed two ranks": partial(
        collective, "all_reduce", CodecConfig("int6", 128, "signed"), 2
    ),
    "sdp4bit": of_sdp4bit,
    "tah_quant": of_tah_quant,
    "residual_norm": of_residual_norm,
    "bitmap_sparse": of_bitmap_sparse,
    "channel_norm": of_channel_norm,
    "lossless": of_lossless,
}
