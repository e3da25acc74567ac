"""TACO's codec (arXiv 2604.24088): groups of values, transformed, scaled, rounded to fp8 or
integers.

Where to read: ``layout`` has the bytes of the wire, ``reference`` the arithmetic that defines the
codec, with its derivation; ``outliers`` defines lists of outliers. ``launch`` has the Triton
kernels and their launches, ``wire`` and ``outlier_kernels`` what kernels do with a tile, ``spec``
how they are compiled and run.
"""

from taco_kernels.common import dispatched
from taco_kernels.taco import reference
from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, SCALES, CodecConfig

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
decode_sum = dispatched(reference.decode_sum)
decode_sum_encode = dispatched(reference.decode_sum_encode)
