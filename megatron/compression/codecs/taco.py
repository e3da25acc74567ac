"""TACO: groups rotated by a Hadamard transform, adaptively scaled, rounded to FP8 (arXiv 2604.24088)."""

from dataclasses import dataclass
from functools import cached_property

from megatron.compression.codecs.grouped import GroupedCodec
from megatron.compression.codecs.registry import register_codec
from taco_kernels.taco import CodecConfig


@register_codec("taco")
@dataclass(frozen=True)
class TacoCodec(GroupedCodec):
    """TACO (arXiv 2604.24088): FP8 after an adaptive-scale Hadamard transform, with dual scales."""

    format: str = "fp8-e4m3"
    """Number format on the wire: fp8-e4m3 (the paper's), fp8-e5m2, int8, int6, int5 or int4."""

    group: int = 128
    """Values that share one transform and one pair of scales: 32, 64, 128 or 256."""

    scales: str = "dual"
    """Scales sent with each group: dual = two fp32 (the paper's), single = one bf16."""

    hadamard: bool = True
    """off leaves the transform out: plain group scaling, a control."""

    outliers: bool = False
    """Values of more than 8 times their group's mean magnitude are stored separately, so that they do
    not drown their neighbours: 0.125 bits a value. Not in the paper."""

    def __post_init__(self) -> None:
        if self.scales == "signed":
            raise ValueError("scales=signed belongs to the int codecs; give int6, or scales=single")
        _ = self.config

    @cached_property
    def config(self) -> CodecConfig:
        return CodecConfig(self.format, self.group, self.scales, self.hadamard, self.outliers)
