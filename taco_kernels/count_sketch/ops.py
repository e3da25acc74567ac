"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.count_sketch import reference

row_exponents = dispatched(reference.row_exponents)
encode = dispatched(reference.encode)
combine = dispatched(reference.combine)
decode = dispatched(reference.decode)
pack = reference.pack
