"""Compressed collectives, over symmetric memory and over NCCL, against NCCL's own; run it under torchrun."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from taco_kernels.benchmarks.timing import median, relative_error
from taco_kernels.symmetric_memory import SymmetricGroup, unavailable_reason
from taco_kernels.taco import (
    FORMATS,
    SCALES,
    CodecConfig,
    decode,
    decode_sum,
    decode_sum_encode,
    encode,
)

MIB = (0.25, 1, 4, 16, 64, 256)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
COLUMNS = {"operation": "", "MiB": "g", "ranks": "d", "method": "", "format": "", "us": ".1f"}
COLUMNS |= {"bus GB/s": ".0f", "x NCCL": ".2f", "error": ".4f"}
Call = Callable[[], torch.Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument(
        "--mib", type=float, nargs="+", default=MIB, help="sizes of the whole bf16 tensor"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=["fp8-e4m3", "int8", "int6", "int4"]
    )
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual", "single"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=["all_reduce"])


def call_time(call: Call, calls: int = 20) -> float:
    """Median microseconds of a call, the slowest rank's; ``calls`` back-to-back ones."""
    time = torch.tensor(
        median(lambda: [call() for _ in range(calls)], dist.barrier) / calls, device="cuda"
    )
    dist.all_reduce(time, op=dist.ReduceOp.MAX)
    return float(time)


def nccl(operation: str, x: torch.Tensor) -> Call:
    """The uncompressed operation on x [ranks, numel], whose own row an all-gather sends."""
    collective, out, *arguments = {
        "all_reduce": (dist.all_reduce, x.clone()),
        "reduce_scatter": (dist.reduce_scatter_tensor, torch.empty_like(x[0]), x.view(-1)),
        "all_gather": (
            dist.all_gather_into_tensor,
            torch.empty_like(x).view(-1),
            x[dist.get_rank()],
        ),
    }[operation]

    def call() -> torch.Tensor:
        collective(out, *arguments)
        return out

    return call


def over_torch_distributed(operation: str, x: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """The codec's kernels with an exchange of torch.distributed between them."""
    ranks = dist.get_world_size()
    if operation == "all_reduce" and ranks == 2:
        own = encode(x, config)
        dist.all_gather_into_tensor(both := own.new_empty(2, own.shape[1]), own)
        return decode_sum(both, config, x.shape, x.dtype)
    if operation == "all_gather":
        own = encode(x[dist.get_rank()], config)[0]
    else:
        wires = encode(x, config, ranks)
        dist.all_to_all_single(received := torch.empty_like(wires), wires)
        if operation == "reduce_scatter":
            return decode_sum(received, config, x[0].shape, x.dtype)
        own = decode_sum_encode(received, config, config.chunk_numel(x.numel(), ranks))
    dist.all_gather_into_tensor(out := own.new_empty(ranks * own.numel()), own)
    return decode(out.view(ranks, -1), config, x.shape, x.dtype)


def over_symmetric_memory(
    operation: str, x: torch.Tensor, config: CodecConfig, group
) -> torch.Tensor:
    """One kernel; for an all-gather another one, which encodes."""
    if operation != "all_gather":
        return getattr(group, operation)(x, config)
    own = x[dist.get_rank()][None]
    return group.all_gather_encoded(encode(own, config), own.shape, own.dtype, config)


def methods(
    operation: str, x: torch.Tensor, options: Namespace, group
) -> Iterator[tuple[str, str, Call]]:
    """(method, format, call) for everything to compare."""
    yield "NCCL", "bf16", nccl(operation, x)
    for format, scales in product(options.formats, options.scales):
        config, name = CodecConfig(format, scales=scales), f"{format} {scales}"
        yield "torch.distributed", name, partial(over_torch_distributed, operation, x, config)
        if group is not None:
            yield "symmetric", name, partial(over_symmetric_memory, operation, x, config, group)


def measure(operation: str, mib: float, options: Namespace, group) -> Iterator[dict]:
    """Rows of one size; errors are against the result in fp32."""
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(ranks, int(mib * 2**19) // ranks, device="cuda").to(torch.bfloat16)
    exact = nccl(operation, x.float())()
    factor = (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
    baseline = 0.0
    for method, format, call in methods(operation, x, options, group):
        row = {
            "operation": operation,
            "MiB": mib,
            "ranks": ranks,
            "method": method,
            "format": format,
        }
        row["error"] = relative_error(call().view(exact.shape), exact)
        us = call_time(call)
        baseline = baseline or us
        yield {**row, "us": us, "bus GB/s": factor * x.nbytes / us / 1e3, "x NCCL": baseline / us}


def run(options: Namespace) -> list[dict]:
    """Measure every size; the rows of rank 0, none elsewhere."""
    if "RANK" not in os.environ:
        raise SystemExit(
            "start it so: torchrun --nproc-per-node 4 -m taco_kernels.benchmarks collectives"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        reason = unavailable_reason(dist.group.WORLD)
        group = SymmetricGroup(dist.group.WORLD) if reason is None else None
        sizes = product(options.operations, options.mib)
        rows = [row for size in sizes for row in measure(*size, options, group)]
        if dist.get_rank():
            return []
        print(f"NCCL {torch.cuda.nccl.version()}; symmetric memory: {reason or 'yes'}")
        return rows
    finally:
        dist.destroy_process_group()
