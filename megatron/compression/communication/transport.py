"""How payloads travel: the transports, and which one each process group uses.

    TorchTransport       torch.distributed (NCCL, gloo)
    HostTransport        pinned host memory, by copy engines (host_memory.py)
    SymmetricTransport   one kernel a collective (taco_kernels.symmetric_memory)

All give the same bits and report the same bytes for the same collective.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from megatron.compression.errors import CompressionConfigError, setting
from taco_kernels.common.host import host_identity

OnSend = Callable[[str, int], Any]
"""Called with (operation, bytes this rank sends) for every call of the backend."""
RowCounts = Sequence[int] | None
"""Rows for each rank of the group, or from each; None: the same number."""
TCP_COMMUNICATORS = 2
"""One connection does not fill a link of TCP; measured in docs/results/collectives.md."""

# Made once, not in each call.
_ALL_TO_ALL = AllToAllOptions()
_ALL_TO_ALL.asyncOp = True
_ALL_GATHER = AllgatherOptions()
_ALL_GATHER.asyncOp = True


class TransportError(CompressionConfigError):
    """``--compression-transport symmetric`` or ``host`` cannot be honoured."""


class TorchTransport:
    """Payload exchanges over torch.distributed.

    Payloads are uint8: both backends take it, and gloo refuses the float8 dtypes. Calls are those
    of the process group: torch.distributed's functions around them cost the host as much again.

    Args:
        on_send: receives the operation's name and its bytes; None when nobody counts.
        more_groups: further process groups of the same ranks; each takes its share of every
            payload. One communicator does not fill some links (TCP).
        overflow: the run's state of lossless payloads; None: one of its own.
    """

    overlaps = True
    """Whether a collective under way leaves the device to other work."""
    in_place = False
    """Whether a payload is encoded into the memory that it is gathered into."""

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
        """Return whether the transport does this codec's collectives in whole, by the three methods
        below."""
        return False

    fused_all_reduce: Callable[..., Work]
    fused_reduce_scatter: Callable[..., Work]
    fused_all_gather: Callable[..., Work]

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: RowCounts = None,
        recv_counts: RowCounts = None,
    ) -> tuple[torch.Tensor, Any]:
        """Start to send rows to each rank.

        Args:
            rows: ``[n, size]`` of any dtype, those for rank 0 first.
            send_counts: rows for each rank; None: the same number.
            recv_counts: rows from each rank; None: the same number.

        Returns: ``[sum(recv_counts), size]``, in the order of the senders, and a handle; it is
            filled when the handle has been waited for.
        """
        rows = rows.contiguous()
        if recv_counts is None:
            received = torch.empty_like(rows)
        else:
            received = rows.new_empty((sum(recv_counts), rows.shape[1]))
        if self.on_send is not None:
            self.on_send("all_to_all", rows.nbytes * (self.world_size - 1) // self.world_size)
        # Empty lists mean equal parts, which the backends send without a table of counts.
        outputs: list[int] = []
        inputs: list[int] = []
        if send_counts is not None and recv_counts is not None:
            outputs = list(recv_counts)
            inputs = list(send_counts)
        if len(self.groups) == 1:
            work = self.group.alltoall_base(received, rows, outputs, inputs, _ALL_TO_ALL)
            return received, work
        return received, self._shared(
            lambda group, into, part: group.alltoall_base(into, part, outputs, inputs, _ALL_TO_ALL),
            received,
            rows,
        )

    def all_gather(
        self, payload: torch.Tensor, gathered: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Start to gather payloads of every rank.

        Args:
            payload: uint8 ``[1, size]``, this rank's; it may be its row of ``gathered``.
            gathered: contiguous ``[W, size]`` for the result; None: a new tensor.

        Returns: the result, and a handle.
        """
        payload = payload.contiguous()
        if gathered is None:
            gathered = payload.new_empty((self.world_size, payload.shape[1]))
        if self.on_send is not None:
            self.on_send("all_gather", payload.nbytes * (self.world_size - 1))
        if len(self.groups) == 1:
            return gathered, self.group._allgather_base(gathered, payload, _ALL_GATHER)
        return gathered, self._shared(
            lambda group, into, part: group._allgather_base(into, part, _ALL_GATHER),
            gathered,
            payload,
        )

    def _shared(
        self, start: Callable[..., dist.Work], result: torch.Tensor, x: torch.Tensor
    ) -> Work:
        """Start an exchange on all communicators, each with a share of the last dimension.

        Args:
            start: starts one, of (group, its part of the result, its share of ``x``).
            result: ``[rows, size]``, filled when the work is done.
            x: ``[n, size]``.
        """
        # By bytes of each row, not by rows: every communicator has something for every rank.
        shares = [share.contiguous() for share in x.tensor_split(len(self.groups), dim=-1)]
        # Collectives need contiguous results, so the shares meet in a copy at the end.
        parts = [result.new_empty((len(result), share.shape[-1])) for share in shares]
        works = [
            Work(start(group, part, share))
            for group, part, share in zip(self.groups, parts, shares, strict=True)
        ]
        return join(works).then(lambda _: torch.cat(parts, dim=1, out=result))

    def any_rank(self, flag: torch.Tensor) -> bool:
        """Return whether ``flag``, uint8 ``[]``, is set on any rank.

        Counted; the host waits for it.
        """
        return self.any_ranks(flag[None])[0]

    def any_ranks(self, flags: torch.Tensor) -> list[bool]:
        """Return which of ``flags``, uint8 ``[n]``, are set on any rank, in one reduction."""
        # A type that every backend reduces.
        largest = flags.to(torch.int32)
        if self.on_send is not None:
            self.on_send("all_reduce", bytes_sent("all_reduce", largest.nbytes, self.world_size))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(value) for value in largest.tolist()]


