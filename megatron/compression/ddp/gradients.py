"""Sums of DDP's buckets over a codec or a gradient compressor.

DDP cuts the parameters into buckets by itself, and makes other buckets once, after the first
iteration, in the order in which gradients came. What a compressor remembers belongs to a bucket.
So where buckets change, and in checkpoints, memories go by parameter:

    first iteration    | a | b |  | c | d |      what each bucket left out
                         |   |      |   |
                         b is added to the gradients of its new bucket, before they are summed
                                    |
    later iterations   | d | c | b |  | a |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.ddp.torch_ddp import DTYPES
from megatron.compression.errors import CompressionConfigError
from taco_kernels.common import ceil_div

TRAFFIC = "dp.gradient"


@dataclass(frozen=True, eq=False)
class BucketSums:
    """What sums one of DDP's buckets."""

    parameters: tuple[int, ...]
    """Identities of its parameters, by position."""
    bucket: GradientBucket
    sync: GradientSync

    def left_over(self) -> dict[str, torch.Tensor]:
        """Return what is remembered of each parameter, fp32 ``[n]``, by its name."""
        values = self.sync.left_over()
        if values is None:
            return {}
        return {span.name: values[span.start : span.end] for span in self.bucket.spans}


class DdpGradients:
    """The sums of one model's gradients, bucket by bucket.

    Args:
        parameters: those that DDP reduces gradients of, by name.
        topology: the ranks that hold the model.
        run: policy, ledger and transports.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], topology: Topology, run: Run
    ) -> None:
        self.topology = topology
        self.run = run
        self.compressor: GradientCompressor | None = run.policy.rule(TRAFFIC).codec
        self.parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._sums: dict[int, BucketSums] = {}
        """By a parameter's identity: what sums the bucket that it is in."""
        self._carried: dict[str, torch.Tensor] = {}
        """Left over of parameters whose bucket is not made yet, fp32 ``[n]``."""

    @property
    def has_memory(self) -> bool:
        """True where what an iteration leaves out is added to the next one's gradients."""
        return self.compressor is not None and self.compressor.has_memory

    def start(
        self,
        gradients: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        loss_scale: torch.Tensor | None,
    ) -> Work:
        """Start to average one bucket's gradients over the ranks, in place.

        Args:
            gradients: ``[n]``, the bucket's.
            parameters: those in it, one after the other.
            loss_scale: fp32 ``[]``, what the loss of this iteration was multiplied by; None: by
                nothing that a memory has to know of.
        """
        ranks = self.topology.world_size
        # All ranks have the same buckets, so they leave out the same.
        if ranks == 1 or not gradients.numel():
            return Work.completed()
        codec, reason = self.run.policy.decide(TRAFFIC, gradients.nbytes)
        if codec is not None and gradients.dtype not in DTYPES:
            codec = None
            reason = "exact"
        if codec is None:
            self.topology.record_uncompressed(
                self.run.ledger, TRAFFIC, reason, "all_reduce", gradients.nbytes
            )
            # As DDP does it without a hook: divided first, then added up in their own type.
            gradients.div_(ranks)
            return Work(dist.all_reduce(gradients, group=self.topology.group, async_op=True))
        sums = self._sums_of(gradients, parameters)
        # Codecs do not ask for the scale: their error is relative to the gradients.
        if not self.has_memory:
            return sums.sync.start(gradients)
        # A memory is kept without the loss scale, which may change before it is used.
        if loss_scale is not None:
            gradients.div_(loss_scale)
        self._add_carried(gradients, sums)
        work = sums.sync.start(gradients)
        if loss_scale is None:
            return work
        return work.then(lambda _: gradients.mul_(loss_scale))

    def _sums_of(self, gradients: torch.Tensor, parameters: Sequence[torch.Tensor]) -> BucketSums:
        """Return what sums a bucket, made at its first use and after buckets have changed."""
        # By identity: torch gives the same object of a parameter each time, while the model lives.
        key = tuple(map(id, parameters))
        sums = self._sums.get(key[0])
        if sums is not None and sums.parameters == key:
            return sums
        spans = []
        # DDP leaves no gaps between the parameters of a bucket.
        position = 0
        for identity, parameter in zip(key, parameters, strict=True):
            end = position + parameter.numel()
            spans.append(ParameterSpan(self._names[identity], parameter, position, end))
            position = end
        # A bucket wants gradients for their number, type and device. DDP's own are another buffer
        # once it makes other buckets, so these are one value's memory, and nobody reads them.
        stand_in = gradients.new_empty(1).expand(gradients.numel())
        scale = 1 / self.topology.world_size
        bucket = GradientBucket(
            stand_in, tuple(spans), scale, False, self.topology, self.run.ledger
        )
        sums = BucketSums(key, bucket, self._build(bucket))
        # Before the new sums take the places of the earlier ones.
        if self.has_memory:
            self._carry(key)
        for identity in key:
            self._sums[identity] = sums
        return sums

    def _build(self, bucket: GradientBucket) -> GradientSync:
        """Return a new sync for a bucket.

        Raises:
            CompressionConfigError: its memory cannot be told by parameter.
        """
        compressor = self.compressor
        assert compressor is not None, "a bucket without a compressor goes uncompressed"
        sync = compressor.build(bucket)
        # Without these two the memory would be lost where DDP makes its buckets anew.
        if sync.state() and (not compressor.has_memory or sync.left_over() is None):
            raise CompressionConfigError(
                f"reduce {compressor.name} keeps a memory of buckets, which DDP makes anew; set "
                f"has_memory = True and write left_over() of {type(sync).__qualname__}"
            )
        return sync

    def _carry(self, identities: Sequence[int]) -> None:
        """Take along what earlier buckets remember of the parameters of a new one."""
        left_over: dict[BucketSums, dict[str, torch.Tensor]] = {}
        for identity in identities:
            earlier = self._sums.get(identity)
            if earlier is None:
                continue
            if earlier not in left_over:
                left_over[earlier] = earlier.left_over()
            name = self._names[identity]
            # A bucket too small to be compressed remembers nothing.
            if name in left_over[earlier]:
                self._carried[name] = left_over[earlier][name]

    def _add_carried(self, gradients: torch.Tensor, sums: BucketSums) -> None:
        """Add what earlier buckets, or a checkpoint, have left over to a bucket's gradients."""
        if not self._carried:
            return
        for span in sums.bucket.spans:
            values = self._carried.pop(span.name, None)
            if values is not None:
                gradients[span.start : span.end].add_(values)

    def left_over(self) -> dict[str, torch.Tensor]:
        """Return what this rank remembers of each parameter, fp32 ``[n]``, by name; of those
        without a memory zeros."""
        left_over: dict[str, torch.Tensor] = {}
        for sums in dict.fromkeys(self._sums.values()):
            for name, values in sums.left_over().items():
                # A parameter may be in a newer bucket since.
                if self._sums[id(self.parameters[name])] is sums:
                    left_over[name] = values
        left_over.update(self._carried)
        for name, parameter in self.parameters.items():
            if name not in left_over:
                left_over[name] = torch.zeros(parameter.numel(), device=parameter.device)
        return {name: left_over[name] for name in self.parameters}

    def restore(self, left_over: Mapping[str, torch.Tensor]) -> None:
        """Have each parameter's values added to the gradients of the next iteration, in place of
        what is remembered now."""
        # Buckets are built again at their next use, with empty memories.
        self._sums.clear()
        self._carried = {
            name: values.to(self.parameters[name].device, torch.float32, copy=True)
            for name, values in left_over.items()
        }

    def memory_bytes(self) -> int:
        """Bytes of what this rank remembers."""
        total = sum(values.nbytes for values in self._carried.values())
        for sums in dict.fromkeys(self._sums.values()):
            total += sum(values.nbytes for values in sums.sync.state().values())
        return total

    def buffer_bytes(self) -> int:
        """Bytes of the payloads of all buckets, sent and received; 0 where they are not a codec's.

        All of a pass may be under way together.
        """
        codec = getattr(self.compressor, "codec", None)
        ranks = self.topology.world_size
        if codec is None or ranks == 1:
            return 0
        total = 0
        for sums in dict.fromkeys(self._sums.values()):
            piece = ceil_div(sums.bucket.numel, ranks)
            total += 2 * ranks * codec.payload_bytes((piece,))
        return total
