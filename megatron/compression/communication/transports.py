"""Which way payloads travel, decided once for each process group."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.compression.communication.groups import new_groups
from megatron.compression.communication.host_memory import HostMemory, HostMemoryError
from megatron.compression.communication.host_transport import HostTransport
from megatron.compression.communication.symmetric import SymmetricTransport
from megatron.compression.communication.transport import OnSend, TorchTransport
from megatron.compression.errors import CompressionConfigError

TCP_COMMUNICATORS = 2  # measured: docs/results/collectives.md


class TransportError(CompressionConfigError):
    """``--compression-transport symmetric`` or ``host`` cannot be honoured."""


class Transports:
    """Which transport each process group uses; asked for by every site.

    Args:
        choice: the flag ``--compression-transport``: auto, collective, symmetric or host.
        communicators: how many share each payload over torch.distributed, the flag
            ``MEGATRON_COMPRESSION_COMMUNICATORS``; 0 lets ``prepare`` decide.
    """

    def __init__(self, choice: str = "auto", communicators: int = 0) -> None:
        self.choice, self.communicators = choice, communicators
        self._memory: dict[dist.ProcessGroup, object | None] = {}
        self._more_groups: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}

    def prepare(self, groups: Iterable[dist.ProcessGroup], fused: bool = True) -> list[str]:
        """Decide for these groups and set up their memory. Collective over all ranks of the job.

        Args:
            groups: this rank's, as many as it has (none is fine); members of one give it in the same place.
            fused: whether collectives may be fused kernels over symmetric memory.
        Returns: A line for the log for each group that had not been decided before.
        Raises: TransportError: a kind of memory was asked for and cannot be had.
        """
        lines: list[str] = []
        wanted: list[list[int]] = []
        owners: list[dist.ProcessGroup] = []
        for group in groups:
            if group in self._memory:
                continue
            line = self._share_memory(group, fused)
            if self._memory[group] is not None:
                lines.append(line)
                continue
            count = self.count(group)
            wanted += [dist.get_process_group_ranks(group)] * (count - 1)
            owners += [group] * (count - 1)
            shares = f", a share on each of {count} communicators" if count > 1 else ""
            lines.append(line + shares)
        for group, more in zip(owners, new_groups(wanted), strict=True):
            self._more_groups.setdefault(group, []).append(more)
        return lines

    def count(self, group: dist.ProcessGroup) -> int:
        """How many communicators share a payload over torch.distributed. Collective over the group."""
        return self.communicators or (TCP_COMMUNICATORS if over_tcp(group) else 1)

    def host_memory(self, group: dist.ProcessGroup) -> tuple[HostMemory | None, str]:
        """Decide for a group that has no fused kernels, by the same rule, and cares for its communicators
        itself. Collective over the group, once.

        Returns: what carries the payloads, None: torch.distributed; and a line for the log.
        Raises: TransportError: host memory was asked for and cannot be had.
        """
        line = self._share_memory(group, fused=False)
        memory = self._memory[group]
        return (memory if isinstance(memory, HostMemory) else None), line

    def _share_memory(self, group: dist.ProcessGroup, fused: bool) -> str:
        """Set up what memory the choice and the links allow; a line for the log, the same on every rank of
        the group, or TransportError on all."""
        self._memory[group], how = self._memory_of(group, fused)
        if self._memory[group] is not None:
            if self.communicators > 1:
                how += f"; MEGATRON_COMPRESSION_COMMUNICATORS={self.communicators} has nothing to share there"
            return f"payloads travel {how}"
        if self.choice == "host" or (self.choice == "symmetric" and fused):
            raise TransportError(f"--compression-transport {self.choice} is not possible: {how}; use auto")
        return f"payloads travel over torch.distributed ({how})"

    def _memory_of(self, group: dist.ProcessGroup, fused: bool) -> tuple[object | None, str]:
        """The memory and how payloads travel by it, or None and why."""
        if self.choice == "collective":
            return None, "--compression-transport collective"
        if not torch.cuda.is_available():
            return None, "no CUDA device"
        from taco_kernels import symmetric_memory

        if reason := symmetric_memory.apart_reason(group):
            return None, reason
        disabled = _disabled(group)
        reason = "NCCL_P2P_DISABLE=1 asks for no peer access" if "P2P" in disabled else None
        reason = reason or symmetric_memory.strangers_reason(group)
        no_peers = reason is not None
        if reason is None and not fused:
            reason = "no fused kernels for these messages"
        if reason is None and self.choice != "host":
            try:
                memory = symmetric_memory.SymmetricGroup(group)
            except symmetric_memory.SymmetricMemoryError as error:
                return None, str(error)
            return memory, f"over symmetric memory between {group.size()} ranks of one host"
        if self.choice == "symmetric" or (self.choice == "auto" and not no_peers):
            return None, str(reason)
        if self.choice == "auto" and "SHM" in disabled:
            return None, f"{reason}, NCCL_SHM_DISABLE=1 for none through host memory"
        wanted = self.choice == "host"
        try:
            host_memory = HostMemory(group)
        except HostMemoryError as error:
            return None, ("" if wanted else f"{reason}; ") + f"no host memory to share: {error}"
        why = "--compression-transport host" if wanted else reason
        return host_memory, f"through host memory between {group.size()} ranks ({why})"

    def transport(
        self, group: dist.ProcessGroup, on_send: OnSend | None = None, fused: bool = True
    ) -> TorchTransport:
        """The transport of a group; torch.distributed where ``prepare`` was not called or found no memory.

        Args:
            fused: as for ``prepare``.
        """
        memory = self._memory.get(group)
        if isinstance(memory, HostMemory):
            return HostTransport(memory, on_send)
        if memory is None or not fused:
            return TorchTransport(group, on_send, self._more_groups.get(group, ()))
        return SymmetricTransport(memory, on_send)


def _disabled(group: dist.ProcessGroup) -> set[str]:
    """P2P and SHM where NCCL_P2P_DISABLE or NCCL_SHM_DISABLE is 1 on any rank. Collective."""
    own = [way for way in ("P2P", "SHM") if os.environ.get(f"NCCL_{way}_DISABLE") == "1"]
    views: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(views, own, group=group)
    return {way for view in views for way in view}


def over_tcp(group: dist.ProcessGroup) -> bool:
    """Whether NCCL's links between the ranks of a group are TCP sockets. Collective, the same on every rank.

    So they are on several hosts without InfiniBand (or with NCCL_IB_DISABLE=1), and on one host when
    NCCL_P2P_DISABLE and NCCL_SHM_DISABLE leave nothing else.
    """
    if dist.get_backend(group) != "nccl":
        return False
    boot = Path("/proc/sys/kernel/random/boot_id")
    disabled = all(os.environ.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM"))
    adapters = Path("/sys/class/infiniband")
    infiniband = os.environ.get("NCCL_IB_DISABLE") != "1" and adapters.is_dir() and any(adapters.iterdir())
    views: list[tuple[str, bool, bool]] = [("", False, False)] * group.size()
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    dist.all_gather_object(views, (host, disabled, infiniband), group=group)
    if all(infiniband for _, _, infiniband in views):
        return False
    return len({host for host, _, _ in views}) > 1 or all(disabled for _, disabled, _ in views)