class HostTransport(TorchTransport):
    """Exchanges by copy engines through the group's ``HostMemory``; counted as over
    torch.distributed."""

    in_place = True

    def __init__(
        self,
        memory: HostMemory,
        on_send: OnSend | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        super().__init__(memory.group, on_send, overflow=overflow)
        self.memory = memory

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: RowCounts = None,
        recv_counts: RowCounts = None,
    ) -> tuple[torch.Tensor, Any]:
        """Start to send rows to each rank; arguments and results as over torch.distributed.

        Raises:
            ValueError: counts that do not add up, which would copy past the tensors.
        """
        even = [len(rows) // self.world_size] * self.world_size
        # An empty list is no counts, as above.
        send_counts = send_counts or even
        recv_counts = recv_counts or even
        ranks = {len(send_counts), len(recv_counts)}
        if sum(send_counts) != len(rows) or ranks != {self.world_size}:
            raise ValueError(
                f"splits {send_counts} and {recv_counts} of {len(rows)} rows, "
                f"{self.world_size} ranks"
            )
        rows = rows.contiguous()
        received = rows.new_empty((sum(recv_counts), rows.shape[1]))
        if self.on_send is not None:
            self.on_send("all_to_all", rows.nbytes * (self.world_size - 1) // self.world_size)
        sends = _parts(rows, send_counts)
        receives = _parts(received, recv_counts)
        return received, self.memory.exchange(sends, receives, (rows, received))

    def all_gather(
        self, payload: torch.Tensor, gathered: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Start to gather payloads; arguments and results as over torch.distributed."""
        payload = payload.contiguous()
        if gathered is None:
            gathered = payload.new_empty((self.world_size, payload.shape[1]))
        if self.on_send is not None:
            self.on_send("all_gather", payload.nbytes * (self.world_size - 1))
        # The same bytes for every rank, this one included.
        sends = [DeviceBytes(payload.data_ptr(), payload.nbytes)] * self.world_size
        receives = _parts(gathered, [1] * self.world_size)
        rank = self.memory.rank
        if receives[rank].address == payload.data_ptr():
            sends[rank] = DeviceBytes(payload.data_ptr(), 0)  # it is there already
        return gathered, self.memory.exchange(sends, receives, (payload, gathered))


def _parts(rows: torch.Tensor, counts: Sequence[int]) -> list[DeviceBytes]:
    """Return where each rank's rows lie, ``counts[r]`` of rank r after those of the ranks
    before."""
    row_bytes = rows.shape[1] * rows.itemsize
    parts = []
    address = rows.data_ptr()
    for count in counts:
        parts.append(DeviceBytes(address, count * row_bytes))
        address += count * row_bytes
    return parts


class SymmetricTransport(TorchTransport):
    """Symmetric memory for the payloads of codecs that have a ``fused_config``; torch.distributed
    for others.

    A collective runs on the current stream, since it fills the device. Bytes are those stored in
    the peers' memory without flags, eight bytes a tile; operations are named after the exchanges
    that they replace.
    """

    overlaps = False

    def __init__(
        self, symmetric, on_send: OnSend | None = None, overflow: Overflow | None = None
    ) -> None:
        super().__init__(symmetric.group, on_send, overflow=overflow)
        self.symmetric = symmetric

    def fuses(self, codec: Codec) -> bool:
        """Return whether a kernel encodes both hops: one kernel sums and encodes again in the same
        groups."""
        first, second = (hop.fused_config for hop in codec.hops)
        if first is None or second is None:
            return False
        return (
            first.group_size == second.group_size
            and first.hadamard == second.hadamard
            and first.outliers == second.outliers
        )

    def fused_all_reduce(
        self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None
    ) -> Work:
        """Do ``collectives.all_reduce`` in one kernel.

        Args:
            x: this rank's addend.
            codec: ``fuses`` has said yes.
            out: contiguous tensor for the sum; None: a new one.
        """
        first, second = (hop.fused_config for hop in codec.hops)
        assert first is not None, "fuses() is asked before"
        out = self.symmetric.all_reduce(
            x, first, out=out, config_out=None if codec.one_exchange else second
        )
        if self.world_size == 2 and codec.one_exchange:
            return self._completed(out, x.numel(), all_gather=first)
        # What goes to each owner, and what each owner sends to all.
        piece = first.chunk_numel(x.numel(), self.world_size)
        return self._completed(out, piece, all_to_all=first, all_gather=second)

    def fused_reduce_scatter(
        self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None
    ) -> Work:
        """Do ``collectives.reduce_scatter`` in one kernel.

        Args:
            x: this rank's addend ``[W * n, ...]``.
            codec: its first hop encodes.
            out: contiguous ``[n, ...]`` for the result; None: a new tensor.
        """
        # The kernel stores in peers' memory and waits for its own: nothing is under way afterwards.
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
        """Do ``collectives.all_gather_encoded`` in one kernel.

        Args:
            payload: uint8 ``[1, bytes]``, encoded already.
            shape: ``[n, ...]`` of the encoded tensor.
            dtype: its type.
            codec: has encoded it.
            out: contiguous ``[W * n, ...]`` for the result; None: a new tensor.
        """
        if out is None:
            out = torch.empty(
                (self.world_size * shape[0], *shape[1:]), dtype=dtype, device=payload.device
            )
        self.symmetric.all_gather_encoded(payload, shape, dtype, codec.fused_config, out=out)
        return self._completed(out, torch.Size(shape).numel(), all_gather=codec.fused_config)

    def _completed(self, out: torch.Tensor, numel: int, **exchanges) -> Work:
        """Report what the kernel has stored in peers' memory, and return work that is done.

        Args:
            out: the result.
            numel: values that each rank sends to each other one in an exchange.
            exchanges: by the name of the operation that it replaces, the config that encodes it.
        """
        if self.on_send is not None:
            for operation, config in exchanges.items():
                self.on_send(operation, self.symmetric.stored_bytes(numel, config))
        return Work.completed(out)


class Transports:
    """Decides which transport each process group uses; every site asks.

    Args:
        choice: ``--compression-transport``: auto, collective, symmetric or host.
        communicators: how many share each payload over torch.distributed; 0: by the links between
            the ranks.
    """

    def __init__(self, choice: str = "auto", communicators: int = 0) -> None:
        self.choice = choice
        self.communicators = communicators
        self._memory: dict[dist.ProcessGroup, object | None] = {}
        self._more_groups: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}
        self.overflow = Overflow()
        """Of the run, which replaces it by its own."""
        self.version = 0
        """Changes where a group may get another transport."""

    def prepare(self, groups: Iterable[dist.ProcessGroup], fused: bool = True) -> list[str]:
        """Decide for this rank's groups and set up their memory.

        Collective over all ranks of the job; members of a group give it in the same place.

        Args:
            groups: those that will send payloads.
            fused: whether collectives may be fused kernels over symmetric memory.

        Returns: a line for the log for each group that has not been decided before.

        Raises:
            TransportError: a kind of memory was asked for and is not possible.
        """
        # Sites that hold a transport ask again.
        self.version += 1
        lines: list[str] = []
        ranks_of_groups: list[list[int]] = []
        owners: list[dist.ProcessGroup] = []
        for group in groups:
            if group in self._memory:
                continue
            line = self._share_memory(group, fused)
            # Memory is shared by all; over torch.distributed several communicators may share the
            # payloads.
            count = self.count(group) if self._memory[group] is None else 1
            if count > 1:
                line += f", a share on each of {count} communicators"
            lines.append(line)
            for _ in range(count - 1):
                ranks_of_groups.append(dist.get_process_group_ranks(group))
                owners.append(group)
        created = new_groups(ranks_of_groups)
        assert created is not None, "all ranks of the job call, so they can make groups"
        # In the order in which they were asked for.
        for group, more in zip(owners, created, strict=True):
            self._more_groups.setdefault(group, []).append(more)
        return lines

    def count(self, group: dist.ProcessGroup) -> int:
        """Return how many communicators share a payload over torch.distributed.

        Collective over the group.
        """
        if self.communicators:
            return self.communicators
        return TCP_COMMUNICATORS if over_tcp(group) else 1

    def host_memory(self, group: dist.ProcessGroup) -> tuple[HostMemory | None, str]:
        """Decide for a group without fused kernels whose caller makes its communicators.
        Collective, once.

        Returns: the memory, or None for torch.distributed, and a line for the log.
        """
        line = self._share_memory(group, fused=False)
        memory = self._memory[group]
        return (memory if isinstance(memory, HostMemory) else None), line

    def _share_memory(self, group: dist.ProcessGroup, fused: bool) -> str:
        """Set up what memory the choice and the links allow.

        Returns: a line for the log. It is the same on every rank of the group, as is
            TransportError.
        """
        self._memory[group], how = self._memory_of(group, fused)
        if self._memory[group] is not None:
            if self.communicators > 1:
                variable = f"MEGATRON_COMPRESSION_COMMUNICATORS={self.communicators}"
                how += f"; {variable} has nothing to share there"
            return f"payloads travel {how}"
        if self.choice == "host" or (self.choice == "symmetric" and fused):
            raise TransportError(
                f"{setting('transport')} {self.choice} is not possible: {how}; use auto"
            )
        return f"payloads travel over torch.distributed ({how})"

    def _memory_of(self, group: dist.ProcessGroup, fused: bool) -> tuple[object | None, str]:
        """Return the memory and how payloads travel by it, or None and the reason. Collective."""
        if self.choice == "collective":
            return None, "--compression-transport collective"
        if not torch.cuda.is_available():
            return None, "no CUDA device"
        from taco_kernels import symmetric_memory

        # Memory of any kind is shared inside one host.
        if reason := symmetric_memory.hosts_reason(group):
            return None, reason
        if self.choice == "host":
            return self._by_host(group, "--compression-transport host")
        disabled = _disabled(group)
        no_peer_access = None
        if "P2P" in disabled:
            no_peer_access = "NCCL_P2P_DISABLE=1 asks for no peer access"
        no_peer_access = no_peer_access or symmetric_memory.peer_access_reason(group)
        if no_peer_access is None:
            # Host memory is for ranks without peer access; "host" asks for it anyway.
            if fused:
                return self._by_symmetric(group)
            return None, "no fused kernels for these messages"
        if self.choice == "symmetric":
            return None, no_peer_access
        if "SHM" in disabled:
            return None, f"{no_peer_access}, NCCL_SHM_DISABLE=1 for none through host memory"
        return self._by_host(group, no_peer_access)

    def _by_symmetric(self, group: dist.ProcessGroup) -> tuple[object | None, str]:
        """Set up symmetric memory; results as of ``_memory_of``."""
        from taco_kernels import symmetric_memory

        try:
            memory = symmetric_memory.SymmetricGroup(group)
        except symmetric_memory.SymmetricMemoryError as error:
            return None, str(error)
        return memory, f"over symmetric memory between {group.size()} ranks of one host"

    def _by_host(self, group: dist.ProcessGroup, reason: str) -> tuple[object | None, str]:
        """Set up host memory, which is used for a reason; results as of ``_memory_of``."""
        try:
            memory = HostMemory(group)
        except HostMemoryError as error:
            problem = f"no host memory to share: {error}"
            return None, problem if self.choice == "host" else f"{reason}; {problem}"
        return memory, f"through host memory between {group.size()} ranks ({reason})"

    def transport(
        self, group: dist.ProcessGroup, on_send: OnSend | None = None, fused: bool = True
    ) -> TorchTransport:
        """Return the transport of a group: torch.distributed where ``prepare`` was not called or
        found no memory.

        Args:
            group: the ranks.
            on_send: counts; None: nobody does.
            fused: whether collectives may be fused kernels, as in ``prepare``.
        """
        # A group that was never prepared has no memory, and travels over torch.distributed.
        memory = self._memory.get(group)
        if isinstance(memory, HostMemory):
            return HostTransport(memory, on_send, self.overflow)
        if memory is None or not fused:
            more_groups = self._more_groups.get(group, ())
            return TorchTransport(group, on_send, more_groups, self.overflow)
        # Codecs without a kernel of their own fall back to torch.distributed inside it.
        return SymmetricTransport(memory, on_send, self.overflow)


def new_groups(
    ranks_of_groups: Sequence[Sequence[int]], callers: dist.ProcessGroup | None = None
) -> list[dist.ProcessGroup] | None:
    """Make process groups of global ranks, also of the same several times.

    Collective over ``callers``: this rank is in all groups that it wants, whose other members want
    them in the same places of their lists.

    Args:
        ranks_of_groups: the global ranks of each group.
        callers: the ranks that call; None: all of the job. Every rank then makes every group that
            any rank wants, in one order.

    Returns:
        The groups in the order of ``ranks_of_groups``; None where some of the job's ranks alone
        cannot make any.
    """
    everyone = gather_objects([tuple(ranks) for ranks in ranks_of_groups], callers)
    keys = {(number, ranks) for wishes in everyone for number, ranks in enumerate(wishes)}
    alone = callers is not None
    if alone and keys and not _agree_on_names(callers):
        return None
    created = {
        key: dist.new_group(list(key[1]), use_local_synchronization=alone)
        for key in sorted(keys)
        if not alone or dist.get_rank() in key[1]
    }
    return [created[number, tuple(ranks)] for number, ranks in enumerate(ranks_of_groups)]


def _agree_on_names(callers: dist.ProcessGroup) -> bool:
    """Return whether these ranks would give a new group of theirs the same name. Collective over
    them.

    Without the job's other ranks torch names a group by its ranks and by the number of groups that
    a rank is in. Members with different numbers would wait for each other under different names,
    for ever.
    """
    memberships = len(distributed_c10d._world.pg_names)
    return len(set(gather_objects(memberships, callers))) == 1


def _locally_disabled() -> set[str]:
    """Return which of P2P and SHM this rank's NCCL variables switch off."""
    return {name for name in ("P2P", "SHM") if os.environ.get(f"NCCL_{name}_DISABLE") == "1"}


def _disabled(group: dist.ProcessGroup) -> set[str]:
    """Return which of P2P and SHM NCCL's variables switch off on any rank. Collective."""
    return set().union(*gather_objects(_locally_disabled(), group))


class _Links(NamedTuple):
    """What a rank knows of its links to others."""

    host: str
    only_sockets: bool
    """NCCL's variables leave nothing else on a host."""
    infiniband: bool


def over_tcp(group: dist.ProcessGroup) -> bool:
    """Return whether NCCL's links between the ranks of a group are TCP sockets.

    They are on several hosts without InfiniBand, and on one host where NCCL's variables leave
    nothing else. Collective, the same on every rank.
    """
    if dist.get_backend(group) != "nccl":
        return False
    adapters = Path("/sys/class/infiniband")
    # The kernel lists adapters that NCCL can use for InfiniBand or RoCE.
    has_adapters = adapters.is_dir() and any(adapters.iterdir())
    infiniband = has_adapters and os.environ.get("NCCL_IB_DISABLE") != "1"
    local = _Links(host_identity(), _locally_disabled() == {"P2P", "SHM"}, infiniband)
    links = gather_objects(local, group)
    if all(rank.infiniband for rank in links):
        return False
    several_hosts = len({rank.host for rank in links}) > 1
    return several_hosts or all(rank.only_sockets for rank in links)
