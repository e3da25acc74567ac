"""Codecs: the contract (base.py), names (registry.py), and a file for each codec."""

from megatron.compression.codecs.base import Codec
from megatron.compression.codecs.registry import (
    CODECS,
    GRADIENT_COMPRESSORS,
    describe,
    parse_codec,
    register_codec,
    register_gradient_compressor,
)
