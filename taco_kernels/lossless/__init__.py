"""Nothing but exponents compressed, so that every bit comes back: bf16 to 11.4 bits, fp32 to 27.4."""

from taco_kernels.common import dispatched
from taco_kernels.lossless import reference
from taco_kernels.lossless.reference import BLOCK, FLAG_AT, LosslessLayout, layout_of

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
decode_sum = dispatched(reference.decode_sum)
