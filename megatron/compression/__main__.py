"""Runs an unmodified Megatron entrypoint with compression:

torchrun --nproc-per-node 8 -m megatron.compression their_pretrain.py <their flags> --taco
"""

import os
import runpy
import sys


def main() -> None:
    """Give the script our flags, and its ``pretrain`` our hooks; then run it as it is."""
    script = sys.argv[1] if sys.argv[1:] else "-"
    if not os.path.isfile(script):
        what = "" if script.startswith("-") else f"error: {script}: no such file; "
        usage = "usage: torchrun ... -m megatron.compression SCRIPT [its flags and ours]"
        print(what + usage, file=sys.stderr)
        raise SystemExit(2)
    from megatron.compression import startup
    from megatron.compression.errors import one_line_errors

    startup.prepare()  # before megatron.training is imported

    from megatron.training import get_args

    from megatron.compression.patches import loop
    from megatron.compression.setup import add_arguments, enable

    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as python does for a script
    loop.with_extra_arguments(add_arguments)
    loop.around_pretrain(lambda container, _: enable(get_args(), container.model))
    with one_line_errors():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
