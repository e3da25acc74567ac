"""Compression under PyTorch's FSDP2 (``fully_shard``), without megatron-core: attach.py, weights.py
(gathers) and gradients.py (reductions).

    compression = attach(model, gather="lossless", reduce="int8")        # after fully_shard
"""

from megatron.compression.fsdp2.attach import Fsdp2Compression, attach
