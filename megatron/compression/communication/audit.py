"""The check of the ledger: what torch.distributed was given in an iteration, also by layers of the
user's own that communicate by themselves."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from megatron.compression.communication.ledger import DIMENSIONS, Ledger, bytes_sent
from megatron.compression.patches import running, symbols

Groups = Sequence[dist.ProcessGroup]
NEGLIGIBLE = 4096
"""Bytes an iteration that need not be in the ledger: scalar reductions (loss, gradient norm,
overflow)."""

_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    # as torch calls them from 2.15 on
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
}
"""Methods of a process group: the ledger's operation, and which argument is the buffer. All
functions of torch.distributed come down to these, those that Megatron holds by another name too."""
_SUMS = ("all_reduce", "reduce_scatter")
"""Operations without payloads: a backend cannot add up codes."""
_OPERATIONS = tuple(dict.fromkeys(operation for operation, _ in _METHODS.values()))
_KEYS = list(product(_OPERATIONS, (False, True)))
"""(operation, whether payloads): what is compared."""


class BackendAudit:
    """Counts what this process gives to torch.distributed in one iteration, and compares the ledger
    with it.

    The methods of ``ProcessGroup`` are replaced meanwhile. Where other runs are open in the
    process, their ledgers count as well: groups carry what all of them send. Not seen: what does
    not use torch.distributed (symmetric and host memory, Transformer Engine's user buffers).

    Args:
        ledger: the run's.
        groups: asked at the end; by dimension (a key of ``DIMENSIONS``) this rank's process groups,
            data parallelism's with context parallelism. The same keys in the same order on all
            ranks. A group whose ranks are some of a dimension's belongs to it. Dimensions that
            share ranks (experts and data) are looked at together.
    """

    def __init__(self, ledger: Ledger, groups: Callable[[], Mapping[str, Groups]]) -> None:
        self.ledger = ledger
        self.groups = groups
        self.given: Counter[tuple[dist.ProcessGroup, str, bool]] = Counter()
        """Bytes sent by (group, operation, whether they are a codec's payload, which is uint8)."""
        self._is_counting = False
        self._is_finished = False
        self._before: Counter[tuple[str, str, bool]] = Counter()
        """What the ledgers had when counting began."""
        self._known: Counter[tuple[str, str, bool]] = Counter()
        """What they have counted until it ended."""

    def start_with_first_forward(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Start when one of these modules is first called in training mode."""
        handles: list = []

        # Chunks run one after the other; the first of them starts, and all hooks go.
        def on_forward(module: torch.nn.Module, args: tuple) -> None:
            if module.training and not self._is_finished:
                self.start()
                # A hook may remove itself, and those of the other chunks, while it runs.
                while handles:
                    handles.pop().remove()

        handles += [chunk.register_forward_pre_hook(on_forward) for chunk in chunks]

    def start(self) -> None:
        """Begin to count."""
        if self._is_counting:
            return
        self._is_counting = True
        # What was sent before is known, too, and is subtracted.
        self._before = self._in_ledgers()
        for name, (operation, index) in _METHODS.items():
            if name in vars(dist.ProcessGroup):  # another version of torch may lack it
                wrap = _counting(operation, index)
                symbols.extend(dist.ProcessGroup, name, (), wrap, self._count)

    def stop(self) -> None:
        """End counting, and leave ``ProcessGroup`` as it was."""
        if not self._is_counting:
            return
        self._is_counting = False
        for name in _METHODS:
            # Other sessions may still count.
            symbols.retract(dist.ProcessGroup, name, self._count)
        self._known = self._in_ledgers() - self._before

    def abandon(self) -> None:
        """Stop without a result: the groups also carry what no ledger counts."""
        self._is_finished = True
        self.stop()

    def __enter__(self) -> "BackendAudit":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def finish(self, ranks: dist.ProcessGroup | None = None) -> list[str]:
        """Stop, and return what was sent and is not in the ledger, a line each; nothing on every
        later call.

        Collective over ``ranks``, by default all of the job, which get the same lines.
        """
        if self._is_finished:
            return []
        self._is_finished = True
        self.stop()
        groups = self.groups()
        order = list(groups)
        joined = _joined(groups)
        # A row a dimension on every rank, whatever is joined there. Of unequal all-to-alls only the
        # sums over ranks agree.
        sums = torch.zeros(len(order), len(_KEYS), dtype=torch.float64)
        for names, members in joined:
            sums[order.index(names[0])] = self._missing(members, names)
        # NCCL reduces tensors on devices alone.
        if torch.cuda.is_available() and dist.get_backend(ranks) != "gloo":
            sums = sums.cuda()
        # What one rank sends too much another may have sent too little of: unequal all-to-alls are
        # compared in sum.
        dist.all_reduce(sums, group=ranks)
        totals = dict(zip(order, sums.clamp_min(0).sum(1).tolist(), strict=True))
        lines = []
        for names, _ in joined:
            mean = totals[names[0]] / dist.get_world_size(ranks)
            if mean > NEGLIGIBLE:
                dimensions = " and ".join(name.replace(" parallel", "") for name in names)
                lines.append(
                    f"{dimensions} parallelism sent {mean:,.0f} bytes in the first iteration that "
                    "the ledger does not know (mean over all ranks): a layer, a hook or another "
                    "model communicates by itself, and is neither compressed nor in the ratio"
                )
        return lines

    def _missing(self, members: set[int], names: Sequence[str]) -> torch.Tensor:
        """Return bytes beyond the ledgers' by ``_KEYS``: what was given over groups of these ranks,
        less what is known of these dimensions. Payloads are apart, since some transports are not
        seen."""
        counted: Counter[tuple[str, bool]] = Counter()
        for (group, operation, is_payload), sent in self.given.items():
            ranks = set(dist.get_process_group_ranks(group))
            # A group belongs to the dimensions whose ranks hold all of its ranks.
            if len(ranks) > 1 and ranks <= members:
                counted[operation, is_payload] += sent
        known: Counter[tuple[str, bool]] = Counter()
        for (traffic, operation, is_payload), sent in self._known.items():
            if any(traffic.startswith(DIMENSIONS[name]) for name in names):
                known[operation, is_payload] += sent
        missing = []
        for key in _KEYS:
            difference = counted[key] - known[key]
            if key[0] != "all_to_all":  # whose sizes differ between ranks, so that ranks cancel out
                difference = max(0, difference)
            missing.append(difference)
        return torch.tensor(missing, dtype=torch.float64)

    def _in_ledgers(self) -> Counter[tuple[str, str, bool]]:
        """Return bytes sent so far by (traffic, operation, whether they are a codec's payload)."""
        # Groups carry what all runs of the process send.
        ledgers = [self.ledger]
        for run in running.open_runs():
            if run.ledger is not self.ledger:
                ledgers.append(run.ledger)
        counts: Counter[tuple[str, str, bool]] = Counter()
        for ledger in ledgers:
            for (_, traffic, reason, operation, _), tally in ledger.tallies.items():
                # What a compressor of gradients leaves out is sent in its payloads.
                left_out = (traffic, reason, operation) == ("dp.gradient", "excluded", "all_to_all")
                is_payload = reason in ("compressed", "fp8") or left_out
                counts[traffic, operation, is_payload and operation not in _SUMS] += tally.sent
        return counts

    def _count(
        self, group: dist.ProcessGroup, operation: str, payload: bool, sent: int, times: int = 1
    ) -> None:
        """Count one call; in a CUDA graph at each replay while the audit runs."""
        # A capture sends nothing.
        captured = self.ledger.captures.captured
        if captured is not None:
            captured[self._count, (group, operation, payload, sent)] += times
        elif self._is_counting:
            self.given[group, operation, payload] += times * sent


def _counting(operation: str, index: int) -> Callable[[Callable, list[Callable]], Callable]:
    """Return what makes of a process group's method one that counts: its ``index``th argument is
    the buffer."""

    def wrap(method: Callable, calls: list[Callable]) -> Callable:
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if len(args) > index and _sends(operation, group, args):
                buffers = pytree.tree_leaves(args[index])
                size = sum(buffer.nbytes for buffer in buffers)
                is_bytes = bool(buffers) and buffers[0].dtype == torch.uint8
                sent = bytes_sent(operation, size, group.size())
                for count in calls:
                    count(group, operation, is_bytes and operation not in _SUMS, sent)
            return method(group, *args, **kwargs)

        return counted

    return wrap


def _sends(operation: str, group: dist.ProcessGroup, args: tuple) -> bool:
    """Return whether this rank sends: of a broadcast the root alone."""
    if operation != "broadcast":
        return True
    # torch gives the root within the group, in the options.
    root = getattr(args[1], "rootRank", 0) if len(args) > 1 else 0
    return root == group.rank()


def _joined(groups: Mapping[str, Groups]) -> list[tuple[list[str], set[int]]]:
    """Return (dimensions, ranks) with more than one rank, those that have two ranks in common put
    together."""
    result: list[tuple[list[str], set[int]]] = []
    for name, dimension_groups in groups.items():
        members: set[int] = set()
        for group in dimension_groups:
            members.update(dist.get_process_group_ranks(group))
        names = [name]
        # Two ranks in common can exchange under either name.
        for entry in [entry for entry in result if len(entry[1] & members) > 1]:
            result.remove(entry)
            names = entry[0] + names
            members |= entry[1]
        if len(members) > 1:
            result.append((names, members))
    return result
