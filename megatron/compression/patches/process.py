"""What a process does around its job: torch's process groups are destroyed."""

from collections.abc import Callable

from megatron.compression.patches.symbols import around


def before_process_groups_end(release: Callable[[], None]) -> None:
    """Call ``release()`` before the job's process groups are destroyed.

    Why: NCCL waits for CUDA graphs that hold its kernels, whoever has captured them. Not reached: a group
    destroyed by itself, and who has imported the function by name.
    """
    from torch import distributed

    def destroy(destroy_process_group, group=None):
        if group in (None, distributed.group.WORLD):
            release()
        destroy_process_group(group)

    around(distributed, "destroy_process_group", (), destroy)
