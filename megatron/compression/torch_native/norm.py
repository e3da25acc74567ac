"""LayerNorm and RMSNorm on torch's kernels, for any tensor and sequence parallelism.

    layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMS norm:   y = x / sqrt(mean(x^2) + eps) * gamma

Statistics and arithmetic are fp32 inside the kernels whatever the dtype.

torch's kernel gives each row a thread block, which leaves most of it idle at a head's 64 or 128
values: short rows, of queries and keys, have compiled expressions. On an H200 in bf16, forward and
backward of [65536, 128] take torch 278 us and these 73 us, of [65536, 64] 241 and 22; the host
needs 150 us more. For long rows torch's is as fast.
"""

import torch
import torch.nn.functional as F
from megatron.core.jit import jit_fuser
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.compression.errors import InputError
from taco_kernels import residual_norm
from taco_kernels.common import AMD


class _MegatronNorm:
    """What megatron-core asks of a norm: its constructor, marked parameters, zero-centred gamma.

    With ``--apply-layernorm-1p`` the stored weight is gamma - 1, so that weight decay pulls gamma
    to one.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused
    ) -> None:
        if config.memory_efficient_layer_norm:
            raise InputError(
                "memory_efficient_layer_norm needs Transformer Engine or apex; leave it False"
            )
        if config.fused_residual_rmsnorm:
            raise InputError(
                "--fused-residual-rmsnorm fuses kernels of Transformer Engine; "
                "use --transformer-impl transformer_engine or drop it"
            )
        # Before the constructor of torch's, which initialises the weight.
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps)
        # On AMD's GPUs the definition would run in place of a kernel, slower than torch's norm.
        self.adds_in_one_pass = hidden_size <= residual_norm.LONGEST_ROW and not AMD
        """Whether ``taco_kernels.residual_norm`` computes the same norm behind a residual add."""
        for parameter in self.parameters():
            # Each rank sees part of the sequence: finalize_model_grads sums these gradients over
            # the ranks.
            parameter.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Gamma one, beta zero."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            torch.nn.init.zeros_(self.weight)

    def _gamma(self, dtype: torch.dtype) -> torch.Tensor:
        """Return gamma in the input's type."""
        gamma = self.weight.to(dtype)
        return gamma + 1 if self.zero_centered_gamma else gamma


class TorchLayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """Layer norm over the last dimension (see the module's formula)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise any ``[..., hidden_size]``; the result has the weight's dtype (x may be an fp32
        residual)."""
        gamma = self._gamma(x.dtype)
        beta = self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, gamma, beta, self.eps).to(self.weight.dtype)


class TorchRMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """RMS norm over the last dimension (see the module's formula)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise any ``[..., hidden_size]``; the result has the weight's dtype (x may be an fp32
        residual)."""
        gamma = self._gamma(x.dtype)
        # Heads of queries and keys; see the times above.
        if x.is_cuda and self.normalized_shape[0] <= LONGEST_ROW:
            y = RowRMSNorm.apply(x, gamma, self.eps)
        else:
            y = F.rms_norm(x, self.normalized_shape, gamma, self.eps)
        return y.to(self.weight.dtype)


LONGEST_ROW = 512
"""Longer rows are left to torch's kernel, which is as fast there."""


@jit_fuser
def _forward(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x32 = x.float()
    # Kept for the backward: a value a row.
    inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * inverse * gamma.float()).to(x.dtype), inverse


@jit_fuser
def _backward(
    grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad32 = grad.float()
    normed = x.float() * inverse
    scaled = grad32 * gamma.float()
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_gamma = (grad32 * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_gamma.to(gamma.dtype)


class RowRMSNorm(torch.autograd.Function):
    """RMS norm of short rows by compiled expressions: ``apply(x, gamma, eps)``.

    ``x`` is ``[..., n]`` and ``gamma`` ``[n]`` of the same dtype; arithmetic is in fp32, rounded
    once.
    """

    @staticmethod
    def forward(ctx, x, gamma, eps):
        y, inverse = _forward(x, gamma, eps)
        ctx.save_for_backward(x, gamma, inverse)
        return y

    @staticmethod
    def backward(ctx, grad):
        return (*_backward(grad, *ctx.saved_tensors), None)
