"""``python -m taco_kernels.benchmarks NAME [options]``."""

import argparse

from taco_kernels.benchmarks import (
    codec,
    collectives,
    homomorphic,
    instructions,
    launch,
    packed,
    sdp4bit,
    tah_quant,
    tuning,
)

BENCHMARKS = {
    "codec": codec,
    "collectives": collectives,
    "homomorphic": homomorphic,
    "instructions": instructions,
    "launch": launch,
    "packed": packed,
    "sdp4bit": sdp4bit,
    "tah-quant": tah_quant,
    "tuning": tuning,
}


def main() -> None:
    """Parse the name of a benchmark and its options, and run it."""
    parser = argparse.ArgumentParser(prog="python -m taco_kernels.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        module.add_arguments(commands.add_parser(name, help=module.__doc__.splitlines()[0]))
    options = parser.parse_args()
    BENCHMARKS[options.name].run(options)


if __name__ == "__main__":
    main()
