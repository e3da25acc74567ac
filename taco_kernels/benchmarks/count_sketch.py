"""The homomorphic sketch against a device copy of the same run."""

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch

from taco_kernels import homomorphic as lhc
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import buffers_for, machine, microseconds, report
from taco_kernels.count_sketch import launch

COLUMNS = {
    "M values": "g",
    "ratio": "g",
    "cell bits": "d",
    "bits a value": ".2f",
    "union": ".3f",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "leftovers": "d",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mvalues", type=float, nargs="+", default=[1, 10, 40], help="millions of values")
    parser.add_argument("--ratios", type=float, nargs="+", default=[4.0, 1.35])
    parser.add_argument("--cell-bits", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument(
        "--load", type=float, default=0.95, help="density of the union, as a share of the exact one"
    )
    parser.add_argument(
        "--peel-cells",
        type=int,
        nargs="+",
        default=[launch.PEEL_CELLS],
        help="cells a program peels at a time",
    )
    parser.add_argument(
        "--peel-rows", type=int, nargs="+", default=[launch.PEEL_ROWS], help="rows that it counts at a time"
    )
    parser.add_argument("--peel-warps", type=int, nargs="+", default=[launch.PEEL_WARPS])
    parser.add_argument(
        "--peel-registers", type=int, nargs="+", default=[launch.PEEL_REGISTERS], help="most a thread"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def operations(layout: lhc.Layout, senders: int, load: float) -> tuple[dict, lhc.Decoded]:
    """Per operation: calls on rotating buffers and the bytes that one has to read and write."""
    numel, seed = layout.numel, 7
    share = 1 - (1 - load * layout.exact_density) ** (1 / senders)
    xs = [torch.randn(1, numel, device="cuda") for _ in range(max(senders, buffers_for(4 * numel)))]
    exponents = torch.stack([lhc.row_exponents(x, layout) for x in xs]).amax(0)
    threshold = torch.distributions.Normal(0, 1).icdf(torch.tensor([1 - share / 2])).cuda()
    rests = [torch.empty_like(x) for x in xs]
    wires = torch.cat([lhc.encode(x, threshold, exponents, layout, senders, seed) for x in xs[:senders]])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    cells, words = lhc.combine(wires, layout)
    sums = [cells.clone() for _ in range(buffers_for(8 * layout.cells + 4 * numel))]
    decoded = lhc.decode(cells.clone(), words, exponents[0], layout, senders, seed)

    def decode(i: int) -> lhc.Decoded:
        # sums are used up: from the second replay on other values are subtracted, the work is the same
        return lhc.decode(sums[i], words, exponents[0], layout, senders, seed)

    def encode(i: int) -> torch.Tensor:
        return lhc.encode(xs[i], threshold, exponents, layout, senders, seed, rests[i])

    def select(i: int) -> torch.Tensor:
        return lhc.choose(*lhc.candidates(xs[i], 0.2), layout.exact_density)

    def calls(operation, count: int) -> list:
        return [partial(operation, i) for i in range(count)]

    cells_moved = 4 * layout.cells + 4 * layout.words
    return {
        "select": (calls(select, len(xs)), 0),
        "exponents": (calls(lambda i: launch.row_exponents(xs[i], layout), len(xs)), 4 * numel),
        "encode": (calls(encode, len(xs)), 8 * numel + layout.wire_bytes),
        "combine": (calls(lambda i: lhc.combine(many[i], layout), len(many)), wires.numel() + cells_moved),
        "peel": (calls(decode, len(sums)), cells_moved + 4 * numel),
    }, decoded


def timing(operation: str, calls: list, moved: int, rate: float) -> dict:
    """Time and rate of an operation that moves so many bytes, beside a copy's rate."""
    us = microseconds(calls)
    return {"operation": operation, "us": us, "GB/s": moved / us / 1e3, "of copy": moved / us / 1e3 / rate}


def run(options: argparse.Namespace) -> None:
    """Measure every combination of the options and print the table."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = []
    for millions in options.mvalues:
        numel = int(millions * 1e6)
        us, rate = copy_rate(numel, torch.float32)
        base = {"M values": millions, "ratio": 0.0, "cell bits": 0, "bits a value": 32.0, "union": 1.0}
        rows.append({**base, "operation": "copy", "us": us, "GB/s": rate, "of copy": 1.0, "leftovers": 0})
        for ratio in options.ratios:
            for cell_bits in options.cell_bits:
                layout = lhc.Layout(lhc.SketchConfig(ratio=ratio, cell_bits=cell_bits), numel)
                timed, decoded = operations(layout, options.senders, options.load)
                union, leftovers = decoded.counters.tolist()
                base = {"M values": millions, "ratio": ratio, "cell bits": cell_bits}
                base |= {"bits a value": 8 * layout.wire_bytes / numel, "union": union / numel}
                base["leftovers"] = leftovers
                peel = timed.pop("peel")
                rows += [timing(name, *work, rate) | base for name, work in timed.items()]
                for shape in itertools.product(
                    options.peel_rows, options.peel_cells, options.peel_warps, options.peel_registers
                ):
                    launch.PEEL_ROWS, launch.PEEL_CELLS, launch.PEEL_WARPS, launch.PEEL_REGISTERS = shape
                    rows.append(timing(f"peel {shape}", *peel, rate) | base)
    report(rows, COLUMNS, options.json)
