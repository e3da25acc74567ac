"""gloo: the process groups of a process share one device.

A device has a thread that wakes a hundred times a second. Megatron makes dozens of groups, each with a device
of its own: on a few cores their threads leave little to the ranks.
"""

import functools
import os

from torch.distributed import ProcessGroupGloo


def install() -> None:
    """Give each group that is made from now on the shared device."""
    make = ProcessGroupGloo.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def shared(self, store, rank, size, *given, **named) -> None:
        # torch 2.15 says enable_reconfigure=False, too
        asked = {name for name, value in named.items() if value is not False}
        if given or asked != {"timeout"} or "GLOO_SOCKET_IFNAME" in os.environ:
            return make(self, store, rank, size, *given, **named)
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices = named["timeout"], [_device(os.getpid())]
        return make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = shared


@functools.cache
def _device(process: int) -> ProcessGroupGloo.Device:
    """Of this process: a fork has none of its parent's threads."""
    return ProcessGroupGloo.create_default_device()
