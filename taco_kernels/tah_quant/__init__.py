"""TAH-Quant: pipeline activations in 3 and 4 bits (arXiv 2506.01352). Needs torch and triton alone."""

from taco_kernels.tah_quant.layout import ALLOCATIONS, TILE_SIZES, TRANSFORMS, Layout, TahConfig, layout_of
from taco_kernels.tah_quant.ops import decode, encode

__all__ = [
    "ALLOCATIONS",
    "TILE_SIZES",
    "TRANSFORMS",
    "Layout",
    "TahConfig",
    "decode",
    "encode",
    "layout_of",
]
