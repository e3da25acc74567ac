"""What error feedback remembers of a compression, in one pass."""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.error_feedback import reference

__all__ = ["remember"]

remember = dispatched(reference.remember)
