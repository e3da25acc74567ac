"""Compressed collectives, over symmetric memory and over NCCL, against NCCL's own; run it under
torchrun."""

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
COLUMNS = {
    "operation": "",
    "MiB": "g",
    "ranks": "d",
    "method": "",
    "format": "",
    "us": ".1f",
    "bus GB/s": ".0f",  # of the uncompressed bytes, as NCCL's tests count them
    "x NCCL": ".2f",
    "error": ".4f",
}
"""Columns of ``measure``, with the formats of their cells."""
Call = Callable[[], torch.Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument(
        "--mib", type=float, nargs="+", default=MIB, help="sizes of the whole bf16 tensor in MiB"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=["fp8-e4m3", "int8", "int6", "int4"]
    )
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual", "single"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=["all_reduce"])


def call_time(call: Call, calls: int = 20) -> float:
    """Median microseconds of a call, the slowest rank's; ``calls`` back-to-back ones. Collective."""

    def many() -> None:
        for _ in range(calls):
            call()

    time = torch.tensor(median(many, dist.barrier) / calls, device="cuda")
    dist.all_reduce(time, op=dist.ReduceOp.MAX)
    return float(time)


def nccl(operation: str, x: torch.Tensor) -> Call:
    """The uncompressed operation on x [ranks, numel], of which an all-gather sends this rank's row."""
    if operation == "all_reduce":
        out = x.clone()
        collective = partial(dist.all_reduce, out)
    elif operation == "reduce_scatter":
        out = torch.empty_like(x[0])
        collective = partial(dist.reduce_scatter_tensor, out, x.view(-1))
    else:
        out = torch.empty_like(x).view(-1)
        collective = partial(dist.all_gather_into_tensor, out, x[dist.get_rank()])

    def call() -> torch.Tensor:
        collective()
        return out

    return call


def gathered(wire: torch.Tensor) -> torch.Tensor:
    """uint8 [ranks, bytes]: every rank's wire, uint8 [bytes]. Collective."""
    ranks = dist.get_world_size()
    wires = wire.new_empty(ranks * wire.numel())
    dist.all_gather_into_tensor(wires, wire)
    return wires.view(ranks, -1)


def over_torch_distributed(operation: str, x: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """The codec's kernels with exchanges of torch.distributed between them.

    Args:
        operation: one of OPERATIONS.
        x: [ranks, numel].
        config: of the codec.
    """
    ranks = dist.get_world_size()
    if operation == "all_gather":
        wire = encode(x[dist.get_rank()], config)[0]
        return decode(gathered(wire), config, x.shape, x.dtype)
    if operation == "all_reduce" and ranks == 2:  # one exchange of all that each rank has
        return decode_sum(gathered(encode(x, config)[0]), config, x.shape, x.dtype)
    wires = encode(x, config, ranks)
    received = torch.empty_like(wires)  # row r: rank r's values of this rank's piece
    dist.all_to_all_single(received, wires)
    if operation == "reduce_scatter":
        return decode_sum(received, config, x[0].shape, x.dtype)
    piece = decode_sum_encode(received, config, config.chunk_numel(x.numel(), ranks))
    return decode(gathered(piece), config, x.shape, x.dtype)


def over_symmetric_memory(
    operation: str, x: torch.Tensor, config: CodecConfig, group: SymmetricGroup
) -> torch.Tensor:
    """One kernel; for an all-gather another one before it, which encodes.

    Args:
        operation: one of OPERATIONS.
        x: [ranks, numel].
        config: of the codec.
        group: of all ranks.
    """
    if operation == "all_reduce":
        return group.all_reduce(x, config)
    if operation == "reduce_scatter":
        return group.reduce_scatter(x, config)
    row = x[dist.get_rank()][None]
    return group.all_gather_encoded(encode(row, config), row.shape, row.dtype, config)


def methods(
    operation: str, x: torch.Tensor, options: Namespace, group: SymmetricGroup | None
) -> Iterator[tuple[str, str, Call]]:
    """Everything to compare, NCCL first.

    Args:
        operation: one of OPERATIONS.
        x: [ranks, numel].
        options: of ``add_arguments``.
        group: of all ranks; None where they cannot share memory.

    Yields:
        (method, format, call).
    """
    yield "NCCL", "bf16", nccl(operation, x)
    for format, scales in product(options.formats, options.scales):
        config = CodecConfig(format, scales=scales)
        name = f"{format} {scales}"
        yield "torch.distributed", name, partial(over_torch_distributed, operation, x, config)
        if group is not None:
            yield "symmetric", name, partial(over_symmetric_memory, operation, x, config, group)


def measure(
    operation: str, mib: float, options: Namespace, group: SymmetricGroup | None
) -> Iterator[dict]:
    """Check and time every method at one size; errors are against the result in fp32.

    Args:
        operation: one of OPERATIONS.
        mib: of the whole bf16 tensor.
        options: of ``add_arguments``.
        group: of all ranks; None where they cannot share memory.

    Yields:
        Rows of COLUMNS.
    """
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(ranks, int(mib * 2**19) // ranks, device="cuda").to(torch.bfloat16)
    exact = nccl(operation, x.float())()
    # Bytes that each rank must at least send, as NCCL's own tests count them.
    bus_bytes = x.nbytes * (ranks - 1) / ranks
    if operation == "all_reduce":
        bus_bytes *= 2  # a reduce-scatter and an all-gather
    nccl_us = None
    for method, format, call in methods(operation, x, options, group):
        error = relative_error(call().view(exact.shape), exact)
        us = call_time(call)
        if nccl_us is None:
            nccl_us = us
        yield {
            "operation": operation,
            "MiB": mib,
            "ranks": ranks,
            "method": method,
            "format": format,
            "us": us,
            "bus GB/s": bus_bytes / us / 1e3,
            "x NCCL": nccl_us / us,
            "error": error,
        }


def run(options: Namespace) -> list[dict]:
    """Measure every size; the rows of rank 0, none elsewhere.

    Raises:
        SystemExit: it was not started by torchrun.
    """
    if "RANK" not in os.environ:
        raise SystemExit(
            "error: collectives need several ranks; run "
            "torchrun --nproc-per-node 4 -m taco_kernels.benchmarks collectives"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        # Without symmetric memory the table still has the codecs over torch.distributed.
        reason = unavailable_reason(dist.group.WORLD)
        group = SymmetricGroup(dist.group.WORLD) if reason is None else None
        rows = []
        for operation, mib in product(options.operations, options.mib):
            rows.extend(measure(operation, mib, options, group))
        if dist.get_rank():
            return []
        print(f"NCCL {torch.cuda.nccl.version()}; symmetric memory: {reason or 'yes'}")
        return rows
    finally:
        dist.destroy_process_group()
