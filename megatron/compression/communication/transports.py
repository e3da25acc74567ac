"""Which way payloads travel, decided once for each process group."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.compression.communication.groups import new_groups
from megatron.compression.communication.symmetric import SymmetricTransport
from megatron.compression.communication.transport import OnSend, TorchTransport
from megatron.compression.errors import CompressionConfigError

TCP_COMMUNICATORS = 2  # measured: docs/results/collectives.md


class TransportError(CompressionConfigError):
    """``--compression-transport symmetric`` cannot be honoured."""


class Transports:
    """Which transport each process group uses; asked for by every site.

    Args:
        choice: the flag ``--compression-transport``: auto, collective or symmetric.
        communicators: how many share each payload over torch.distributed, the flag
            ``--compression-communicators``; 0 lets ``prepare`` decide.
    """

    def __init__(self, choice: str = "auto", communicators: int = 0) -> None:
        self.choice, self.communicators = choice, communicators
        self._symmetric: dict[dist.ProcessGroup, object | None] = {}
        self._more_groups: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}

    def prepare(self, groups: Iterable[dist.ProcessGroup], fused: bool = True) -> list[str]:
        """Decide for these groups and set up their memory. Collective over all ranks of the job.

        Args:
            groups: this rank's, as many as it has (none is fine); members of one give it in the same place.
            fused: whether collectives may be fused kernels; False takes torch.distributed.
        Returns: A line for the log for each group that had not been decided before.
        Raises: TransportError: symmetric memory was asked for and cannot be had.
        """
        lines: list[str] = []
        wanted: list[list[int]] = []
        owners: list[dist.ProcessGroup] = []
        for group in groups:
            if group in self._symmetric:
                continue
            self._symmetric[group] = None
            reason = self._why_collective(group) if fused else "no fused kernels for these messages"
            if reason is None:
                line, reason = self._share_memory(group)
            if reason is None:
                lines.append(line)
                continue
            if self.choice == "symmetric" and fused:
                raise TransportError(f"--compression-transport symmetric is not possible: {reason}; use auto")
            count = self.communicators or (TCP_COMMUNICATORS if over_tcp(group) else 1)
            wanted += [dist.get_process_group_ranks(group)] * (count - 1)
            owners += [group] * (count - 1)
            shares = f", a share on each of {count} communicators" if count > 1 else ""
            lines.append(f"payloads travel over torch.distributed ({reason}){shares}")
        for group, more in zip(owners, new_groups(wanted), strict=True):
            self._more_groups.setdefault(group, []).append(more)
        return lines

    def _share_memory(self, group: dist.ProcessGroup) -> tuple[str, str | None]:
        """A line for the log, and the reason why it failed, the same on every rank of the group."""
        from taco_kernels.symmetric_memory import SymmetricGroup, SymmetricMemoryError

        try:
            self._symmetric[group] = SymmetricGroup(group)
        except SymmetricMemoryError as error:
            return "", str(error)
        line = f"payloads travel over symmetric memory between {group.size()} ranks of one host"
        if self.communicators > 1:
            line += f"; --compression-communicators {self.communicators} has nothing to share there"
        return line, None

    def transport(
        self, group: dist.ProcessGroup, on_send: OnSend | None = None, fused: bool = True
    ) -> TorchTransport:
        """The transport of a group; torch.distributed where ``prepare`` was not called, or not ``fused``."""
        symmetric = self._symmetric.get(group) if fused else None
        if symmetric is None:
            return TorchTransport(group, on_send, self._more_groups.get(group, ()))
        return SymmetricTransport(symmetric, on_send)

    def _why_collective(self, group: dist.ProcessGroup) -> str | None:
        if self.choice == "collective":
            return "--compression-transport collective"
        if not torch.cuda.is_available():
            return "no CUDA device"
        if os.environ.get("NCCL_P2P_DISABLE") == "1":
            return "NCCL_P2P_DISABLE=1 asks for no peer access"
        from taco_kernels.symmetric_memory import unavailable_reason

        return unavailable_reason(group)


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
