"""Pretrain a GPT-style model: `torchrun pretrain_gpt.py <any Megatron-LM flags>`."""

from megatron import host
from megatron.compression.versions import MEGATRON_CORE_VERSION

host.prepare(MEGATRON_CORE_VERSION)  # before megatron.training is imported

from megatron.compression import entrypoint  # noqa: E402
from megatron.compression.arguments import add_compression_arguments  # noqa: E402
from megatron.compression.config import CompressionConfigError  # noqa: E402


def main() -> None:
    """Parse the command line, then train. Bad input ends the run with one line."""
    with host.one_line_errors(CompressionConfigError):
        entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


if __name__ == "__main__":
    main()
