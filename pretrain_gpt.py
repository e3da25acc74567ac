"""Pretrain a GPT-style model: `torchrun pretrain_gpt.py <any Megatron-LM flags>`."""

from megatron import host

host.install()  # before megatron.training is imported

from megatron.compression import entrypoint  # noqa: E402


def main() -> None:
    """Parse the command line, then train."""
    entrypoint.run(entrypoint.parse_arguments())


if __name__ == "__main__":
    main()
