"""Pretrain a GPT-style model: `torchrun pretrain_gpt.py <any Megatron-LM flags>`."""

from megatron import host

host.install()  # before megatron.training is imported

from megatron.compression import entrypoint  # noqa: E402
from megatron.compression.arguments import add_compression_arguments  # noqa: E402


def main() -> None:
    """Parse the command line, then train."""
    entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


if __name__ == "__main__":
    main()
