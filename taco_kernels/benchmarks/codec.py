"""encode, decode, decode_sum and decode_sum_encode against a device copy of the same run."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from taco_kernels import FORMATS, ROUNDINGS, SCALES, CodecConfig, Stream, ops
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import buffers_for, machine, microseconds, report

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = {
    "MiB": "g",
    "dtype": "",
    "format": "",
    "G": "d",
    "scales": "",
    "rounding": "",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "error": ".4f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64, 256], help="tensor sizes in MiB")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=["nearest"])
    parser.add_argument(
        "--second-roundings",
        nargs="+",
        choices=ROUNDINGS,
        help="rounding of decode_sum_encode's second hop (default: that of the senders)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument(
        "--senders", type=int, default=4, help="wires that decode_sum and decode_sum_encode add up"
    )
    parser.add_argument("--no-hadamard", action="store_true", help="plain group scaling, the ablation")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((result.float() - exact.float()).norm() / exact.float().norm())


def operations(
    numel: int, dtype: torch.dtype, config: CodecConfig, senders: int, config_out: CodecConfig
) -> dict[str, tuple[list[Callable[[], object]], int, float]]:
    """Per operation: calls on rotating buffers, bytes read and written by one, and its relative L2 error.

    The errors of encode and decode are those of the round trip, that of decode_sum is against the sum of
    separate decodes, that of decode_sum_encode, which writes ``config_out``, against decode_sum.
    """
    stream = [Stream(key=1, stream=w) if config.rounding != "nearest" else None for w in range(senders)]
    second = Stream(key=2, stream=0) if config_out.rounding != "nearest" else None
    first, shape, fp32 = stream[0], (numel,), torch.float32
    size, wire = numel * dtype.itemsize, config.wire_bytes(numel)
    count = buffers_for(size + wire)
    xs = [torch.randn(numel, device="cuda").to(dtype) for _ in range(count)]
    outs = [torch.empty_like(x) for x in xs]
    wires = [ops.encode(x, config, 1, first) for x in xs]
    many = [
        torch.cat([ops.encode(xs[(m + w) % count], config, 1, stream[w]) for w in range(senders)])
        for m in range(max(2, -(-count // senders)))
    ]
    round_trip = relative_error(ops.decode(wires[0], config, shape, fp32, first), xs[0])
    separate = sum(ops.decode(many[0][w : w + 1], config, shape, fp32, stream[w]) for w in range(senders))
    total = ops.decode_sum(many[0], config, shape, fp32, first)
    again = ops.decode_sum_encode(many[0], config, numel, first, second, config_out=config_out)

    def encode(i: int) -> torch.Tensor:
        return ops.encode(xs[i], config, 1, first, wires[i])

    def decode(i: int) -> torch.Tensor:
        return ops.decode(wires[i], config, shape, dtype, first, outs[i])

    def decode_sum(i: int) -> torch.Tensor:
        return ops.decode_sum(many[i], config, shape, dtype, first, outs[i])

    def decode_sum_encode(i: int) -> torch.Tensor:
        return ops.decode_sum_encode(many[i], config, numel, first, second, wires[i][0], config_out)

    def calls(operation: Callable[[int], torch.Tensor], n: int) -> list[Callable[[], object]]:
        return [partial(operation, i) for i in range(n)]

    return {
        "encode": (calls(encode, count), size + wire, round_trip),
        "decode": (calls(decode, count), size + wire, round_trip),
        "decode_sum": (calls(decode_sum, len(many)), size + senders * wire, relative_error(total, separate)),
        "decode_sum_encode": (
            calls(decode_sum_encode, len(many)),
            (senders + 1) * wire,
            relative_error(ops.decode(again[None], config_out, shape, fp32, second), total),
        ),
    }


def run(options: argparse.Namespace) -> None:
    """Measure every combination of the options and print the table."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = []
    for mib in options.mib:
        for dtype_name in options.dtypes:
            dtype = DTYPES[dtype_name]
            numel = int(mib * 2**20) // dtype.itemsize
            us, rate = copy_rate(numel, dtype)
            copy = dict(
                MiB=mib, dtype=dtype_name, format="-", G=0, scales="-", rounding="-", operation="copy"
            )
            rows.append({**copy, "us": us, "GB/s": rate, "of copy": 1.0, "error": 0.0})
            for config, config_out in configs(options):
                measured = operations(numel, dtype, config, options.senders, config_out)
                for name, (calls, moved, error) in measured.items():
                    rounding = config.rounding
                    if config_out != config and name == "decode_sum_encode":
                        rounding += f",{config_out.rounding}"
                    us = microseconds(calls)
                    row = dict(MiB=mib, dtype=dtype_name, format=config.format, G=config.group_size)
                    row.update(scales=config.scales, rounding=rounding, operation=name, us=us, error=error)
                    rows.append({**row, "GB/s": moved / us / 1e3, "of copy": moved / us / 1e3 / rate})
    report(rows, COLUMNS, options.json)


def configs(options: argparse.Namespace) -> list[tuple[CodecConfig, CodecConfig]]:
    """The codecs to measure, of both hops; dither only for the formats that have it."""
    first = [
        CodecConfig(format, group_size, scales, rounding, not options.no_hadamard)
        for format in options.formats
        for group_size in options.group_sizes
        for scales in options.scales
        for rounding in options.roundings
        if not (rounding == "dither" and format.startswith("fp8"))
    ]
    return [
        (config, replace(config, rounding=rounding))
        for config in first
        for rounding in options.second_roundings or [config.rounding]
        if not (rounding == "dither" and config.is_float)
    ]
