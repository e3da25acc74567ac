"""The interface between Megatron's gradient buckets and what compresses them.

Two parts hang on each bucket of a DDP buffer:

- a ``GradientSync`` (one object a bucket, built by the runtime's ``gradient_sync`` factory) sums the bucket's
  gradients over the data-parallel group. It may keep state, such as error feedback; ``state`` and
  ``load_state`` hand that over as flat fp32 tensors in the bucket's own coordinates, and checkpoint.py cuts
  them into parameters, saves them beside the optimizer's state and brings them back, also at another
  data-parallel size.
- a ``WeightCodec`` (pure, shared by all buckets) encodes the distributed optimizer's updated shard; the
  gather, and when to gather, are weights.py's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.communication.ledger import Ledger
from megatron.compression.data_parallel.in_flight import Works
from megatron.compression.data_parallel.topology import Topology


@dataclass(frozen=True)
class ParameterSpan:
    """Where a parameter lies in its bucket."""

    name: str
    """As in the model chunk's ``named_parameters``."""
    parameter: torch.nn.Parameter
    start: int
    end: int


@dataclass(frozen=True)
class GradientBucket:
    """What a ``GradientSync`` knows of its bucket."""

    gradients: torch.Tensor
    """[numel], bf16, fp16 or fp32: this rank's sum over micro-batches, and where the result goes."""
    spans: tuple[ParameterSpan, ...]
    """The parameters in it, by position; between them may be gaps of zeros."""
    scale: float
    """What the sum over all ranks is multiplied by (1 / ranks for an average), in fp32, after summing."""
    sharded: bool
    """With the distributed optimizer each rank needs its shard of the sum only, else all of it."""
    topology: Topology
    ledger: Ledger

    @property
    def numel(self) -> int:
        """Values in the bucket, padding included."""
        return self.gradients.numel()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard of ``gradients`` where ``sharded``: a W-th, in rank order."""
        size = self.numel // self.topology.world_size
        return self.gradients[self.topology.rank * size : (self.topology.rank + 1) * size]

    def transport(self, link: str | None = None) -> TorchTransport:
        """Exchanges counted as dp.gradient: over the whole group, or ``intra`` or ``inter`` ranks only."""
        return transport_for(self.topology, self.ledger, "dp.gradient", link)


def transport_for(
    topology: Topology, ledger: Ledger, channel: str, link: str | None = None
) -> TorchTransport:
    """Payload exchanges of a topology's group, counted as compressed traffic of ``channel``."""
    if link is None:

        def count(operation: str, sent: int) -> None:
            for part, size in topology.split(operation, sent).items():
                if size:
                    ledger.record(channel, "compressed", operation, size, 0, part)

        return TorchTransport(topology.group, count, topology.sharing())
    group = {"intra": topology.intra, "inter": topology.inter}[link]
    return TorchTransport(
        group,
        lambda operation, sent: ledger.record(channel, "compressed", operation, sent, 0, link),
        topology.sharing(link),
    )


class GradientSync(Protocol):
    """Sums one bucket's gradients over its data-parallel group."""

    name: str
    """For the log."""

    covering_ranks: int
    """Ranks whose state covers the same value: what is pending of the sum may be split among so many."""

    def start(self) -> Works:
        """Start summing ``bucket.gradients`` as they are now.

        The work's ``wait`` leaves the scaled sum in ``bucket.shard`` (``sharded``) or in all of
        ``bucket.gradients``, where every rank then holds the same bits. Non-finite gradients of any rank
        show in the result. Called once an iteration, on every rank, in the same order of buckets.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """What must survive a restart, by slot: fp32 ``[numel]`` each, added over all ranks the pending part
        of the gradients' sum. Empty where there is none."""
        ...

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what ``state`` gave (fp32 ``[numel]``; a slot that is missing is zero)."""
        ...


class WeightCodec(Protocol):
    """Encodes a shard's update. Pure; every rank that decodes the same bytes gets the same weights."""

    name: str

    def encode(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Payload uint8 ``[bytes]`` that turns ``old`` into ``new``; both ``[n]`` of the weights' type."""
        ...

    def apply(self, wires: torch.Tensor, weights: torch.Tensor) -> None:
        """Update ``weights [W, n]`` in place by the payloads uint8 ``[W, bytes]``, row by row."""
        ...


def spans_of(bucket, names: dict[torch.nn.Parameter, str]) -> tuple[ParameterSpan, ...]:
    """The parameters of a Megatron bucket, by position."""
    spans = (
        ParameterSpan(names[parameter], parameter, *bucket.param_to_index[parameter])
        for parameter in bucket.params_list
    )
    return tuple(sorted(spans, key=lambda span: span.start))


def split_by_parameter(flat: torch.Tensor, spans: Iterable[ParameterSpan]) -> dict[str, torch.Tensor]:
    """{parameter name: its part of ``flat`` [numel]}."""
    return {span.name: flat[span.start : span.end] for span in spans}
