"""What the codecs share: dispatch, launches, and the arithmetic of transforms, rounding and bit planes."""

from taco_kernels.common.sizes import ALIGNMENT, ceil_div

__all__ = ["ALIGNMENT", "ceil_div"]
