"""As ``transformer_engine.pytorch``: the layers."""

from transformer_engine.pytorch import module as module
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear as Linear
