"""Compression under PyTorch's ``DistributedDataParallel``, without megatron-core: attach.py,
gradients.py (sums of DDP's buckets) and torch_ddp.py (what of DDP is not public).

    compression = attach(model, reduce="int8")        # after DistributedDataParallel(...)
"""

from megatron.compression.ddp.attach import DdpCompression, attach
