"""The check of the ledger: what torch.distributed was given in an iteration, also by layers of the user's own
that communicate by themselves."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from megatron.compression.communication.ledger import DIMENSIONS, Ledger, bytes_sent
from megatron.compression.patches import symbols

Groups = Sequence[dist.ProcessGroup]
NEGLIGIBLE = 4096
"""Bytes an iteration that need not be in the ledger: scalar reductions (loss, gradient norm, overflow)."""


_METHODS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all_reduce", 0)),
    **dict.fromkeys(
        ("allgather", "_allgather_base", "allgather_into_tensor_coalesced"), ("all_gather", 0)
    ),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base"), ("reduce_scatter", 1)),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    # as torch calls them from 2.15 on
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), ("all_gather", 0)),
    **dict.fromkeys(
        ("reduce_scatter_single", "reduce_scatter_single_coalesced"), ("reduce_scatter", 1)
    ),
    **dict.fromkeys(("all_to_all_single", "alltoall", "alltoall_base"), ("all_to_all", 1)),
    **{"broadcast": ("broadcast", 0), "send": ("send", 0)},
}
"""Methods of a process group: the ledger's operation, and which argument is the buffer. All functions of
torch.distributed come down to these, those that Megatron holds by another name too."""
_SUMS = ("all_reduce", "reduce_scatter")
"""Operations without payloads: a backend cannot add up codes."""
_KEYS = list(product(dict.fromkeys(operation for operation, _ in _METHODS.values()), (False, True)))
"""(operation, whether payloads): what is compared."""


class BackendAudit:
    """Counts what this process gives to torch.distributed in one iteration, and compares the ledger with it.

    It wraps the methods of ``ProcessGroup`` meanwhile. Not seen: what does not use torch.distributed
    (symmetric and host memory, Transformer Engine's user buffers).

    Args:
        groups: asked at the end; by dimension (a key of ``DIMENSIONS``) this rank's process groups, data
            parallelism's with context parallelism. The same keys in the same order on all ranks. A group
            whose ranks are some of a dimension's belongs to it. Dimensions that share ranks (experts and
            data) are looked at together.
    """

    def __init__(self, ledger: Ledger, groups: Callable[[], Mapping[str, Groups]]) -> None:
        self.ledger, self.groups = ledger, groups
        self.given: Counter[tuple[dist.ProcessGroup, str, bool]] = Counter()
        """Bytes sent by (group, operation, whether they are a codec's payload, which is uint8)."""
        self._originals: dict[str, Callable] = {}
        self._before: Counter[tuple[str, str, bool]] = Counter()
        self._known: Counter[tuple[str, str, bool]] = Counter()
        self._finished = False

    def start_with_first_forward(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Start when one of these modules is first called in training mode."""
        handles: list = []

        def on_forward(module: torch.nn.Module, args: tuple) -> None:
            if module.training and not self._finished:
                self.start()
                while handles:
                    handles.pop().remove()

        handles += [chunk.register_forward_pre_hook(on_forward) for chunk in chunks]

    def start(self) -> None:
        """Begin to count."""
        if self._originals:
            return
        self._before = self._in_ledger()
        for name, (operation, position) in _METHODS.items():
            original = dist.ProcessGroup.__dict__.get(name)
            if original is not None:  # another version of torch
                self._originals[name] = original
                counting = self._counting(original, operation, position)
                symbols.put(
                    dist.ProcessGroup, name, counting, "counts what is given to the backend"
                )

    def stop(self) -> None:
        """Leave ``ProcessGroup`` as it was."""
        for name, original in self._originals.items():
            symbols.put(dist.ProcessGroup, name, original, "has been counted")
        if self._originals:
            self._known = self._in_ledger() - self._before
        self._originals = {}

    def abandon(self) -> None:
        """Stop without a result: the groups also carry what another ledger counts."""
        self._finished = True
        self.stop()

    def __enter__(self) -> "BackendAudit":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def finish(self, ranks: dist.ProcessGroup | None = None) -> list[str]:
        """Stop, and say what was sent and is not in the ledger, a line each; empty on every later call.

        Collective over ``ranks``, by default all of the job, which get the same lines.
        """
        if self._finished:
            return []
        self._finished = True
        self.stop()
        groups = self.groups()
        order, joined = list(groups), _joined(groups)
        # A row a dimension on every rank, whatever is joined there. Of unequal all-to-alls only the sums over
        # ranks agree.
        sums = torch.zeros(len(order), len(_KEYS), dtype=torch.float64)
        for names, members in joined:
            sums[order.index(names[0])] = self._missing(members, names)
        sums = sums.to(
            "cuda" if torch.cuda.is_available() and dist.get_backend(ranks) != "gloo" else "cpu"
        )
        dist.all_reduce(sums, group=ranks)
        totals = dict(zip(order, sums.clamp_min(0).sum(1).tolist(), strict=True))
        return [
            f"{' and '.join(name.replace(' parallel', '') for name in names)} parallelism sent {mean:,.0f} "
            "bytes in the first iteration that the ledger does not know (mean over all ranks): a layer, a "
            "hook or another model communicates by itself, and is neither compressed nor in the ratio"
            for names, _ in joined
            if (mean := totals[names[0]] / dist.get_world_size(ranks)) > NEGLIGIBLE
        ]

    def _missing(self, members: set[int], names: Sequence[str]) -> torch.Tensor:
        """Bytes beyond the ledger's by ``_KEYS``; payloads separately, since some transports are not seen."""
        given: Counter[tuple[str, bool]] = Counter()
        for (group, operation, payload), sent in self.given.items():
            ranks = set(dist.get_process_group_ranks(group))
            if len(ranks) > 1 and ranks <= members:
                given[operation, payload] += sent
        known: Counter[tuple[str, bool]] = Counter()
        for (traffic, operation, payload), sent in self._known.items():
            if any(traffic.startswith(DIMENSIONS[name]) for name in names):
                known[operation, payload] += sent
        missing = [given[key] - known[key] for key in _KEYS]
        signed = [
            more if key[0] == "all_to_all" else max(0, more)
            for key, more in zip(_KEYS, missing, strict=True)
        ]
        return torch.tensor(signed, dtype=torch.float64)

    def _in_ledger(self) -> Counter[tuple[str, str, bool]]:
        """Bytes sent so far by (traffic, operation, whether they are a codec's payload)."""
        counts: Counter[tuple[str, str, bool]] = Counter()
        for (_, traffic, kind, operation, _), tally in self.ledger.tallies.items():
            # what a compressor of gradients leaves out is sent in its payloads
            left_out = (traffic, kind, operation) == ("dp.gradient", "excluded", "all_to_all")
            payload = (kind in ("compressed", "fp8") or left_out) and operation not in _SUMS
            counts[traffic, operation, payload] += tally.sent
        return counts

    def _counting(self, original: Callable, operation: str, position: int) -> Callable:
        @functools.wraps(original)
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            root = (
                getattr(args[1], "rootRank", 0) if operation == "broadcast" and len(args) > 1 else 0
            )
            if len(args) > position and (operation != "broadcast" or root == group.rank()):
                buffers = pytree.tree_leaves(args[position])
                size = sum(buffer.nbytes for buffer in buffers)
                payload = (
                    bool(buffers) and buffers[0].dtype == torch.uint8 and operation not in _SUMS
                )
                self._count(group, operation, payload, bytes_sent(operation, size, group.size()))
            return original(group, *args, **kwargs)

        return counted

    def _count(
        self, group: dist.ProcessGroup, operation: str, payload: bool, sent: int, times: int = 1
    ) -> None:
        captured = self.ledger.captures.captured
        if captured is not None:
            captured[self._count, (group, operation, payload, sent)] += times
        elif self._originals:
            self.given[group, operation, payload] += times * sent


def _joined(groups: Mapping[str, Groups]) -> list[tuple[list[str], set[int]]]:
    """(dimensions, ranks) with more than one rank, those that have two ranks in common put together."""
    result: list[tuple[list[str], set[int]]] = []
    for name, own in groups.items():
        members = {rank for group in own for rank in dist.get_process_group_ranks(group)}
        names = [name]
        for other in [other for other in result if len(other[1] & members) > 1]:
            result.remove(other)
            names, members = other[0] + names, members | other[1]
        if len(members) > 1:
            result.append((names, members))
    return result
