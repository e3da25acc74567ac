"""Integers of channels without their mean and spread: what a pipeline stage sends, after its own
statistics.

The statistics take one pass over the tensor, the normalisation none: it happens where the codec
loads and stores. The codec of the values is ``taco_kernels.taco``'s, without its transform.
"""

from taco_kernels.channel_norm import reference
from taco_kernels.channel_norm.reference import ChannelNormLayout
from taco_kernels.common import dispatched

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
