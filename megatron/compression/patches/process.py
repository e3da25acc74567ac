"""What a process does at the end of its job: torch's process groups are destroyed."""

from collections.abc import Callable

from megatron.compression.patches.symbols import extend


def before_process_groups_end(release: Callable[[], None]) -> None:
    """Call ``release()`` before the job's process groups are destroyed.

    Why: NCCL waits for CUDA graphs that hold its kernels, whoever has captured them. Not reached: a
    group destroyed by itself, and who has imported the function by name.
    """
    from torch import distributed

    extend(distributed, "destroy_process_group", (), _releasing_first, release)


def _releasing_first(destroy_process_group: Callable, calls: list[Callable[[], None]]) -> Callable:
    from torch import distributed

    def wrapper(group=None):
        # Without a group, and with that of all ranks, every group of the job ends.
        if group in (None, distributed.group.WORLD):
            for release in calls:
                release()
        destroy_process_group(group)

    return wrapper
