"""Pretrain a GPT-style model: `torchrun pretrain_gpt.py <any Megatron-LM flags>`."""

# Nothing heavy is imported at the top: saving a checkpoint spawns processes that import this file
# again.


def main() -> None:
    """Parse the command line, then train. Bad input ends the run with one line."""
    from megatron.compression.errors import one_line_errors
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()  # before megatron.training is imported

    from megatron.compression.frontends.megatron_lm import entrypoint

    with one_line_errors():
        entrypoint.run(entrypoint.parse_arguments())


if __name__ == "__main__":
    main()
