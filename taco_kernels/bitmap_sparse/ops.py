"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.bitmap_sparse import reference
from taco_kernels.common.dispatch import dispatched

encode = dispatched(reference.encode)
decode_sum = dispatched(reference.decode_sum)
