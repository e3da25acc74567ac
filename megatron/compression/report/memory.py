"""How much memory a rank took at most."""

import resource

import torch


def peak_memory() -> dict[str, int]:
    """Bytes of this rank since it started.

    Returns: On a GPU ``allocated``, the peak of torch's allocator, and ``device_used``, what is taken on the
    device now: NCCL's and symmetric memory and the CUDA context too, and every process on that device.
    Elsewhere ``resident``, the peak of the process.
    """
    if not torch.cuda.is_available():
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.max_memory_allocated(), "device_used": total - free}


def largest(by_rank: list[dict[str, int]]) -> dict[str, int]:
    """The largest value of any rank, by name."""
    return {name: max(rank.get(name, 0) for rank in by_rank) for name in by_rank[0]} if by_rank else {}
