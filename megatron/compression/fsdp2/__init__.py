"""Compression for PyTorch's FSDP2 (``fully_shard``): needs torch and triton, nothing of megatron-core.

    fully_shard(...)                                                     # every block, then the model
    compression = attach(model, gather="lossless", reduce="int8")
    ... the training loop as it is ...
    print(compression.summary())

attach.py      ``attach``: what is refused, what a model's modules share, the overflow flags
weights.py     all-gathers of weights
gradients.py   reduce-scatters of gradients, and the all-reduce between the replicas of HSDP
"""

from megatron.compression.fsdp2.attach import Fsdp2Compression, attach
