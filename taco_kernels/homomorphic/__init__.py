"""Lossless homomorphic compression of sparse sums: a sketch that adds up without being decoded.

``row_exponents``, ``encode``, ``combine`` and ``decode`` run Triton kernels on CUDA tensors and the
plain-torch definition in ``reference.py`` elsewhere; ``layout.py`` has the geometry and the wire,
``selection.py`` finds the threshold. Sources: LHC (arXiv 2402.07529), TAGC (arXiv 2504.05638).
"""

from taco_kernels.homomorphic.layout import EXACT_LOAD, Layout, SketchConfig
from taco_kernels.homomorphic.ops import combine, decode, encode, pack, row_exponents
from taco_kernels.homomorphic.reference import Decoded
from taco_kernels.homomorphic.selection import candidates, choose

__all__ = [
    "EXACT_LOAD",
    "Decoded",
    "Layout",
    "SketchConfig",
    "candidates",
    "choose",
    "combine",
    "decode",
    "encode",
    "pack",
    "row_exponents",
]
