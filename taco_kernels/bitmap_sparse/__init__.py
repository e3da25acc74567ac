"""Sparse tensors as their values end to end and a bitmap: the fewest bytes to where they are added
up.

``taco_kernels.count_sketch`` has sketches of sparse tensors, which can be added on the way.
"""

from taco_kernels.bitmap_sparse import reference
from taco_kernels.bitmap_sparse.reference import BitmapLayout
from taco_kernels.common import dispatched

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
encode = dispatched(reference.encode)
decode_sum = dispatched(reference.decode_sum)
