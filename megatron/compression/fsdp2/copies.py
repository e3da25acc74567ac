"""Parameters that ranks outside FSDP's mesh hold as well: their weights and gradients are sent
exactly.

Under tensor parallelism every rank of a tensor-parallel group holds the norms in whole, sharded by
FSDP over the data-parallel ranks. A lossy codec quantises a parameter in groups with its
neighbours, which differ from one tensor-parallel rank to the next; so the copies would come out
different, and drift. Next to the matrices such parameters are few: they are sent beside the
payload, as they are. Gradients are added in fp32 in the order of the ranks, since the order of a
backend's sum may differ from one group to the next.

      tensor rank 0     [ matrix A0 | norm ]  -> payload of all of it, and the norm's bits
      tensor rank 1     [ matrix A1 | norm ]  -> payload of all of it, and the norm's bits, the same
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.compression.communication.collectives import sum_in_order
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work
from megatron.compression.fsdp2.parameter_group import ParameterGroup

IsCopy = Callable[[torch.nn.Parameter], bool]
"""Whether ranks outside FSDP's mesh hold a parameter as well."""


def copies_of(group: ParameterGroup) -> IsCopy:
    """Return how copies of a group's parameters are told, in a model of a user's own.

    A DTensor says it itself: its placements of the dimensions that are not FSDP's. Of plain tensors
    nobody knows whether other ranks hold them alike. Vectors (norms, biases) are taken for copies
    wherever the job has ranks outside FSDP's mesh, since they are few; matrices are not.
    """
    fsdp_dimensions = group.mesh_dimensions
    ranks_outside = group.mesh_size < dist.get_world_size()

    def is_copy(parameter: torch.nn.Parameter) -> bool:
        assert isinstance(parameter, DTensor), "FSDP2's shards are DTensors"
        mesh = parameter.device_mesh
        if mesh.ndim > fsdp_dimensions:  # FSDP's dimensions come first
            sizes = mesh.shape[fsdp_dimensions:]
            placements = parameter.placements[fsdp_dimensions:]
            return any(
                size > 1 and placement.is_replicate()
                for size, placement in zip(sizes, placements, strict=True)
            )
        return ranks_outside and parameter.dim() <= 1

    return is_copy


@dataclass(frozen=True)
class Copies:
    """Where copies lie in a row of ``n`` values, one rank's shards of a group's parameters end to
    end."""

    spans: tuple[tuple[int, int], ...]
    """Begin and end of each; neighbours are joined."""
    topology: Topology
    ledger: Ledger
    traffic: str

    def __bool__(self) -> bool:
        return bool(self.spans)

    def gather(self, shard: Tensor, rows: Tensor) -> Work:
        """Start to gather the copies of every rank's shard ``[n]``; ``wait`` writes them into
        ``[W, n]``."""
        values = self._taken(shard[None])
        gathered = values.new_empty((self.topology.world_size, values.shape[1]))
        self._count("all_gather", gathered.nbytes)
        # not by the transport: its payloads are bytes of a codec, to the ledger and its audit
        pending = dist.all_gather_into_tensor(
            gathered.view(-1), values.view(-1), self.topology.group, async_op=True
        )

        def write() -> None:
            for column, target in self._columns(rows):
                target.copy_(gathered[:, column])

        return Work(pending, write)

    def sum_to_owners(self, rows: Tensor, scale: float) -> Work:
        """Start to add up the copies of ``[W, n]``, a row for each owner; ``wait`` returns what
        ``write`` takes, fp32 ``[m]``, times ``scale``."""
        values = self._taken(rows)
        received = torch.empty_like(values)
        self._count("all_to_all", values.nbytes)
        pending = dist.all_to_all_single(received, values, group=self.topology.group, async_op=True)
        return Work(pending, lambda: sum_in_order(received) * scale)

    def sum_everywhere(self, row: Tensor, scale: float) -> Work:
        """Start to add up the copies of ``[n]`` over all ranks; as ``sum_to_owners``."""
        values = self._taken(row[None])
        gathered = values.new_empty((self.topology.world_size, values.shape[1]))
        self._count("all_gather", gathered.nbytes)
        pending = dist.all_gather_into_tensor(
            gathered.view(-1), values.view(-1), self.topology.group, async_op=True
        )
        return Work(pending, lambda: sum_in_order(gathered) * scale)

    def write(self, values: Tensor, row: Tensor) -> None:
        """Write values ``[m]`` of the copies over those in ``[n]``."""
        for column, target in self._columns(row[None]):
            target.copy_(values[None, column])

    def _taken(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:, begin:end] for begin, end in self.spans], dim=1)

    def _columns(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each span's columns among all copies, and its part of ``rows``."""
        position = 0
        for begin, end in self.spans:
            size = end - begin
            yield slice(position, position + size), rows[:, begin:end]
            position += size

    def _count(self, operation: str, nbytes: int) -> None:
        """Count what is sent; what they would be without compression is in the payload's count
        already."""
        sent = bytes_sent(operation, nbytes, self.topology.world_size)
        for link, link_bytes in self.topology.split(operation, sent).items():
            if link_bytes:
                self.ledger.record(self.traffic, "exact", operation, link_bytes, 0, link)


def copies_in(
    group: ParameterGroup,
    is_copy: IsCopy,
    topology: Topology,
    ledger: Ledger,
    traffic: str,
    with_gradients: bool = False,
) -> Copies:
    """Find the copies in a row of a group's shards.

    Args:
        group: the parameters.
        is_copy: tells copies.
        topology: the ranks that the row is sent to.
        ledger: counts what is sent.
        traffic: the ledger's class.
        with_gradients: the row has only the parameters that have gradients.
    """
    spans: list[tuple[int, int]] = []
    position = 0
    # Gradients of one group have one type; its weights may have several, and go as bytes then.
    sizes = group.shard_sizes if with_gradients else group.row_sizes
    for parameter, size in zip(group.parameters, sizes, strict=True):
        if with_gradients and not parameter.requires_grad:
            continue  # FSDP leaves a frozen parameter out of the row
        end = position + size
        if size and is_copy(parameter):
            if spans and spans[-1][1] == position:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((position, end))
        position = end
    if topology.world_size == 1:
        spans = []  # nothing is sent
    return Copies(tuple(spans), topology, ledger, traffic)
