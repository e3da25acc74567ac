"""The distributed optimizer's parameter all-gather, compressed.

Megatron copies the updated fp32 masters over the owner's shard of the parameter buffer and gathers that. Here
the masters' cast goes to a buffer of its own, so that the shard still holds what every other rank holds;
what turns the one into the other is encoded at once, gathered when Megatron gathers, and applied by every
rank, the owner too, to its own copy: replicas stay bit-identical, and what the encoding lost is still there
in the next difference (SDP4Bit, arXiv 2410.15526, quantisation on weight differences).
"""

from collections.abc import Iterable

import torch

from megatron.compression.collectives.work import CompressedWork
from megatron.compression.communication.ledger import Ledger
from megatron.compression.data_parallel.bucket import WeightCodec, transport_for
from megatron.compression.data_parallel.topology import Topology

ATTRIBUTE = "compressed_weights"
"""Where a bucket of Megatron's keeps its ``BucketWeights``."""


class ExactWeightCodec:
    """The new weights as they are: the control that tests the hooks around a codec."""

    name = "exact"

    def encode(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See ``WeightCodec.encode``."""
        return new.clone().view(torch.uint8)

    def apply(self, wires: torch.Tensor, weights: torch.Tensor) -> None:
        """See ``WeightCodec.apply``."""
        weights.copy_(wires.view(weights.dtype))


class BucketWeights:
    """One bucket's weights: the update that waits to be gathered.

    Args:
        weights: the bucket's ``param_data``, ``[ranks * n]``, bf16 or fp16.
        codec: encodes the update of a shard.
        topology: of the data-parallel group.
        ledger: counts the gather.
    """

    def __init__(self, weights: torch.Tensor, codec: WeightCodec, topology: Topology, ledger: Ledger) -> None:
        self.weights = weights.view(topology.world_size, -1)
        self.codec = codec
        self.topology = topology
        self.ledger = ledger
        self.pending: torch.Tensor | None = None
        """Payload of this rank's shard; None: every rank holds the weights already."""

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, as all ranks hold it."""
        return self.weights[self.topology.rank]

    def update(self, masters: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Take an optimizer step's result: (offset in the shard, master values of any type) a parameter."""
        new = self.shard.clone()
        for start, master in masters:
            new[start : start + master.numel()].copy_(master.view(-1))
        self.pending = self.codec.encode(new, self.shard)

    def start(self) -> CompressedWork:
        """Start to gather the pending payloads; ``wait`` applies them."""
        wire, self.pending = self.pending, None
        self.topology.record_plain(self.ledger, "dp.weight", "all_gather", self.weights.nbytes)
        transport = transport_for(self.topology, self.ledger, "dp.weight")
        wires, work = transport.all_gather(wire, async_op=True)

        def apply() -> torch.Tensor:
            with torch.no_grad():
                self.codec.apply(wires, self.weights)
            return self.weights

        return CompressedWork(work, apply)


def copy_masters(optimizer) -> bool:
    """Hand a distributed optimizer's updated masters to its buckets' ``BucketWeights``.

    Stands for ``DistributedOptimizer._copy_main_params_to_model_params``. Every bucket of the optimizer takes
    part on every rank, also where a rank's shard holds no parameter.

    Returns:
        False where no bucket is compressed: Megatron's own copy is to run.
    """
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    if not any(hasattr(bucket, ATTRIBUTE) for bucket in buckets):
        return False
    masters: dict[int, list[tuple[int, torch.Tensor]]] = {id(bucket): [] for bucket in buckets}
    for shards, parameters in zip(
        optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True
    ):
        for master, parameter in zip(shards, parameters, strict=True):
            buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
            bucket = optimizer.buffers[buffer_index].buckets[bucket_index]
            place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            masters[id(bucket)].append((place.start, master))
    for bucket in buckets:
        held = masters[id(bucket)]
        if hasattr(bucket, ATTRIBUTE):
            weights: BucketWeights = getattr(bucket, ATTRIBUTE)
            first = weights.topology.rank * weights.shard.numel()
            weights.update((start - first, master) for start, master in held)
        else:
            for start, master in held:
                bucket.param_data.view(-1)[start : start + master.numel()].copy_(master.view(-1))
    return True
