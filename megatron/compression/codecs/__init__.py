"""Codecs: the contract (base.py), names (registry.py), and a file for each codec."""

from megatron.compression.codecs.base import Codec, parse_codec
from megatron.compression.codecs.registry import (
    CODECS,
    GRADIENT_COMPRESSORS,
    register_codec,
    register_gradient_compressor,
)
