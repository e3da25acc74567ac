"""Which settings are compared: uncompressed, what docs/choosing.md recommends, and the command line's own."""

from argparse import Namespace

from megatron.compression.advise.shapes import Layout
from megatron.compression.config import CompressionConfig
from megatron.compression.flags import resolve


def config_of(args: Namespace, layout: Layout) -> CompressionConfig:
    """What parsed flags compress.

    Raises: CompressionConfigError: an impossible setting.
    """
    args.data_parallel_size = layout.data
    return resolve(args)
