"""Packed sparse values, TAGC's default wire: each operation against a device copy of the same run."""

import argparse
from functools import partial
from pathlib import Path

import torch

from taco_kernels import packed
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import buffers_for, machine, microseconds, report
from taco_kernels.count_sketch.selection import share_threshold

COLUMNS = {
    "MiB": "g",
    "bits": "d",
    "senders": "d",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "density": ".3f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=[40, 256], help="fp32 size of a shard in MiB")
    parser.add_argument("--bits", type=int, nargs="+", default=[16], choices=[8, 16, 32])
    parser.add_argument("--share", type=float, default=0.2, help="of the values, sent by a rank")
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def operations(layout: packed.BitmapLayout, senders: int) -> dict[str, tuple[list, int, float]]:
    """Per operation: calls on rotating buffers, bytes that one has to move, density of what it is about.

    ``choose`` has no bytes of its own: it looks at a sample. ``pack`` reads the values and writes the wire
    and the remainder; ``unpack, sum`` reads the senders' wires and writes the sum; ``choose, repack`` is what
    a node sends on, that sum chosen from and packed again as the ranks' union.
    """
    numel, size = layout.numel, 4 * layout.numel
    count = max(senders, buffers_for(size))
    xs = [torch.randn(1, numel, device="cuda") for _ in range(count)]
    rests = [torch.empty_like(x) for x in xs]
    threshold = share_threshold(xs[0], layout.share)
    wires = torch.cat([packed.encode(x, threshold, layout) for x in xs[:senders]])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    total = packed.decode_sum(wires, layout)
    union = packed.BitmapLayout(numel, min(1.0, 1 - (1 - layout.share) ** senders), layout.bits)
    sums = [total[None].clone() for _ in range(buffers_for(size))]

    def repack(i: int) -> torch.Tensor:
        chosen = share_threshold(sums[i], union.share)
        return packed.encode(sums[i], chosen, union, rests[i])

    def calls(operation, among: list) -> list:
        return [partial(operation, i) for i in range(len(among))]

    density = float((xs[0].abs() >= threshold).float().mean())
    joined = float((total != 0).float().mean())
    return {
        "choose": (calls(lambda i: share_threshold(xs[i], layout.share), xs), 0, density),
        "pack": (
            calls(lambda i: packed.encode(xs[i], threshold, layout, rests[i]), xs),
            2 * size + layout.wire_bytes,
            density,
        ),
        "unpack, sum": (
            calls(lambda i: packed.decode_sum(many[i], layout), many),
            wires.numel() + size,
            joined,
        ),
        "choose, repack": (calls(repack, sums), 2 * size + union.wire_bytes, joined),
    }


def run(options: argparse.Namespace) -> None:
    """Measure every size and print the table."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = []
    for mib in options.mib:
        numel = int(mib * 2**18)
        us, rate = copy_rate(numel, torch.float32)
        base = {"MiB": mib, "bits": 32, "senders": options.senders, "density": 1.0}
        rows.append({**base, "operation": "copy", "us": us, "GB/s": rate, "of copy": 1.0})
        for bits in options.bits:
            layout = packed.BitmapLayout(numel, options.share, bits)
            for operation, (calls, moved, density) in operations(layout, options.senders).items():
                us = microseconds(calls)
                speed = {"us": us, "GB/s": moved / us / 1e3, "of copy": moved / us / 1e3 / rate}
                rows.append({**base, "bits": bits, "operation": operation, "density": density, **speed})
    report(rows, COLUMNS, options.json)
