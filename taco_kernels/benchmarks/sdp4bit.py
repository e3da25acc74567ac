"""SDP4Bit's operations against a device copy of the same run."""

import argparse
from collections.abc import Iterator

import torch

from taco_kernels import sdp4bit
from taco_kernels.benchmarks.timing import DTYPES, SPEED, Operation, buffers_for, relative_error, timed_rows
from taco_kernels.sdp4bit import GroupFormat

COLUMNS = {"MiB": "g", "gradients": "", "operation": ""} | SPEED | {"error": ".4f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=[16, 64, 256, 1024], help="bf16 buckets")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="of gradients")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks: shards, senders")


def operations(numel: int, name: str, ranks: int) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes read and written by a call.

    As a rank runs them on a bucket of ``numel`` values: quantising it whole, what arrives at its shard, and
    the weights. The errors of sums are against the sum of the exact shards.
    """
    dtype = DTYPES[name]
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

    steps = [
        ("quantize int8 Hadamard", lambda i: sdp4bit.quantize(gradients[i], intra, wires8[i]),
         size + ranks * w8, round_trip(intra)),
        ("quantize int4 Hadamard", lambda i: sdp4bit.quantize(gradients[i], inter, wires4[i]),
         size + ranks * w4, round_trip(inter)),
        (f"sum {ranks} x int8, dequantize",
         lambda i: sdp4bit.sum_dequantize(wires8[i][:, None], intra, outs[i]),
         ranks * w8 + outs[0].nbytes, summed(wires8[0], intra)),
        (f"sum {pairs} x {pairs} int8, requantize int4",
         lambda i: sdp4bit.sum_requantize(wires8[i].view(pairs, ranks // pairs, -1), intra, shard, inter),
         ranks * w8 + ranks // pairs * w4,
         relative_error(sdp4bit.sum_dequantize(again[None], inter, outs[0].float()), exact)),
        (f"sum {ranks} x int4, dequantize",
         lambda i: sdp4bit.sum_dequantize(wires4[i][:, None], inter, outs[i]),
         ranks * w4 + outs[0].nbytes, summed(wires4[0], inter)),
        ("subtract, quantize int4", lambda i: sdp4bit.quantize_difference(new[i], old[i], weights),
         4 * numel + weights.wire_bytes(numel),
         relative_error(updated.view(-1).float() - old[0].float(), new[0].float() - old[0].float())),
        ("dequantize int4, add", lambda i: sdp4bit.add_dequantized(changes[i], weights, replicas[i]),
         4 * numel + ranks * ww, relative_error(updated.view(-1), new[0])),
    ]  # fmt: skip
    for operation, call, moved, error in steps:
        yield {"gradients": name, "operation": operation, "error": error}, call, count, moved


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every size and type."""
    for mib in options.mib:
        numel = int(mib * 2**19) // options.ranks * options.ranks
        every = (row for name in options.dtypes for row in operations(numel, name, options.ranks))
        yield from timed_rows(numel, torch.bfloat16, {"MiB": mib}, every)
