"""How payloads travel: the transports, and which one each process group uses.

    TorchTransport       torch.distributed (NCCL, gloo)
    HostTransport        pinned host memory, by copy engines (host_memory.py)
    SymmetricTransport   one kernel a collective over symmetric memory (taco_kernels.symmetric_memory)

All give the same bits and report the same bytes for the same collective.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from megatron.compression.codecs import Codec
from megatron.compression.communication.host_memory import DeviceBytes, HostMemory, HostMemoryError
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.objects import gather_objects
from megatron.compression.communication.overflow import Overflow
from megatron.compression.communication.work import Work, join
from megatron.compression.errors import CompressionConfigError
from taco_kernels.common.host import host_identity

OnSend = Callable[[str, int], Any]
"""Called with (operation, bytes this rank sends) for every call of the backend."""
Rows = Sequence[int] | None
"""Rows for each rank of the group, or from each; None: the same number."""
TCP_COMMUNICATORS = 2  # measured: docs/results/collectives.md

_TO_ALL, _GATHER = AllToAllOptions(), AllgatherOptions()
_TO_ALL.asyncOp = _GATHER.asyncOp = True


class TransportError(CompressionConfigError):
    """``--compression-transport symmetric`` or ``host`` cannot be honoured."""


class TorchTransport:
    """Payload exchanges over torch.distributed.

    Payloads are uint8: both backends take it, and gloo refuses the float8 dtypes. Calls are those of the
    process group: torch.distributed's functions around them cost the host as much again.

    Args:
        on_send: receives the operation's name and its bytes; None when nobody counts.
        more_groups: further process groups of the same ranks; each takes its share of every payload. One
            communicator does not fill some links (TCP).
        overflow: the run's state of lossless payloads; None: one of its own.
    """

    overlaps = True
    """Whether a collective under way leaves the device to other work."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_send: OnSend | None = None,
        more_groups: Sequence[dist.ProcessGroup] = (),
        overflow: Overflow | None = None,
    ) -> None:
        self.group = group
        self.groups = (group, *more_groups)
        self.world_size = group.size()
        self.on_send = on_send
        self.overflow = overflow or Overflow()
        """Of the run that sends: whether its lossless payloads fit."""

    def fuses(self, codec: Codec) -> bool:
        """Whether the transport does this codec's collectives in whole, by the three methods below."""
        return False

    fused_all_reduce: Callable[..., Work]
    fused_reduce_scatter: Callable[..., Work]
    fused_all_gather: Callable[..., Work]

    def all_to_all(
        self, rows: torch.Tensor, to: Rows = None, came: Rows = None
    ) -> tuple[torch.Tensor, Any]:
        """Start to send ``[n, size]`` of any dtype, the first ``to[0]`` rows to rank 0 and so on (None: the
        same number for all). ``[sum(came), size]``, in the order of the senders once the handle has been
        waited for."""
        rows = rows.contiguous()
        received = (
            torch.empty_like(rows) if came is None else rows.new_empty((sum(came), rows.shape[1]))
        )
        if self.on_send is not None:
            self.on_send("all_to_all", rows.nbytes * (self.world_size - 1) // self.world_size)
        splits = ([], []) if to is None or came is None else (list(came), list(to))
        if len(self.groups) == 1:
            return received, self.group.alltoall_base(received, rows, *splits, _TO_ALL)
        return received, self._shared(
            lambda group, into, part: group.alltoall_base(into, part, *splits, _TO_ALL),
            received,
            rows,
        )

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to gather ``[1, size]`` of every rank into ``[W, size]``."""
        payload = payload.contiguous()
        gathered = payload.new_empty((self.world_size, payload.shape[1]))
        if self.on_send is not None:
            self.on_send("all_gather", payload.nbytes * (self.world_size - 1))
        if len(self.groups) == 1:
            return gathered, self.group._allgather_base(gathered, payload, _GATHER)
        return gathered, self._shared(
            lambda group, into, part: group._allgather_base(into, part, _GATHER), gathered, payload
        )

    def _shared(
        self, start: Callable[..., dist.Work], whole: torch.Tensor, x: torch.Tensor
    ) -> Work:
        """``start(group, into, part)`` of a share of the last dimension on each communicator."""
        shares = [share.contiguous() for share in x.tensor_split(len(self.groups), dim=-1)]
        parts = [whole.new_empty((len(whole), share.shape[-1])) for share in shares]
        works = [Work(start(*one)) for one in zip(self.groups, parts, shares, strict=True)]
        return join(works).then(lambda _: torch.cat(parts, dim=1, out=whole))

    def any_rank(self, flag: torch.Tensor) -> bool:
        """Whether ``flag``, uint8 ``[]``, is set on any rank of the group. Counted; the host waits for it."""
        return self.any_ranks(flag[None])[0]

    def any_ranks(self, flags: torch.Tensor) -> list[bool]:
        """As ``any_rank`` for each of ``flags``, uint8 ``[n]``, in one reduction."""
        found = flags.to(torch.int32)
        if self.on_send is not None:
            self.on_send("all_reduce", bytes_sent("all_reduce", found.nbytes, self.world_size))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(one) for one in found.tolist()]


class HostTransport(TorchTransport):
    """Exchanges by copy engines through the group's ``HostMemory``; counted as over torch.distributed."""

    def __init__(
        self,
        memory: HostMemory,
        on_send: OnSend | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        super().__init__(memory.group, on_send, overflow=overflow)
        self.memory = memory

    def all_to_all(
        self, rows: torch.Tensor, to: Rows = None, came: Rows = None
    ) -> tuple[torch.Tensor, Any]:
        """As over torch.distributed."""
        even = [len(rows) // self.world_size] * self.world_size
        to, came = to or even, came or even
        if sum(to) != len(rows) or not len(to) == len(came) == self.world_size:
            raise ValueError(f"splits {to} and {came} of {len(rows)} rows, {self.world_size} ranks")
        rows = rows.contiguous()
        received = rows.new_empty((sum(came), rows.shape[1]))
        if self.on_send is not None:
            self.on_send("all_to_all", rows.nbytes * (self.world_size - 1) // self.world_size)
        return received, self.memory.exchange(
            _parts(rows, to), _parts(received, came), (rows, received)
        )

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As over torch.distributed."""
        payload = payload.contiguous()
        gathered = payload.new_empty((self.world_size, payload.shape[1]))
        if self.on_send is not None:
            self.on_send("all_gather", payload.nbytes * (self.world_size - 1))
        own = [DeviceBytes(payload.data_ptr(), payload.nbytes)] * self.world_size
        return gathered, self.memory.exchange(
            own, _parts(gathered, [1] * len(own)), (payload, gathered)
        )


def _parts(rows: torch.Tensor, counts: Sequence[int]) -> list[DeviceBytes]:
    """Where each rank's rows lie."""
    address, size = rows.data_ptr(), rows.shape[1] * rows.itemsize
    ends = accumulate(counts, initial=0)
    return [
        DeviceBytes(address + end * size, count * size)
        for end, count in zip(ends, counts, strict=False)
    ]


class SymmetricTransport(TorchTransport):
    """Symmetric memory for the payloads of codecs that have a ``fused_config``; torch.distributed for others.

    A collective runs on the current stream, since it fills the device. Bytes are those stored in the peers'
    memory without flags, eight bytes a tile; operations are named after the exchanges that they replace.
    """

    overlaps = False

    def __init__(
        self, symmetric, on_send: OnSend | None = None, overflow: Overflow | None = None
    ) -> None:
        super().__init__(symmetric.group, on_send, overflow=overflow)
        self.symmetric = symmetric

    def fuses(self, codec: Codec) -> bool:
        """The codec says so, of both hops and with the same groups."""
        configs = (hop.fused_config for hop in codec.hops)
        first, second = (one and (one.group_size, one.hadamard, one.outliers) for one in configs)
        return first is not None and first == second

    def fused_all_reduce(
        self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None
    ) -> Work:
        """The whole of ``all_reduce``."""
        first, second = (hop.fused_config for hop in codec.hops)
        assert first is not None, "fuses() is asked before"
        out = self.symmetric.all_reduce(
            x, first, out=out, config_out=None if codec.one_exchange else second
        )
        if self.world_size == 2 and codec.one_exchange:
            return self._completed(out, x.numel(), all_gather=first)
        piece = first.chunk_numel(x.numel(), self.world_size)
        return self._completed(out, piece, all_to_all=first, all_gather=second)

    def fused_reduce_scatter(
        self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None
    ) -> Work:
        """The whole of ``reduce_scatter``."""
        out = self.symmetric.reduce_scatter(x, codec.fused_config, out=out)
        return self._completed(out, x.numel() // self.world_size, all_to_all=codec.fused_config)

    def fused_all_gather(
        self,
        payload: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        codec: Codec,
        out: torch.Tensor | None = None,
    ) -> Work:
        """The whole of ``all_gather_encoded``."""
        if out is None:
            out = torch.empty(
                (self.world_size * shape[0], *shape[1:]), dtype=dtype, device=payload.device
            )
        self.symmetric.all_gather_encoded(payload, shape, dtype, codec.fused_config, out=out)
        return self._completed(out, torch.Size(shape).numel(), all_gather=codec.fused_config)

    def _completed(self, out: torch.Tensor, numel: int, **exchanges) -> Work:
        """``out``, after what each exchange of ``numel`` values by its config has stored is reported."""
        if self.on_send is not None:
            for operation, config in exchanges.items():
                self.on_send(operation, self.symmetric.stored_bytes(numel, config))
        return Work.completed(out)


class Transports:
    """Which transport each process group uses, by ``--compression-transport``; asked for by every site. As
    many ``communicators`` share each payload over torch.distributed; 0 lets ``prepare`` decide."""

    def __init__(self, choice: str = "auto", communicators: int = 0) -> None:
        self.choice, self.communicators = choice, communicators
        self._memory: dict[dist.ProcessGroup, object | None] = {}
        self._more_groups: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}
        self.overflow = Overflow()
        """Of the run, which replaces it by its own."""
        self.version = 0
        """Changes where a group may get another transport."""

    def prepare(self, groups: Iterable[dist.ProcessGroup], fused: bool = True) -> list[str]:
        """Decide for this rank's groups and set up their memory. Collective over all ranks of the job;
        members of a group give it in the same place.

        Args:
            fused: whether collectives may be fused kernels over symmetric memory.
        Returns: A line for the log for each group that has not been decided before.
        Raises: TransportError: a kind of memory was asked for and is not possible.
        """
        self.version += 1
        lines: list[str] = []
        wanted: list[list[int]] = []
        owners: list[dist.ProcessGroup] = []
        for group in groups:
            if group in self._memory:
                continue
            line = self._share_memory(group, fused)
            count = self.count(group) if self._memory[group] is None else 1
            wanted += [dist.get_process_group_ranks(group)] * (count - 1)
            owners += [group] * (count - 1)
            lines.append(
                line + (f", a share on each of {count} communicators" if count > 1 else "")
            )
        for group, more in zip(owners, new_groups(wanted), strict=True):
            self._more_groups.setdefault(group, []).append(more)
        return lines

    def count(self, group: dist.ProcessGroup) -> int:
        """How many communicators share a payload over torch.distributed. Collective over the group."""
        return self.communicators or (TCP_COMMUNICATORS if over_tcp(group) else 1)

    def host_memory(self, group: dist.ProcessGroup) -> tuple[HostMemory | None, str]:
        """Decide for a group without fused kernels whose caller makes its communicators: the memory, None for
        torch.distributed, and a line for the log. Collective, once."""
        line = self._share_memory(group, fused=False)
        memory = self._memory[group]
        return (memory if isinstance(memory, HostMemory) else None), line

    def _share_memory(self, group: dist.ProcessGroup, fused: bool) -> str:
        """Set up what memory the choice and the links allow; a line for the log, or TransportError, the same
        on every rank of the group."""
        self._memory[group], how = self._memory_of(group, fused)
        if self._memory[group] is not None:
            if self.communicators > 1:
                how += f"; MEGATRON_COMPRESSION_COMMUNICATORS={self.communicators} has nothing to share there"
            return f"payloads travel {how}"
        if self.choice == "host" or (self.choice == "symmetric" and fused):
            raise TransportError(
                f"--compression-transport {self.choice} is not possible: {how}; use auto"
            )
        return f"payloads travel over torch.distributed ({how})"

    def _memory_of(self, group: dist.ProcessGroup, fused: bool) -> tuple[object | None, str]:
        """The memory and how payloads travel by it, or None and why."""
        if self.choice == "collective":
            return None, "--compression-transport collective"
        if not torch.cuda.is_available():
            return None, "no CUDA device"
        from taco_kernels import symmetric_memory

        if reason := symmetric_memory.hosts_reason(group):
            return None, reason
        disabled = _disabled(group)
        no_peers = "NCCL_P2P_DISABLE=1 asks for no peer access" if "P2P" in disabled else None
        no_peers = no_peers or symmetric_memory.peer_access_reason(group)
        why = "--compression-transport host"
        if self.choice != "host":
            if no_peers is None and fused:
                try:
                    memory = symmetric_memory.SymmetricGroup(group)
                except symmetric_memory.SymmetricMemoryError as error:
                    return None, str(error)
                return memory, f"over symmetric memory between {group.size()} ranks of one host"
            why = no_peers or "no fused kernels for these messages"
            if self.choice == "symmetric" or no_peers is None:
                return None, why
            if "SHM" in disabled:
                return None, f"{why}, NCCL_SHM_DISABLE=1 for none through host memory"
        try:
            host_memory = HostMemory(group)
        except HostMemoryError as error:
            before = "" if self.choice == "host" else f"{why}; "
            return None, f"{before}no host memory to share: {error}"
        return host_memory, f"through host memory between {group.size()} ranks ({why})"

    def transport(
        self, group: dist.ProcessGroup, on_send: OnSend | None = None, fused: bool = True
    ) -> TorchTransport:
        """The transport of a group; torch.distributed where ``prepare`` was not called or found no memory.
        ``fused`` as there."""
        memory = self._memory.get(group)
        if isinstance(memory, HostMemory):
            return HostTransport(memory, on_send, self.overflow)
        if memory is None or not fused:
            more_groups = self._more_groups.get(group, ())
            return TorchTransport(group, on_send, more_groups, self.overflow)
        return SymmetricTransport(memory, on_send, self.overflow)


def new_groups(
    wanted: Sequence[Sequence[int]], callers: dist.ProcessGroup | None = None
) -> list[dist.ProcessGroup] | None:
    """Make process groups of global ranks, also of the same several times.

    Collective over ``callers``: this rank is in all groups that it wants, whose other members want them in
    the same places of their lists.

    Args:
        wanted: the global ranks of each group.
        callers: the ranks that call; None: all of the job. Every rank then makes every group that any rank
            wants, in one order.

    Returns:
        The groups in the order of ``wanted``; None where some of the job's ranks alone cannot make any.
    """
    everyone = gather_objects([tuple(ranks) for ranks in wanted], callers)
    keys = {(number, ranks) for wishes in everyone for number, ranks in enumerate(wishes)}
    alone = callers is not None
    if alone and keys and not _agree_on_names(callers):
        return None
    created = {
        key: dist.new_group(list(key[1]), use_local_synchronization=alone)
        for key in sorted(keys)
        if not alone or dist.get_rank() in key[1]
    }
    return [created[number, tuple(ranks)] for number, ranks in enumerate(wanted)]


def _agree_on_names(callers: dist.ProcessGroup) -> bool:
    """Return whether these ranks would give a new group of theirs the same name. Collective over them.

    Without the job's other ranks torch names a group by its ranks and by the number of groups that a rank is
    in. Members with different numbers would wait for each other under different names, for ever.
    """
    memberships = len(distributed_c10d._world.pg_names)
    return len(set(gather_objects(memberships, callers))) == 1


def _own_disabled() -> set[str]:
    return {way for way in ("P2P", "SHM") if os.environ.get(f"NCCL_{way}_DISABLE") == "1"}


def _disabled(group: dist.ProcessGroup) -> set[str]:
    """P2P and SHM where NCCL_P2P_DISABLE or NCCL_SHM_DISABLE is 1 on any rank. Collective."""
    return set().union(*gather_objects(_own_disabled(), group))


def over_tcp(group: dist.ProcessGroup) -> bool:
    """Whether NCCL's links between the ranks of a group are TCP sockets: on several hosts without InfiniBand,
    and on one host where NCCL's variables leave nothing else. Collective, the same on every rank."""
    if dist.get_backend(group) != "nccl":
        return False
    adapters = Path("/sys/class/infiniband")
    infiniband = (
        os.environ.get("NCCL_IB_DISABLE") != "1" and adapters.is_dir() and any(adapters.iterdir())
    )
    hosts, sockets, fast = zip(
        *gather_objects((host_identity(), len(_own_disabled()) == 2, infiniband), group),
        strict=True,
    )
    return not all(fast) and (len(set(hosts)) > 1 or all(sockets))
