"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.taco import reference

encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
decode_sum = dispatched(reference.decode_sum)
decode_sum_encode = dispatched(reference.decode_sum_encode)
