"""A rank's shard of the fp32 masters as one vector, and the places that its values go to.

Megatron's distributed optimizer gives each data-parallel rank a piece of every bucket, so a rank
has parts of parameters, each an fp32 master apart from the weights or, where parameters are fp32
themselves, a view of them. Here they stand one after the other:

    vector      | part | part | ...                    | tail: tied embedding |
                  |                                      |
    master      fp32, what the inner optimizer updates   |
    weight      the part's place in the parameter buffer, which data-parallel ranks gather

Some parts are copies of what other ranks hold: norms and biases over tensor-parallel ranks, and the
tied embedding over pipeline stages. A lossy codec encodes a copy together with neighbours that
differ from rank to rank, so each copy would become another one. Of a set of copies the first rank's
values count: they are broadcast after each change of the anchor.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.communication.ledger import Ledger
from megatron.compression.data_parallel.weights import align
from megatron.compression.replicated_parameters import sharded_without_mark


@dataclass
class MasterPart:
    """The part of one parameter that this rank's shard has."""

    parameter: torch.nn.Parameter
    master: torch.Tensor
    """fp32 ``[n]``."""
    weight: torch.Tensor
    """``[n]`` of the parameter's type: its place in the parameter buffer."""
    begin: int = 0
    """Position of the first value in the vector."""

    @property
    def end(self) -> int:
        """The position after the last value."""
        return self.begin + self.master.numel()

    @property
    def is_tied_embedding(self) -> bool:
        """True where other pipeline stages hold a copy of this parameter: the word embeddings, if
        the output layer or multi-token prediction shares them."""
        return getattr(self.parameter, "shared_embedding", False)


