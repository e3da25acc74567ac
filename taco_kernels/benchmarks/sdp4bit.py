"""SDP4Bit's operations against a device copy of the same run."""

import argparse
from pathlib import Path

import torch

from taco_kernels import sdp4bit
from taco_kernels.benchmarks.codec import DTYPES, relative_error
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import buffers_for, machine, microseconds, report
from taco_kernels.sdp4bit import GroupFormat

COLUMNS = {
    "MiB": "g",
    "gradients": "",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "error": ".4f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[16, 64, 256, 1024], help="bf16 size of the bucket in MiB"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="of gradients")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks: shards, senders")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def operations(numel: int, dtype: torch.dtype, ranks: int) -> dict[str, tuple[list, int, float]]:
    """Per operation: calls on rotating buffers, bytes read and written by one, and its relative L2 error.

    As a rank runs them on a bucket of ``numel`` values: quantising it whole, what arrives at its shard, and
    the weights. The errors of sums are against the sum of the exact shards.
    """
    intra, inter = GroupFormat(8, 128, True), GroupFormat(4, 128, True)
    weights = GroupFormat(4, 2048)
    shard = numel // ranks
    count = buffers_for(numel * dtype.itemsize)
    gradients = [torch.randn(ranks, shard, device="cuda").to(dtype) for _ in range(count)]
    wires8 = [sdp4bit.quantize(g, intra) for g in gradients]
    wires4 = [sdp4bit.quantize(g, inter) for g in gradients]
    pairs = ranks // 2 or 1
    outs = [torch.empty(1, shard, device="cuda", dtype=dtype) for _ in range(count)]
    exact = gradients[0].float().sum(0, keepdim=True)
    old = [torch.randn(numel, device="cuda").bfloat16() for _ in range(count)]
    new = [(o.float() + 1e-3 * torch.randn_like(o, dtype=torch.float32)).bfloat16() for o in old]
    replicas = [o.view(ranks, shard).clone() for o in old]
    changes = [
        torch.cat([sdp4bit.quantize_difference(n, o, weights) for n, o in zip(a, b, strict=True)])
        for a, b in ((n.view(ranks, shard), o.view(ranks, shard)) for n, o in zip(new, old, strict=True))
    ]

    def round_trip(format: GroupFormat) -> float:
        wire = sdp4bit.quantize(gradients[0], format)
        out = torch.empty(ranks, shard, device="cuda")
        return relative_error(sdp4bit.sum_dequantize(wire[None], format, out), gradients[0])

    def summed(wires: torch.Tensor, format: GroupFormat) -> float:
        return relative_error(sdp4bit.sum_dequantize(wires[:, None], format, outs[0].float()), exact)

    again = sdp4bit.sum_requantize(wires8[0][:, None], intra, shard, inter)
    updated = sdp4bit.add_dequantized(changes[0], weights, old[0].view(ranks, shard).clone())
    size = numel * dtype.itemsize
    w8, w4, ww = (f.wire_bytes(shard) for f in (intra, inter, weights))

    def calls(operation) -> list:
        return [lambda i=i: operation(i) for i in range(count)]

    return {
        "quantize int8 Hadamard": (
            calls(lambda i: sdp4bit.quantize(gradients[i], intra, wires8[i])),
            size + ranks * w8,
            round_trip(intra),
        ),
        "quantize int4 Hadamard": (
            calls(lambda i: sdp4bit.quantize(gradients[i], inter, wires4[i])),
            size + ranks * w4,
            round_trip(inter),
        ),
        f"sum {ranks} x int8, dequantize": (
            calls(lambda i: sdp4bit.sum_dequantize(wires8[i][:, None], intra, outs[i])),
            ranks * w8 + outs[0].nbytes,
            summed(wires8[0], intra),
        ),
        f"sum {pairs} x {pairs} int8, requantize int4": (
            calls(
                lambda i: sdp4bit.sum_requantize(
                    wires8[i].view(pairs, ranks // pairs, -1), intra, shard, inter
                )
            ),
            ranks * w8 + ranks // pairs * w4,
            relative_error(sdp4bit.sum_dequantize(again[None], inter, outs[0].float()), exact),
        ),
        f"sum {ranks} x int4, dequantize": (
            calls(lambda i: sdp4bit.sum_dequantize(wires4[i][:, None], inter, outs[i])),
            ranks * w4 + outs[0].nbytes,
            summed(wires4[0], inter),
        ),
        "subtract, quantize int4": (
            calls(lambda i: sdp4bit.quantize_difference(new[i], old[i], weights)),
            4 * numel + weights.wire_bytes(numel),
            relative_error(updated.view(-1).float() - old[0].float(), new[0].float() - old[0].float()),
        ),
        "dequantize int4, add": (
            calls(lambda i: sdp4bit.add_dequantized(changes[i], weights, replicas[i])),
            4 * numel + ranks * ww,
            relative_error(updated.view(-1), new[0]),
        ),
    }


def run(options: argparse.Namespace) -> None:
    """Measure every size and type and print the table."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = []
    for mib in options.mib:
        numel = int(mib * 2**19) // options.ranks * options.ranks
        us, rate = copy_rate(numel, torch.bfloat16)
        base = {"MiB": mib, "gradients": "-", "operation": "copy bf16"}
        rows.append({**base, "us": us, "GB/s": rate, "of copy": 1.0, "error": 0.0})
        for name in options.dtypes:
            for operation, (calls, moved, error) in operations(numel, DTYPES[name], options.ranks).items():
                us = microseconds(calls)
                speed = {"us": us, "GB/s": moved / us / 1e3, "of copy": moved / us / 1e3 / rate}
                rows.append({**base, "gradients": name, "operation": operation, **speed, "error": error})
    report(rows, COLUMNS, options.json)
