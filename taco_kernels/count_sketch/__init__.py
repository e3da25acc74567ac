"""A count sketch of sparse sums, which adds up without being decoded, and decodes without loss.

``layout.py`` has the geometry and the wire, ``selection.py`` finds the threshold. Sources: LHC
(arXiv 2402.07529), TAGC (arXiv 2504.05638).
"""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.count_sketch import reference
from taco_kernels.count_sketch.layout import EXACT_LOAD, Layout, SketchConfig
from taco_kernels.count_sketch.reference import Decoded
from taco_kernels.count_sketch.selection import candidates, choose

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

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
row_exponents = dispatched(reference.row_exponents)
encode = dispatched(reference.encode)
combine = dispatched(reference.combine)
decode = dispatched(reference.decode)
pack = reference.pack
