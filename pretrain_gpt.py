"""Pretrain a GPT-style model: `torchrun pretrain_gpt.py <any Megatron-LM flags>`."""

# Nothing heavy is imported at the top: saving a checkpoint spawns processes that import this file again.


def main() -> None:
    """Parse the command line, then train. Bad input ends the run with one line."""
    from megatron import host
    from megatron.compression.versions import MEGATRON_CORE_VERSION

    host.prepare(MEGATRON_CORE_VERSION)  # before megatron.training is imported

    from megatron.compression import entrypoint
    from megatron.compression.arguments import add_compression_arguments
    from megatron.compression.config import CompressionConfigError

    with host.one_line_errors(CompressionConfigError):
        entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


if __name__ == "__main__":
    main()
