"""Sparse tensors as their values end to end and a bitmap: the fewest bytes to where they are added up.

Beside ``taco_kernels.count_sketch``, whose sketches can be added on the way.
"""

from taco_kernels.bitmap_sparse.layout import BitmapLayout
from taco_kernels.bitmap_sparse.ops import decode_sum, encode

__all__ = ["BitmapLayout", "decode_sum", "encode"]
