"""``python -m taco_kernels.benchmarks NAME [options]``.

TACO_KERNELS_AS_IF=89 times the kernels that an sm_89 would be given, on this GPU.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from taco_kernels.benchmarks import codecs, collectives
from taco_kernels.benchmarks.timing import COLUMNS, DTYPES, report, timed_rows


class Benchmark(NamedTuple):
    """A codec's benchmark."""

    cases: Callable
    """Generator of the cases of a size and a dtype; the first line of its docstring is the help."""
    mib: list[int]
    """Tensor sizes in MiB, unless others are asked for."""
    dtypes: list[str]
    """Tensor dtypes, unless others are asked for."""


CODECS = {
    "codec": Benchmark(codecs.taco_cases, [1, 16, 64, 256], ["bf16"]),
    "sdp4bit": Benchmark(codecs.sdp4bit_cases, [16, 64, 256, 1024], ["bf16", "fp32"]),
    "tah-quant": Benchmark(codecs.pipeline_cases, [16, 32, 64, 128], ["bf16"]),
    "lossless": Benchmark(codecs.lossless_cases, [64, 256], ["bf16", "fp32"]),
    "bitmap-sparse": Benchmark(codecs.bitmap_cases, [40, 256], ["fp32"]),
}
"""Benchmarks of one GPU, by name."""


def first_line(documented: object) -> str:
    """The first line of a docstring, which is the help of a benchmark."""
    return documented.__doc__.splitlines()[0]


def make_parser() -> argparse.ArgumentParser:
    """The command line: a benchmark and its options."""
    parser = argparse.ArgumentParser(prog="python -m taco_kernels.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, benchmark in CODECS.items():
        command = commands.add_parser(name, help=first_line(benchmark.cases))
        command.add_argument(
            "--mib", type=float, nargs="+", default=benchmark.mib, help="tensor sizes in MiB"
        )
        command.add_argument("--dtypes", nargs="+", choices=DTYPES, default=benchmark.dtypes)
        if name == "codec":
            codecs.add_taco_arguments(command)
    collectives.add_arguments(commands.add_parser("collectives", help=first_line(collectives)))
    return parser


def main() -> None:
    """Parse the name of a benchmark and its options, run it, and print the table."""
    options = make_parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "error: the benchmarks time kernels on a GPU, and torch finds none; run them where it does"
        )
    torch.manual_seed(0)
    if options.name == "collectives":
        report(collectives.run(options), collectives.COLUMNS)
        return
    cases = partial(CODECS[options.name].cases, options=options)
    rows = []
    for mib in options.mib:
        for dtype_name in options.dtypes:
            rows.extend(timed_rows(mib, dtype_name, cases))
    report(rows, COLUMNS)


if __name__ == "__main__":
    main()
