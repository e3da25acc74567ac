"""Symmetric memory for the ranks of a process group on one host."""

import os

import torch
import torch.distributed as dist

from taco_kernels.common import AMD, ceil_div
from taco_kernels.common.device import Device, device_number
from taco_kernels.common.host import host_identity
from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import (
    Channel,
    SymmetricMemoryError,
    channel_bytes,
    tile_bytes,
    tile_of,
)
from taco_kernels.symmetric_memory.order import call_order
from taco_kernels.taco.layout import CodecConfig


def resident_programs(device: Device) -> int:
    """Programs that are resident at once: a program that waits must not keep one out.

    Two a multiprocessor; one where 99 KiB of shared memory do not always hold two.
    """
    per_multiprocessor = 2
    if device.small and device.capability != (8, 0):  # sm_80 has 163 KiB
        per_multiprocessor = 1
    return per_multiprocessor * device.multiprocessors


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a process group gives its own collectives up (NCCL's default is ten
    minutes).

    A rank may be late for good reasons, such as a slow disk: what NCCL waits for, kernels here wait
    for.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return group._get_backend(device).options._timeout.total_seconds()


def unavailable_reason(group: dist.ProcessGroup) -> str | None:
    """Tell why the ranks of ``group`` cannot share symmetric memory; None if they can.

    Collective: every rank must call it, and every rank gets the same answer.
    """
    return hosts_reason(group) or peer_access_reason(group)


def _gathered(value: object, group: dist.ProcessGroup) -> list:
    """Every rank's value. Collective."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def hosts_reason(group: dist.ProcessGroup) -> str | None:
    """Tell why the ranks are not on one host with a device of one model each; None if they are.

    Collective: every rank must call it, and every rank gets the same answer.
    """
    if group.size() > collectives.MAX_WORLD_SIZE:
        return f"the group has {group.size()} ranks, more than {collectives.MAX_WORLD_SIZE}"
    views = _gathered(_view(), group)
    for rank, view in enumerate(views):
        if view["problem"]:
            return f"rank {rank}: {view['problem']}"
    if len({view["host"] for view in views}) > 1:
        return "the ranks are on several hosts"
    if len({view["uuid"] for view in views}) < len(views):
        return "two ranks use the same device"
    models = {view["model"] for view in views}
    if len(models) > 1:
        return f"the ranks' devices differ: {', '.join(sorted(models))}"
    return None


def peer_access_reason(group: dist.ProcessGroup) -> str | None:
    """Tell which devices of a host have no access to each other's memory; None if all have.

    A device that this process does not see (CUDA_VISIBLE_DEVICES) cannot be asked about and counts
    as accessible: if it is not, the group's construction says so. Collective, the same answer on
    every rank.
    """
    this_device = torch.cuda.current_device()
    # A device's number differs between processes (CUDA_VISIBLE_DEVICES); its uuid does not.
    visible = {}
    for index in range(torch.cuda.device_count()):
        visible[str(torch.cuda.get_device_properties(index).uuid)] = index
    inaccessible = []
    for rank, uuid in enumerate(_gathered(_view()["uuid"], group)):
        peer = visible.get(uuid, this_device)
        if peer != this_device and not torch.cuda.can_device_access_peer(this_device, peer):
            inaccessible.append(rank)
    for rank, peers in enumerate(_gathered(inaccessible, group)):
        if peers:
            return f"the device of rank {rank} has no peer access to that of rank {peers[0]}"
    return None


def _view() -> dict:
    """Describe this rank's device to the other ranks."""
    if not torch.cuda.is_available():
        return {"problem": "no CUDA device"}
    if AMD:
        return {"problem": "the GPU is AMD's; the kernels are for NVIDIA's"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (properties.major, properties.minor) < (8, 0):
        return {"problem": f"{properties.name} is older than sm_80"}
    return {
        "problem": None,
        "host": host_identity(),
        "uuid": str(properties.uuid),
        "model": f"{properties.name} with {properties.multi_processor_count} multiprocessors",
    }


class SymmetricGroup:
    """Compressed collectives over symmetric memory for one process group. Construction is
    collective.

    Calls are stream-ordered like any kernel and never wait on the host. Calls of all groups on a
    device run one after the other, whatever their streams, and CUDA graphs may contain them
    (``order.py``). As with NCCL, all ranks of a group make the same calls and replays in the same
    order. As with any Triton kernel, the first call of a shape must not be in a capture.

    The memory does not depend on the size of the messages, which pass through it in tiles: with two
    programs on each of 132 multiprocessors 28 MiB at 2 ranks, 56 at 4, 111 at 8.

    Args:
        group: ranks for which ``unavailable_reason`` is None.
        timeout: seconds that a kernel waits for a peer before it traps, which ends this process's
            use of the device; the next call raises SymmetricMemoryError with the peer's rank.
            Unless given, the group's own (Megatron's ``--distributed-timeout-minutes``).

    Raises:
        SymmetricMemoryError: the ranks cannot share memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        # Multicast is not used, and setting it up can fail where plain peer access works.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        # The same on every rank, as their devices are of one model: program p talks to programs p.
        programs = resident_programs(device_number(self.device.index))
        size = channel_bytes(self.world_size, programs)
        problem = None
        handle = None
        try:
            self._memory = symm_mem.empty(size, dtype=torch.uint8, device=self.device)
            handle = symm_mem.rendezvous(self._memory, group)
        except RuntimeError as error:  # a container may forbid to map a peer's memory
            problem = str(error).splitlines()[0]
        # All ranks learn of a problem on any: those without one would wait for the others in vain.
        for rank, rank_problem in enumerate(_gathered(problem, group)):
            if rank_problem is not None:
                raise SymmetricMemoryError(f"rank {rank} cannot share its memory: {rank_problem}")
        self._memory.zero_()
        self._order = call_order()
        addresses = [handle.buffer_ptrs[rank] for rank in range(self.world_size)]
        if timeout is None:
            timeout = timeout_of(group)
        self.channel = Channel(addresses, self.rank, self.device, programs, timeout)
        torch.cuda.synchronize(self.device)
        dist.barrier(group)  # no rank may send before all have zeroed their flags
        torch.cuda.synchronize(self.device)

    def _in_order(self) -> Channel:
        """The channel, for a call on the current stream after all earlier ones."""
        self._order.follow(self.channel)
        return self.channel

    def all_reduce(self, *args, **kwargs) -> torch.Tensor:
        """See ``collectives.all_reduce``, whose arguments follow the channel."""
        return collectives.all_reduce(self._in_order(), *args, **kwargs)

    def reduce_scatter(self, *args, **kwargs) -> torch.Tensor:
        """See ``collectives.reduce_scatter``, whose arguments follow the channel."""
        return collectives.reduce_scatter(self._in_order(), *args, **kwargs)

    def all_gather_encoded(self, *args, **kwargs) -> torch.Tensor:
        """See ``collectives.all_gather_encoded``, whose arguments follow the channel."""
        return collectives.all_gather_encoded(self._in_order(), *args, **kwargs)

    def stored_bytes(self, numel: int, config: CodecConfig) -> int:
        """Bytes that a rank stores in its peers' memory in an exchange of ``numel`` values with
        each."""
        tile = tile_of(config, device_number(self.device.index))
        return (self.world_size - 1) * ceil_div(numel, tile) * tile_bytes(config, tile)
