"""Bitmap-sparse values, TAGC's default wire: each operation against a device copy of the same run."""

import argparse
from collections.abc import Iterator

import torch

from taco_kernels.benchmarks.timing import SPEED, Operation, buffers_for, timed_rows
from taco_kernels.bitmap_sparse import BitmapLayout, decode_sum, encode
from taco_kernels.count_sketch.selection import share_threshold

COLUMNS = {"MiB": "g", "bits": "d", "senders": "d", "operation": ""} | SPEED | {"density": ".3f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=float, nargs="+", default=[40, 256], help="fp32 size of a shard in MiB")
    parser.add_argument("--bits", type=int, nargs="+", default=[16], choices=[8, 16])
    parser.add_argument("--share", type=float, default=0.2, help="of the values, sent by a rank")
    parser.add_argument("--senders", type=int, default=4)


def operations(layout: BitmapLayout, senders: int) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes that a call has to move.

    ``choose`` has no bytes of its own: it looks at a sample. ``pack`` reads the values and writes the wire
    and the remainder; ``unpack, sum`` reads the senders' wires and writes the sum; ``choose, repack`` is what
    a node sends on, that sum chosen from and packed again as the ranks' union.
    """
    numel, size = layout.numel, 4 * layout.numel
    count = max(senders, buffers_for(size))
    xs = [torch.randn(1, numel, device="cuda") for _ in range(count)]
    rests = [torch.empty_like(x) for x in xs]
    threshold = share_threshold(xs[0], layout.share)
    wires = torch.cat([encode(x, threshold, layout) for x in xs[:senders]])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    total = decode_sum(wires, layout)
    union = BitmapLayout(numel, min(1.0, 1 - (1 - layout.share) ** senders), layout.bits)
    sums = [total[None].clone() for _ in range(buffers_for(size))]

    def repack(i: int) -> torch.Tensor:
        return encode(sums[i], share_threshold(sums[i], union.share), union, rests[i])

    density = float((xs[0].abs() >= threshold).float().mean())
    joined = float((total != 0).float().mean())
    packed, unpacked = 2 * size + layout.wire_bytes, wires.numel() + size
    for name, call, buffers, moved, share in (
        ("choose", lambda i: share_threshold(xs[i], layout.share), count, 0, density),
        ("pack", lambda i: encode(xs[i], threshold, layout, rests[i]), count, packed, density),
        ("unpack, sum", lambda i: decode_sum(many[i], layout), len(many), unpacked, joined),
        ("choose, repack", repack, len(sums), 2 * size + union.wire_bytes, joined),
    ):
        yield {"bits": layout.bits, "operation": name, "density": share}, call, buffers, moved


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every size."""
    for mib in options.mib:
        numel = int(mib * 2**18)
        layouts = [BitmapLayout(numel, options.share, bits) for bits in options.bits]
        every = (row for layout in layouts for row in operations(layout, options.senders))
        yield from timed_rows(numel, torch.float32, {"MiB": mib, "senders": options.senders}, every)
