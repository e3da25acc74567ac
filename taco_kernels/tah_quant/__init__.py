"""TAH-Quant: pipeline activations in 3 and 4 bits (arXiv 2506.01352). Needs torch and triton alone."""

from taco_kernels.common import dispatched
from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.reference import (
    ALLOCATIONS,
    TILE_SIZES,
    TahConfig,
    TahLayout,
    layout_of,
)

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
