"""A residual add and the norm after it, forward and backward, each in one pass over memory.

    x = residual + total + bias
    y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta        layer norm
    y = x / sqrt(mean(x^2) + eps) * gamma                        RMS norm, without beta

Separate kernels read and write the residual stream twice as often: add of the bias, add of the
residual, norm; and in the backward the norm's input gradient, its weights' gradients, the add of
the residual's gradient and the bias' gradient.
"""

from taco_kernels.common import dispatched
from taco_kernels.residual_norm import reference
from taco_kernels.residual_norm.reference import LONGEST_ROW, Normed, NormGradients

__all__ = ["LONGEST_ROW", "NormGradients", "Normed", "backward", "forward"]

forward = dispatched(reference.forward)
backward = dispatched(reference.backward)
