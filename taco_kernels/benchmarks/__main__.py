"""``python -m taco_kernels.benchmarks NAME [options]``.

TACO_KERNELS_AS_IF=89 times the kernels that an sm_89 would be given, on this GPU; 89:tiles their tiles,
compiled for this GPU.
"""

import argparse
from pathlib import Path

import torch

from taco_kernels.benchmarks import (
    bitmap_sparse,
    codec,
    collectives,
    lossless,
    sdp4bit,
    tah_quant,
)
from taco_kernels.benchmarks.timing import report

BENCHMARKS = {
    "bitmap-sparse": bitmap_sparse,
    "codec": codec,
    "collectives": collectives,
    "lossless": lossless,
    "sdp4bit": sdp4bit,
    "tah-quant": tah_quant,
}


def main() -> None:
    """Parse the name of a benchmark and its options, run it, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m taco_kernels.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0])
        module.add_arguments(command)
        command.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    module = BENCHMARKS[options.name]
    torch.manual_seed(0)
    report(list(module.run(options)), module.COLUMNS, options.json)


if __name__ == "__main__":
    main()