class MasterShard:
    """This rank's fp32 masters.

    Args:
        optimizer: megatron-core's, a ``DistributedOptimizer`` or several, chained.

    Raises:
        TypeError: one of them is another optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizers = distributed_optimizers(optimizer)
        self.chunks = self._chunks()
        parts = [part for inner in self.optimizers for part in _parts_of(inner)]
        # The tied embedding comes last: it stays in one fragment on all stages that hold it.
        tied = [part for part in parts if part.is_tied_embedding]
        self.parts = [part for part in parts if not part.is_tied_embedding] + tied
        position = 0
        for part in self.parts:
            part.begin = position
            position = part.end
        self.numel = position
        self.tail = sum(part.master.numel() for part in tied)
        """Values of the tied embedding, at the end."""
        self._copies = self._groups_of_copies()

    @property
    def device(self) -> torch.device:
        """The device of the masters."""
        return self.parts[0].master.device if self.parts else torch.device("cpu")

    @property
    def sent(self) -> int:
        """The number of values that this rank sends to other data centres: all, but for a copy of the
        tied embedding that is not the first."""
        is_follower = self.tail and _embedding_group().rank() > 0
        return self.numel - self.tail if is_follower else self.numel

    def _chunks(self) -> list[torch.nn.Module]:
        """Return the wrapped model chunks of all optimizers, each once."""
        chunks: list[torch.nn.Module] = []
        for optimizer in self.optimizers:
            chunks += [chunk for chunk in optimizer.model_chunks if chunk not in chunks]
        return chunks

    def _groups_of_copies(self) -> list[tuple[dist.ProcessGroup, list[MasterPart]]]:
        """Return the parts that ranks of a group hold alike, by group; the first rank's count."""
        tensor_ranks = parallel_state.get_tensor_model_parallel_group()
        expert_ranks = parallel_state.get_expert_tensor_parallel_group()
        cut: set[torch.nn.Parameter] = set()
        if tensor_ranks.size() > 1 or expert_ranks.size() > 1:
            for chunk in self.chunks:
                cut.update(sharded_without_mark(chunk.module))
        dense: list[MasterPart] = []
        experts: list[MasterPart] = []
        for part in self.parts:
            parameter = part.parameter
            if getattr(parameter, "tensor_model_parallel", False) or parameter in cut:
                continue
            is_expert = not getattr(parameter, "allreduce", True)
            (experts if is_expert else dense).append(part)
        groups = [(tensor_ranks, dense), (expert_ranks, experts)]
        # After the tensor-parallel ranks: the first stage's copies are alike among these by then.
        if self.tail:
            groups.append((_embedding_group(), [p for p in self.parts if p.is_tied_embedding]))
        return [(group, parts) for group, parts in groups if group.size() > 1 and parts]

    def align(self, vector: torch.Tensor, begin: int, end: int, ledger: Ledger) -> None:
        """Give all copies of a part of the vector the first rank's values. Collective inside this
        data centre.

        Args:
            vector: fp32 ``[n]``, such as the anchor.
            begin: first position of what has changed.
            end: the one after the last.
            ledger: counts what is sent.
        """
        for group, parts in self._copies:
            views = [vector[max(part.begin, begin) : min(part.end, end)] for part in parts]
            align([view for view in views if view.numel()], group, ledger)

    def _between(self, begin: int, end: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield views of the masters in a span of the vector, and their positions in the span."""
        for part in self.parts:
            first = max(part.begin, begin)
            last = min(part.end, end)
            if first < last:
                view = part.master[first - part.begin : last - part.begin]
                yield view, slice(first - begin, last - begin)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of the masters at positions ``begin`` to ``end``, fp32."""
        vector = torch.empty(end - begin, dtype=torch.float32, device=self.device)
        for view, span in self._between(begin, end):
            vector[span].copy_(view)
        return vector

    def mix(self, anchor: torch.Tensor, begin: int, end: int, local_share: float) -> None:
        """Set masters to a mixture of their own values and the anchor's; weights follow by
        ``publish``.

        Args:
            anchor: fp32, the anchor at positions ``begin`` to ``end``.
            begin: the first position.
            end: the one after the last.
            local_share: of the masters' own values; 0 takes over the anchor, bit for bit.
        """
        for view, span in self._between(begin, end):
            if local_share:
                view.mul_(local_share).add_(anchor[span], alpha=1 - local_share)
            else:
                view.copy_(anchor[span])

    def publish(self) -> None:
        """Put the masters into the weights of all data-parallel ranks. Collective inside this data
        centre."""
        for optimizer in self.optimizers:
            # Also where the last step was skipped, and Megatron has copied nothing itself. By way
            # of the hook of compressed weights, where they are compressed.
            optimizer._copy_main_params_to_model_params()
        self.gather()

    def gather(self) -> None:
        """Gather every rank's shard of the weights. Collective inside this data centre."""
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def weights(self) -> torch.Tensor:
        """Return a copy of this shard's weights as bytes, uint8; they are not the masters'
        roundings where compressed updates lag behind."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.cat([empty, *(part.weight.view(torch.uint8) for part in self.parts)])

    def set_weights(self, stored: torch.Tensor) -> None:
        """Put weights back that ``weights`` returned, on all data-parallel ranks. Collective."""
        position = 0
        # Bytes, since parts may be of several types: a router is fp32 beside bf16 matrices.
        for part in self.parts:
            as_bytes = part.weight.view(torch.uint8)
            as_bytes.copy_(stored[position : position + len(as_bytes)])
            position += len(as_bytes)
        self.gather()

    def set_weights_to(self, vector: torch.Tensor) -> None:
        """Put a vector, rounded, into the weights of all data-parallel ranks. Collective."""
        for part in self.parts:
            part.weight.copy_(vector[part.begin : part.end])
        self.gather()

    def take_weights(self) -> None:
        """Set masters to the weights, as after a load of weights alone."""
        for part in self.parts:
            part.master.copy_(part.weight)

    def layout(self) -> str:
        """Return a hash of which values stand where in this rank's vector."""
        described = [
            (tuple(part.parameter.shape), str(part.weight.dtype), part.begin, part.end)
            for part in self.parts
        ]
        return hashlib.sha256(repr((described, self.sent)).encode()).hexdigest()[:16]


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers of a megatron-core optimizer that update something.

    Raises:
        TypeError: it has parts of another kind.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for inner in chained:
        if not isinstance(inner, DistributedOptimizer):
            raise TypeError(f"local steps need the distributed optimizer, not {type(inner)}")
    return [inner for inner in chained if not inner.is_stub_optimizer]


def _parts_of(optimizer: Any) -> Iterator[MasterPart]:
    """Yield the parts of a distributed optimizer, in an order that depends on the model alone."""
    for models, masters in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for parameters, shards in zip(models, masters, strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                # Where the parameter's part lies in its bucket.
                in_bucket = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
                bucket = optimizer.buffers[buffer_index].buckets[bucket_index]
                weight = bucket.param_data.view(-1)[in_bucket.start : in_bucket.end]
                yield MasterPart(parameter, shard.detach().view(-1), weight.detach())


def _embedding_group() -> dist.ProcessGroup:
    """Return the pipeline stages that hold the tied embedding; the first one's copy counts."""
    return parallel_state.get_embedding_group()
