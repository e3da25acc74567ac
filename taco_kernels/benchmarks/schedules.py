"""Orders of the phases of a two-shot all-reduce against each other, in one run."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from triton.runtime.jit import JITFunction

from taco_kernels import CodecConfig
from taco_kernels.benchmarks.collectives import call_time, identical
from taco_kernels.symmetric_memory import SymmetricGroup, collectives
from taco_kernels.symmetric_memory.all_reduce import two_shot_kernel
from taco_kernels.symmetric_memory.scheduled import scheduled_kernel
from taco_kernels.triton.fast_launch import plain_launches

MIB = (16, 64, 256)
CONFIGS = (
    CodecConfig("int8", scales="single"),
    CodecConfig("int8"),
    CodecConfig("fp8-e4m3"),
    CodecConfig("int6", scales="single"),
    CodecConfig("int4", scales="single"),
)
COLUMNS = {
    "MiB": "g",
    "format": "",
    "schedule": "",
    "us": ".1f",
    "x first": ".3f",
    "x NCCL": ".2f",
}
TIMEOUT = 20.0  # seconds that a kernel waits for a peer: a schedule that waits for ever ends the run


def compile_together(calls: Sequence[Callable[[], object]]) -> None:
    """Compile the two-shot kernels of ``calls``, each on one rank, the others from Triton's cache on disk."""
    kernels = (two_shot_kernel, scheduled_kernel)
    for kernel in kernels:
        kernel.run = lambda *args, warmup, kernel=kernel, **options: JITFunction.run(
            kernel, *args, warmup=True, **options
        )
    try:
        with plain_launches():
            for call in calls[dist.get_rank() :: dist.get_world_size()]:
                call()
            dist.barrier()
            for call in calls:
                call()
    finally:
        for kernel in kernels:
            del kernel.run


def measure(mib: float, schedules: Sequence[str], group: SymmetricGroup) -> list[dict]:
    """Rows of one size: every format with every schedule, the better of two medians each.

    Raises:
        RuntimeError: a schedule has other bits than the first, or two ranks differ.
    """
    torch.manual_seed(dist.get_rank())
    x = torch.randn(int(mib * 2**19), device="cuda").to(torch.bfloat16)
    out, total = torch.empty_like(x), x.clone()

    def call(config: CodecConfig, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: collectives.all_reduce(
            group.lane(), x, config, algorithm="two-shot", out=out, schedule=schedule
        )

    compile_together([call(config, schedule) for config in CONFIGS for schedule in schedules])
    dist.barrier()
    baseline = call_time(lambda: dist.all_reduce(total), graph=False)
    rows = []
    for config in CONFIGS:
        name = config.format if config.scales == "dual" else f"{config.format} single"
        first, times = None, {schedule: float("inf") for schedule in schedules}
        for schedule in schedules:
            result = call(config, schedule)().view(torch.uint8)
            first = result.clone() if first is None else first
            if identical(result) != "yes" or not torch.equal(result, first):  # every rank finds the same
                raise RuntimeError(
                    f"{mib:g} MiB, {name}: {schedule} differs from {schedules[0]}, or ranks do"
                )
        for _ in range(2):
            for schedule in schedules:
                times[schedule] = min(times[schedule], call_time(call(config, schedule), graph=False))
        for schedule, us in times.items():
            row = {"MiB": mib, "format": name, "schedule": schedule, "us": us}
            rows.append({**row, "x first": times[schedules[0]] / us, "x NCCL": baseline / us})
    return rows
