"""What data-parallel and tensor-parallel replicas hold alike: weights gathered compressed, values aligned.

Megatron copies the updated fp32 masters over the owner's shard of the parameter buffer and gathers that. Here
the masters' cast goes to a buffer of its own; its difference to the shard is encoded at once, gathered when
Megatron gathers, and added by every rank, the owner too, to its own copy: replicas stay bit-identical, and
what the encoding lost is in the next difference (SDP4Bit, arXiv 2410.15526).

Norms, biases and position embeddings are replicated over tensor-parallel ranks. A lossy codec quantises them
in groups with neighbours that differ from rank to rank, so that the copies would drift. The first
tensor-parallel rank's values are broadcast, exactly (``align``); next to the matrices they are few.
"""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.overflow import OverflowFlags
from megatron.compression.communication.policy import Decision, Policy
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import ParameterSpan

ATTRIBUTE = "compressed_weights"
"""Where a bucket of Megatron's keeps its ``BucketWeights``."""


class BucketWeights:
    """One bucket's weights, ``[ranks * n]`` of bf16 or fp16: the update that waits to be gathered. At each
    optimizer step the policy decides by ``nbytes``, of all weights of the bucket's group (None: any size)."""

    def __init__(
        self,
        weights: torch.Tensor,
        policy: Policy,
        topology: Topology,
        ledger: Ledger,
        nbytes: int | None = None,
    ) -> None:
        self.weights, self.nbytes = weights.view(topology.world_size, -1), nbytes
        self.policy, self.topology, self.ledger = policy, topology, ledger
        self.pending: torch.Tensor | None = None
        """Payload of this rank's shard; None: every rank holds the weights already, or Megatron gathers."""
        self.uncompressed_kind = "exact"
        """The ledger's kind of Megatron's next gather: exact where nothing has changed."""
        self._codec: Codec | None = None

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, as all ranks hold it."""
        return self.weights[self.topology.rank]

    def decide(self) -> Decision:
        """How the update of the last optimizer step is sent."""
        decision = self.policy.decide("dp.weight", self.nbytes)
        self.uncompressed_kind = "exact" if decision.codec is not None else decision.reason
        self._codec = decision.codec
        return decision

    def update(self, masters: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Take an optimizer step's result: (offset in the shard, master values of any type) a parameter."""
        new = self.shard.clone()
        for start, master in masters:
            new[start : start + master.numel()].copy_(master.view(-1))
        self.pending = self._codec.encode_difference(new, self.shard)

    @property
    def overflow_flag(self) -> torch.Tensor | None:
        """uint8 ``[]``, 1 where the pending payload's values did not fit; None: they always do."""
        return self._codec.overflow_flag(self.pending) if self._codec.lossless else None

    def start(self) -> Work:
        """Start to gather the pending payloads; ``wait`` applies them."""
        payload, codec, self.pending = self.pending, self._codec, None
        self.topology.record_plain(self.ledger, "dp.weight", "all_gather", self.weights.nbytes)
        gathered, pending = self.topology.transport(self.ledger, "dp.weight").all_gather(
            payload[None]
        )

        def apply() -> torch.Tensor:
            with torch.no_grad():
                return codec.add_decoded(gathered, self.weights)

        return Work(pending, apply)


def copy_masters(optimizer) -> bool:
    """Hand a distributed optimizer's updated masters to its buckets' ``BucketWeights``, in place of
    ``_copy_main_params_to_model_params``; False where no bucket is compressed now."""
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    compressed: dict[int, BucketWeights] = {
        id(bucket): getattr(bucket, ATTRIBUTE)
        for bucket in buckets
        if hasattr(bucket, ATTRIBUTE) and getattr(bucket, ATTRIBUTE).decide().codec is not None
    }
    if not compressed:
        return False
    masters: dict[int, list[tuple[int, torch.Tensor]]] = {id(bucket): [] for bucket in buckets}
    groups = optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups
    for shards, parameters in zip(*groups, strict=True):
        for master, parameter in zip(shards, parameters, strict=True):
            buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
            bucket = optimizer.buffers[buffer_index].buckets[bucket_index]
            place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            masters[id(bucket)].append((place.start, master))
    for key, weights in compressed.items():
        first = weights.topology.rank * weights.shard.numel()
        weights.update((start - first, master) for start, master in masters[key])
    _leave_out_overflows([*compressed.values()])
    for bucket in buckets:
        weights = compressed.get(id(bucket))
        if weights is None or weights.pending is None:
            for start, master in masters[id(bucket)]:
                bucket.param_data.view(-1)[start : start + master.numel()].copy_(master.view(-1))
    return True


def _leave_out_overflows(updated: list[BucketWeights]) -> None:
    """Leave lossless buckets that overflow on any rank to Megatron, uncompressed, and all others of their
    topology. The host waits for the device once a topology."""
    lossless = [weights for weights in updated if weights.overflow_flag is not None]
    for topology in dict.fromkeys(weights.topology for weights in lossless):
        buckets = [weights for weights in lossless if weights.topology == topology]
        flags = OverflowFlags()
        for weights in buckets:
            flags.note(topology, weights.overflow_flag)
        transport = topology.transport(buckets[0].ledger, "dp.weight")
        if flags.ask(transport.any_ranks)[topology]:
            for weights in buckets:
                weights.pending = None
                weights.uncompressed_kind = "overflow"


def replicated_parts(
    flat: torch.Tensor,
    spans: Iterable[ParameterSpan],
    cut: Collection[torch.nn.Parameter],
    first: int = 0,
    gradients: bool = False,
) -> list[torch.Tensor]:
    """The parts of ``flat``, a bucket's values from ``first`` on, that every tensor-parallel rank holds
    alike: none of ``cut``, which lack Megatron's mark, nor of ``gradients`` that CAAT-Net sums later."""
    parts = []
    for span in spans:
        parameter = span.parameter
        differs = gradients and getattr(parameter, "sees_rank_local_data", False)
        if differs or parameter in cut or getattr(parameter, "tensor_model_parallel", False):
            continue
        start, end = max(span.start - first, 0), min(span.end - first, flat.numel())
        if start < end:
            parts.append(flat[start:end])
    return parts


def align(parts: list[torch.Tensor], group: dist.ProcessGroup, ledger: Ledger) -> None:
    """Give all ranks the first one's values. Collective, in the same order on every rank."""
    if not parts or group.size() == 1:
        return
    with torch.no_grad():
        values = torch.cat(parts)
        dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
        if group.rank() == 0:
            ledger.record_uncompressed(
                "tp.other", "exact", "broadcast", values.nbytes, group.size()
            )
            return
        for part, value in zip(parts, values.split([part.numel() for part in parts]), strict=True):
            part.copy_(value)


def align_gradients(chunks: Iterable) -> None:
    """Align the reduced gradients of DDP-wrapped chunks, after all reductions and sums over TP ranks."""
    for chunk in chunks:
        for group in getattr(chunk, "bucket_groups", ()):
            for parts in getattr(group, "gradient_replicas", ()):
                align(parts, group.tensor_ranks, group.ledger)
