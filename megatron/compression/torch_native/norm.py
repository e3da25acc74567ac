"""LayerNorm and RMSNorm on torch's kernels, for any tensor and sequence parallelism.

    layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMS norm:   y = x / sqrt(mean(x^2) + eps) * gamma

Statistics and arithmetic are fp32 inside the kernels whatever the dtype.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.compression.errors import InputError
from megatron.compression.torch_native.row_norm import LONGEST_ROW, row_rms_norm


class _MegatronNorm:
    """What megatron-core asks of a norm: its constructor, marked parameters, zero-centred gamma.

    With ``--apply-layernorm-1p`` the stored weight is gamma - 1, so that weight decay pulls gamma to one.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused) -> None:
        if config.memory_efficient_layer_norm:
            raise InputError("memory_efficient_layer_norm needs Transformer Engine or apex; leave it False")
        if config.fused_residual_rmsnorm:
            raise InputError(
                "--fused-residual-rmsnorm fuses kernels of Transformer Engine; "
                "use --transformer-impl transformer_engine or drop it"
            )
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            # Each rank sees part of the sequence: finalize_model_grads sums these gradients over the ranks.
            parameter.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Gamma one, beta zero."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            torch.nn.init.zeros_(self.weight)

    def _gamma(self, dtype: torch.dtype) -> torch.Tensor:
        gamma = self.weight.to(dtype)
        return gamma + 1 if self.zero_centered_gamma else gamma

    def extra_repr(self) -> str:
        """Adds the zero-centred gamma to torch's line."""
        return super().extra_repr() + (", zero_centered_gamma" if self.zero_centered_gamma else "")


class TorchLayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """Layer norm over the last dimension (see the module's formula)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any ``[..., hidden_size]``; the result has the weight's dtype (x may be an fp32 residual)."""
        gamma, beta = self._gamma(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, gamma, beta, self.eps).to(self.weight.dtype)


class TorchRMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """RMS norm over the last dimension (see the module's formula)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any ``[..., hidden_size]``; the result has the weight's dtype (x may be an fp32 residual)."""
        gamma = self._gamma(x.dtype)
        if x.is_cuda and self.normalized_shape[0] <= LONGEST_ROW:
            y = row_rms_norm(x, gamma, self.eps)
        else:
            y = F.rms_norm(x, self.normalized_shape, gamma, self.eps)
        return y.to(self.weight.dtype)
