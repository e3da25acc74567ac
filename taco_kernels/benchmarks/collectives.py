"""Compressed collectives, over symmetric memory and over NCCL, against NCCL's own; run it under torchrun."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from taco_kernels.benchmarks.timing import relative_error
from taco_kernels.symmetric_memory import SymmetricGroup, unavailable_reason
from taco_kernels.taco import FORMATS, SCALES, CodecConfig, decode, decode_sum, decode_sum_encode, encode

MIB = (0.25, 1, 4, 16, 64, 256)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
COLUMNS = {"operation": "", "MiB": "g", "ranks": "d", "method": "", "format": "", "us": ".1f"}
COLUMNS |= {"bus GB/s": ".0f", "x NCCL": ".2f", "error": ".4f", "replicas identical": ""}
REPEATS = 15
Call = Callable[[], torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=MIB, help="sizes of the whole bf16 tensor")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["fp8-e4m3", "int8", "int6", "int4"])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual", "single"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=["all_reduce"])


def call_time(call: Call) -> float:
    """Median microseconds of a call, the slowest rank's; back-to-back calls."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    start.record()
    call()
    end.record()
    end.synchronize()
    count = torch.tensor(max(4, min(50, int(4 / start.elapsed_time(end)))), device="cuda")
    dist.broadcast(count, 0)
    calls = int(count)

    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    median = torch.tensor(sorted(times)[REPEATS // 2], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)


def exchanged(wires: torch.Tensor) -> torch.Tensor:
    """A row from each rank for a row to each."""
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires)
    return received


def gathered(own: torch.Tensor) -> torch.Tensor:
    """[ranks, numel] of each rank's values."""
    out = own.new_empty(dist.get_world_size(), own.numel())
    dist.all_gather_into_tensor(out.view(-1), own)
    return out


def over_torch_distributed(operation: str, x: torch.Tensor, config: CodecConfig) -> Call:
    """The codec's kernels with an exchange of torch.distributed between them."""
    world_size, numel = dist.get_world_size(), x.numel()

    def all_reduce() -> torch.Tensor:
        received = exchanged(encode(x, config, world_size))
        own = decode_sum_encode(received, config, config.chunk_numel(numel, world_size))
        return decode(gathered(own), config, x.shape, x.dtype)

    def reduce_scatter() -> torch.Tensor:
        received = exchanged(encode(x, config, world_size))
        return decode_sum(received, config, (numel // world_size,), x.dtype)

    def all_gather() -> torch.Tensor:
        return decode(gathered(encode(own_part(x), config)[0]), config, x.shape, x.dtype)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}[operation]


def over_symmetric_memory(operation: str, x: torch.Tensor, config: CodecConfig, group) -> Call:
    """One kernel; for an all-gather another one, which encodes."""
    if operation != "all_gather":
        return partial(getattr(group, operation), x, config)
    own = own_part(x)
    return lambda: group.all_gather_encoded(encode(own, config), own.shape, own.dtype, config)


def own_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of x."""
    return x.view(dist.get_world_size(), -1)[dist.get_rank()]


def nccl(operation: str, x: torch.Tensor) -> Call:
    """The uncompressed operation, in place for an all-reduce."""
    collective, out, *arguments = {
        "all_reduce": (dist.all_reduce, x.clone()),
        "reduce_scatter": (dist.reduce_scatter_tensor, torch.empty_like(own_part(x)), x),
        "all_gather": (dist.all_gather_into_tensor, x.clone(), own_part(x)),
    }[operation]

    def call() -> torch.Tensor:
        collective(out, *arguments)
        return out

    return call


def methods(operation: str, x: torch.Tensor, options: argparse.Namespace, group) -> Iterator[tuple]:
    """(method, format, function that makes the call) for everything to compare."""
    yield "NCCL bf16", "bf16", lambda: nccl(operation, x)
    if operation == "all_reduce" and group is not None:
        with suppress(ImportError):
            from flashinfer.comm import quantized_all_reduce

            yield "FlashInfer", "fp8-e4m3", lambda: partial(quantized_all_reduce, x, dist.group.WORLD)
    for format, scales in product(options.formats, options.scales):
        config = CodecConfig(format, scales=scales)
        name = format if scales == "dual" else f"{format} {scales}"
        yield "torch.distributed", name, lambda c=config: over_torch_distributed(operation, x, c)
        if group is not None:
            yield "symmetric", name, lambda c=config: over_symmetric_memory(operation, x, c, group)


def exact_result(operation: str, x: torch.Tensor) -> torch.Tensor:
    """The result in fp32."""
    if operation == "all_gather":
        return gathered(own_part(x)).view_as(x).float()
    total = x.float()
    dist.all_reduce(total)
    return total if operation == "all_reduce" else own_part(total)


def identical(result: torch.Tensor) -> str:
    """Whether all ranks hold the same bits."""
    first = result.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(int(torch.equal(first, result)), device="cuda")
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return "yes" if int(same) else "no"


def measure(operation: str, mib: float, options: argparse.Namespace, group) -> Iterator[dict]:
    """Rows of one size."""
    world_size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(int(mib * 2**19), device="cuda").to(torch.bfloat16)
    exact = exact_result(operation, x)
    factor = (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size
    baseline = 0.0
    for method, format, make in methods(operation, x, options, group):
        call = make()
        result = call()
        row = {"operation": operation, "MiB": mib, "ranks": world_size, "method": method, "format": format}
        row["error"] = relative_error(result, exact)
        row["replicas identical"] = "-" if operation == "reduce_scatter" else identical(result)
        us = call_time(call)
        baseline = baseline or us
        yield {**row, "us": us, "bus GB/s": factor * x.nbytes / us / 1e3, "x NCCL": baseline / us}


def run(options: argparse.Namespace) -> list[dict]:
    """Measure every size; the rows of rank 0, none elsewhere."""
    if "RANK" not in os.environ:
        raise SystemExit(
            "start it under torchrun: torchrun --nproc-per-node 4 -m taco_kernels.benchmarks collectives"
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
        variables = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
        print(f"NCCL {torch.cuda.nccl.version()}, {variables or 'no NCCL variables'}; ", end="")
        print(f"symmetric memory: {reason or 'yes'}")
        return rows
    finally:
        dist.destroy_process_group()
