"""Pretrain Qwen2.5 or Qwen3: `torchrun pretrain_qwen.py --qwen-model 2.5-7b <any Megatron-LM
flags>`."""

# Nothing heavy is imported at the top: saving a checkpoint spawns processes that import this file
# again.

import os
import sys
from argparse import ArgumentParser


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add all flags that are not Megatron's: --qwen-model, and those of compression."""
    from megatron.compression.frontends.megatron_lm.enable import (
        add_arguments as add_compression_arguments,
    )
    from megatron.compression.huggingface.models import add_qwen_arguments

    return add_qwen_arguments(add_compression_arguments(parser))


def main() -> None:
    """Replace `--qwen-model` by the flags of that model, then train. Bad input ends the run with
    one line."""
    from megatron.compression.errors import one_line_errors
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()  # before megatron.training is imported

    from megatron.compression.frontends.megatron_lm import entrypoint
    from megatron.compression.huggingface.models import expand

    with one_line_errors():
        # --help shows --qwen-model as it is.
        if not {"-h", "--help"}.intersection(sys.argv):
            sys.argv[1:], model_flags = expand(sys.argv[1:])
            if os.environ.get("RANK", "0") == "0":
                print(f"qwen: --qwen-model adds {' '.join(model_flags)}", flush=True)
        entrypoint.run(entrypoint.parse_arguments(add_arguments))


if __name__ == "__main__":
    main()
