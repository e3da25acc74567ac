"""Runs an unmodified Megatron entrypoint with compression:

torchrun --nproc-per-node 8 -m megatron.compression their_pretrain.py <their flags> --taco
"""

import os
import runpy
import sys

from megatron.compression.errors import InputError, one_line_errors

USAGE = "usage: torchrun ... -m megatron.compression SCRIPT [its flags and ours]"


def script_of(arguments: list[str]) -> str:
    """The script that the command line names. Raises: InputError: none, or a file that is not
    there."""
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"no script is named; {USAGE}")
    if not os.path.isfile(arguments[0]):
        raise InputError(f"{arguments[0]}: no such file; {USAGE}")
    return arguments[0]


def main() -> None:
    """Give the script our flags, and its ``pretrain`` our hooks; then run it as it is."""
    with one_line_errors():
        script = script_of(sys.argv[1:])
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()  # before megatron.training is imported

    from megatron.training import get_args

    from megatron.compression.frontends.megatron_lm.enable import add_arguments, enable
    from megatron.compression.patches import loop

    # The script sees its own command line.
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as python does for a script
    # The script parses and calls pretrain itself; both are reached by name.
    loop.with_extra_arguments(add_arguments)
    loop.before_pretrain(lambda container: enable(get_args(), container.model))
    with one_line_errors():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
