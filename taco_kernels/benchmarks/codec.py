"""TACO's encode, decode, decode_sum and decode_sum_encode against a device copy of the same run.

With --row each row of so many values is a payload of its own, as the tokens of experts are.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from taco_kernels.benchmarks.timing import DTYPES, SPEED, Operation, buffers_for, relative_error, timed_rows
from taco_kernels.taco import (
    FORMATS,
    SCALES,
    CodecConfig,
    decode,
    decode_sum,
    decode_sum_encode,
    encode,
)

COLUMNS = {"MiB": "g", "dtype": "", "format": "", "G": "d", "scales": "", "outliers": ""}
COLUMNS |= {"operation": ""}
COLUMNS |= SPEED | {"error": ".4f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64, 256], help="tensor sizes in MiB")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--row", type=int, default=0, help="values of a payload; 0: one for all of them")
    parser.add_argument("--senders", type=int, default=4, help="wires that the sums add up")
    parser.add_argument("--no-hadamard", action="store_true", help="plain group scaling, the ablation")
    parser.add_argument(
        "--outliers", nargs="+", choices=("off", "on"), default=["off"], help="massive values apart"
    )
    parser.add_argument(
        "--massive", type=int, default=0, help="of 4096 values so many are 1000 times as large"
    )


def tensor(numel: int, dtype: torch.dtype, massive: int) -> torch.Tensor:
    """Normal values, the first ``massive`` odd ones of 4096 a thousand times as large."""
    x = torch.randn(numel, device="cuda")
    x[: numel // 4096 * 4096].view(-1, 4096)[:, 1 : 2 * massive : 2] *= 1000
    return x.to(dtype)


def operations(
    numel: int, dtype: torch.dtype, config: CodecConfig, senders: int, massive: int
) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes read and written by a call.

    The errors of encode and decode are those of the round trip, that of decode_sum is against the sum of
    separate decodes, that of decode_sum_encode against decode_sum.
    """
    shape, fp32 = (numel,), torch.float32
    size, wire = numel * dtype.itemsize, config.wire_bytes(numel)
    count = buffers_for(size + wire)
    xs = [tensor(numel, dtype, massive) for _ in range(count)]
    outs = [torch.empty_like(x) for x in xs]
    wires = [encode(x, config) for x in xs]
    sums = max(2, -(-count // senders))
    many = [torch.cat([wires[(m + w) % count] for w in range(senders)]) for m in range(sums)]
    round_trip = relative_error(decode(wires[0], config, shape, fp32), xs[0])
    separate = sum(decode(many[0][w : w + 1], config, shape, fp32) for w in range(senders))
    total = decode_sum(many[0], config, shape, fp32)
    again = decode(decode_sum_encode(many[0], config, numel)[None], config, shape, fp32)
    summed, encoded = relative_error(total, separate), relative_error(again, total)

    def summing(i: int) -> torch.Tensor:
        return decode_sum(many[i], config, shape, dtype, outs[i])

    def encoding(i: int) -> torch.Tensor:
        return decode_sum_encode(many[i], config, numel, wires[i][0])

    columns = {"format": config.format, "G": config.group_size, "scales": config.scales}
    columns |= {"outliers": "on" if config.outliers else "off"}
    for name, call, buffers, moved, error in (
        ("encode", lambda i: encode(xs[i], config, 1, wires[i]), count, size + wire, round_trip),
        ("decode", lambda i: decode(wires[i], config, shape, dtype, outs[i]), count, size + wire, round_trip),
        ("decode_sum", summing, sums, size + senders * wire, summed),
        ("decode_sum_encode", encoding, sums, (senders + 1) * wire, encoded),
    ):
        yield columns | {"operation": name, "error": error}, call, buffers, moved


def row_operations(numel: int, dtype: torch.dtype, config: CodecConfig, row: int) -> Iterator[Operation]:
    """encode and decode of ``[tokens, row]``, as ``operations`` has them."""
    tokens, fp32 = numel // row, torch.float32
    size, wire = numel * dtype.itemsize, tokens * config.wire_bytes(row)
    count = buffers_for(size + wire)
    xs = [torch.randn(tokens, row, device="cuda").to(dtype) for _ in range(count)]
    outs = [torch.empty_like(x) for x in xs]
    wires = [encode(x, config, tokens) for x in xs]
    error = relative_error(decode(wires[0], config, xs[0].shape, fp32), xs[0])
    columns = {"format": config.format, "G": config.group_size, "scales": config.scales, "error": error}
    columns["outliers"] = "on" if config.outliers else "off"
    for name, call in (
        ("encode", lambda i: encode(xs[i], config, tokens, wires[i])),
        ("decode", lambda i: decode(wires[i], config, xs[i].shape, dtype, outs[i])),
    ):
        yield columns | {"operation": f"{name} rows of {row}"}, call, count, size + wire


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every combination of the options."""
    settings = product(options.formats, options.group_sizes, options.scales, options.outliers)
    settings = [s for s in settings if s[2] != "signed" or s[0].startswith("int")]
    configs = [CodecConfig(*s[:3], not options.no_hadamard, s[3] == "on") for s in settings]
    for mib, name in product(options.mib, options.dtypes):
        numel, senders = int(mib * 2**20) // DTYPES[name].itemsize, options.senders
        every = (
            row
            for config in configs
            for row in (
                row_operations(numel, DTYPES[name], config, options.row)
                if options.row
                else operations(numel, DTYPES[name], config, senders, options.massive)
            )
        )
        yield from timed_rows(numel, DTYPES[name], {"MiB": mib, "dtype": name}, every)
