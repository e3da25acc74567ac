"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.tah_quant import reference

encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
