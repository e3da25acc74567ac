"""Where one iteration's time goes on the device: kernel times by kind, and what stands in the way."""

import re

KINDS = {
    "communication": r"nccl",
    "collective over symmetric memory": r"(two|one)_shot_kernel|(reduce_scatter|all_gather)_kernel",
    "codec": r"(en|de)code\w*_kernel",
    "attention": r"flash|fmha|cudnn",
    "GEMM": r"gemm|nvjet|cutlass|xmma|splitK",
}


def kind_of(name: str) -> str:
    """The kind of a kernel of this name; elementwise and everything else is "other"."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds: sums by kind; ``exposed communication`` = only NCCL runs; ``idle`` = nothing runs.

    Args:
        kernels: (name, start, end) in microseconds.
    """
    times: dict[str, float] = {}
    for name, start, end in kernels:
        times[kind_of(name)] = times.get(kind_of(name), 0.0) + (end - start) / 1e3
    everything = covered([(start, end) for _, start, end in kernels])
    computing = covered([(start, end) for name, start, end in kernels if kind_of(name) != "communication"])
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    times["exposed communication"] = (everything - computing) / 1e3
    times["idle"] = (span - everything) / 1e3
    times["all"] = span / 1e3
    return {name: round(value, 2) for name, value in times.items()}


class KernelTimes:
    """Records the kernels between ``start`` and ``stop`` of this process's device."""

    def __init__(self) -> None:
        self._profiler = None

    def start(self) -> None:
        """Begin."""
        import torch

        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()

    def stop(self) -> dict[str, float]:
        """End; returns ``summarise``."""
        import torch

        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
        ]
        return summarise(kernels)
