"""``python -m taco_kernels.benchmarks NAME [options]``.

TACO_KERNELS_AS_IF=89 times the kernels that an sm_89 would be given, on this GPU.
"""

import argparse
import sys
from functools import partial

import torch

from taco_kernels.benchmarks import codecs, collectives
from taco_kernels.benchmarks.timing import COLUMNS, DTYPES, report, timed_rows

CODECS = {
    "codec": (codecs.taco_cases, [1, 16, 64, 256], ["bf16"]),
    "sdp4bit": (codecs.sdp4bit_cases, [16, 64, 256, 1024], ["bf16", "fp32"]),
    "tah-quant": (codecs.pipeline_cases, [16, 32, 64, 128], ["bf16"]),
    "lossless": (codecs.lossless_cases, [64, 256], ["bf16", "fp32"]),
    "bitmap-sparse": (codecs.bitmap_cases, [40, 256], ["fp32"]),
}
"""By name: what is timed, MiB of tensors and their types where none are given."""


def main() -> None:
    """Parse the name of a benchmark and its options, run it, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m taco_kernels.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, (cases, mib, dtypes) in CODECS.items():
        command = commands.add_parser(name, help=cases.__doc__.splitlines()[0])
        command.add_argument(
            "--mib", type=float, nargs="+", default=mib, help="tensor sizes in MiB"
        )
        command.add_argument("--dtypes", nargs="+", choices=DTYPES, default=dtypes)
        if name == "codec":
            codecs.add_taco_arguments(command)
    collectives.add_arguments(
        commands.add_parser("collectives", help=collectives.__doc__.splitlines()[0])
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "error: the benchmarks time kernels on a GPU, and torch finds none; run them where it does"
        )
    torch.manual_seed(0)
    if options.name == "collectives":
        report(collectives.run(options), collectives.COLUMNS)
        return
    cases = partial(CODECS[options.name][0], options=options)
    report(
        [
            row
            for mib in options.mib
            for name in options.dtypes
            for row in timed_rows(mib, name, cases)
        ],
        COLUMNS,
    )


if __name__ == "__main__":
    main()
