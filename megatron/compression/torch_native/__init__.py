"""Modules of a transformer layer on torch's own kernels: no Transformer Engine and no apex.

`--transformer-impl local` is built from these. They have megatron-core's interfaces, state and numbers.
"""

from megatron.compression.torch_native.attention import SDPACoreAttention
from megatron.compression.torch_native.defaults import (
    add_native_defaults,
    apply_native_defaults,
    leave_out_causal_mask,
)
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm
from megatron.compression.torch_native.rope import fill_rope_fusion_slot
from megatron.compression.torch_native.weight_gradient import fill_weight_gradient_slot
