"""The contract of what compresses data-parallel gradients.

GradientCompressor    settings; ``build`` makes a GradientSync for each bucket of a DDP buffer
GradientSync          sums one bucket's gradients over its data-parallel group; may have a memory
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from megatron.compression.codecs import GRADIENT_COMPRESSORS
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


@dataclass(frozen=True)
class ParameterSpan:
    """Where a parameter lies in its bucket."""

    name: str
    """As in the model chunk's ``named_parameters``."""
    parameter: torch.nn.Parameter
    start: int
    end: int


@dataclass
class GradientBucket:
    """What a ``GradientSync`` knows of its bucket.

    Under FSDP2 a span is one rank's piece of a parameter, and gradients have no place of their own:
    each ``start`` is given them, and ``gradients`` has their size, type and device alone.
    """

    gradients: torch.Tensor
    """``[numel]``, bf16, fp16 or fp32: this rank's sum over micro-batches, and where the result
    goes."""
    spans: tuple[ParameterSpan, ...]
    """The parameters in it, by position; between them may be gaps of zeros."""
    scale: float
    """What the sum over all ranks is multiplied by (1 / ranks for an average), in fp32, after
    summing."""
    sharded: bool
    """With the distributed optimizer each rank needs its shard of the sum only, else all of it."""
    topology: Topology
    ledger: Ledger
    traffic: str = "dp.gradient"
    """The ledger's class of what is sent."""

    @property
    def numel(self) -> int:
        """Values in the bucket, padding included."""
        return self.gradients.numel()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard of ``gradients`` where ``sharded``: a W-th, in rank order."""
        return self.shard_of(self.gradients)

    def shard_of(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of gradients ``[numel]``, a view."""
        size = self.numel // self.topology.world_size
        start = self.topology.rank * size
        return gradients[start : start + size]

    def transport(self, link: str | None = None) -> TorchTransport:
        """Exchanges that the ledger counts: over the whole group, or ``intra`` or ``inter`` ranks
        only."""
        return self.topology.transport(self.ledger, self.traffic, link)

    def all_reduce(
        self,
        values: torch.Tensor,
        reason: str = "compressed",
        op: dist.ReduceOp = dist.ReduceOp.SUM,
    ) -> dist.Work | Work:
        """Start to reduce ``values`` over the group, in place and in their own type.

        Args:
            values: any shape; nothing is sent of an empty tensor.
            reason: the ledger's reason: compressed, or why it is not.
            op: the reduction.
        """
        if not values.numel():
            return Work.completed()
        # Counted by link: of a flat ring over two nodes some edges cross between them.
        sent = bytes_sent("all_reduce", values.nbytes, self.topology.world_size)
        for link, link_bytes in self.topology.split("all_reduce", sent).items():
            if link_bytes:
                uncompressed = 0 if reason == "compressed" else link_bytes
                self.ledger.record(
                    self.traffic, reason, "all_reduce", link_bytes, uncompressed, link
                )
        return dist.all_reduce(values, op=op, group=self.topology.group, async_op=True)

    def record_plain(self, nbytes: int | None = None) -> None:
        """Count what the uncompressed collective would have sent: of the whole bucket, or of
        ``nbytes``."""
        operation = "reduce_scatter" if self.sharded else "all_reduce"
        nbytes = self.gradients.nbytes if nbytes is None else nbytes
        self.topology.record_plain(self.ledger, self.traffic, operation, nbytes)


class GradientSync(abc.ABC):
    """Sums one bucket's gradients over its data-parallel group."""

    @abc.abstractmethod
    def start(self, gradients: torch.Tensor | None = None) -> Work:
        """Start to sum gradients over the group. Called once an iteration, in the same order of
        buckets.

        Args:
            gradients: ``[numel]``, summed in place; None: the bucket's own. FSDP2 has new ones each
                time.

        Returns:
            Work whose ``wait`` leaves the sum, times ``bucket.scale``, in this rank's shard of them
            (``bucket.sharded``), or in all of them, where every rank then holds the same bits.
            Non-finite gradients of any rank show in it.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's memory, by name: what has to survive a restart at the same layout."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore what ``state`` returned, from tensors of the same names, shapes and dtypes."""

    def left_over(self) -> torch.Tensor | None:
        """Return fp32 ``[numel]``: what earlier iterations left out of each of the bucket's
        gradients, in their unit.

        A wrapper that makes other buckets in the middle of a run, as torch's DDP, adds it to the
        gradients of the next iteration. None: nothing is remembered, or it cannot be told apart.
        """
        return None


class GradientCompressor(abc.ABC):
    """How ``--dp-compression`` sums gradients. Subclasses are frozen dataclasses whose fields are
    settings.

    Named by ``@register_gradient_compressor``, an entry point, or MODULE:CLASS.
    """

    has_memory: ClassVar[bool] = False
    """Whether what an iteration leaves out is added to the next one's gradients: only then are the
    states of its syncs saved, and settings refused under which they would have no fixed unit."""

    @property
    def name(self) -> str:
        """The spec that parses back to this compressor."""
        return GRADIENT_COMPRESSORS.spec(self)

    @property
    def lossless(self) -> bool:
        """No bit is lost; payloads may overflow then, and go uncompressed."""
        return False

    @abc.abstractmethod
    def build(self, bucket: GradientBucket) -> GradientSync:
        """Return what sums a bucket. Called on every rank for the same buckets in the same
        order."""

    def default_start_iteration(self, train_iters: int | None) -> int:
        """Return how many iterations go uncompressed where ``--compression-start-iteration`` is not
        given."""
        return 0

    def describe(self) -> str:
        """Return how gradients are sent, for the log."""
        return f"gradients {self.name}"
