"""The count sketch, TAGC's other wire: each operation against a device copy of the same run."""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from taco_kernels import count_sketch
from taco_kernels.benchmarks.timing import SPEED, Operation, buffers_for, timed_rows

COLUMNS = {"M values": "g", "ratio": "g", "cell bits": "d", "bits a value": ".2f", "union": ".3f"}
COLUMNS |= {"operation": ""} | SPEED | {"leftovers": "d"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mvalues", type=float, nargs="+", default=[1, 10, 40], help="millions of values")
    parser.add_argument("--ratios", type=float, nargs="+", default=[4.0, 1.35])
    parser.add_argument("--cell-bits", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.95, help="the union's share of the exact density")


def operations(layout: count_sketch.Layout, senders: int, load: float) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes that a call has to read and write."""
    numel, seed = layout.numel, 7
    share = 1 - (1 - load * layout.exact_density) ** (1 / senders)
    count = max(senders, buffers_for(4 * numel))
    xs = [torch.randn(1, numel, device="cuda") for _ in range(count)]
    exponents = torch.stack([count_sketch.row_exponents(x, layout) for x in xs]).amax(0)
    threshold = torch.distributions.Normal(0, 1).icdf(torch.tensor([1 - share / 2])).cuda()
    rests = [torch.empty_like(x) for x in xs]

    def encode(i: int) -> torch.Tensor:
        return count_sketch.encode(xs[i], threshold, exponents, layout, senders, seed, rests[i])

    def decode(cells: torch.Tensor) -> count_sketch.Decoded:
        return count_sketch.decode(cells, words, exponents[0], layout, senders, seed)

    wires = torch.cat([encode(i) for i in range(senders)])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    cells, words = count_sketch.combine(wires, layout)
    # sums are used up: from the second replay on other values are subtracted, the work is the same
    sums = [cells.clone() for _ in range(buffers_for(8 * layout.cells + 4 * numel))]
    union, leftovers = decode(cells).counters.tolist()
    columns = {"ratio": layout.config.ratio, "cell bits": layout.config.cell_bits}
    columns |= {"bits a value": 8 * layout.wire_bytes / numel, "union": union / numel, "leftovers": leftovers}
    moved = 4 * layout.cells + 4 * layout.words
    for name, call, buffers, size in (
        ("exponents", lambda i: count_sketch.row_exponents(xs[i], layout), count, 4 * numel),
        ("encode", encode, count, 8 * numel + layout.wire_bytes),
        ("combine", lambda i: count_sketch.combine(many[i], layout), len(many), wires.numel() + moved),
        ("peel", lambda i: decode(sums[i]), len(sums), moved + 4 * numel),
    ):
        yield columns | {"operation": name}, call, buffers, size


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every combination of the options."""
    settings = product(options.ratios, options.cell_bits)
    configs = [count_sketch.SketchConfig(ratio, cell_bits=bits) for ratio, bits in settings]
    for millions in options.mvalues:
        numel = int(millions * 1e6)
        layouts = [count_sketch.Layout(config, numel) for config in configs]
        every = (row for layout in layouts for row in operations(layout, options.senders, options.load))
        yield from timed_rows(numel, torch.float32, {"M values": millions}, every)
