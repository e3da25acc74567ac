"""Collectives over any codec."""

from megatron.compression.collectives.all_gather import all_gather, all_gather_encoded, encode_slice
from megatron.compression.collectives.all_reduce import all_reduce
from megatron.compression.collectives.choice import TransportError, Transports
from megatron.compression.collectives.reduce_scatter import reduce_scatter
from megatron.compression.collectives.symmetric import CopyTransport, SymmetricTransport
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.uncompressed import (
    fp32_all_reduce,
    uncompressed_all_gather,
    uncompressed_all_reduce,
    uncompressed_reduce_scatter,
)
from megatron.compression.collectives.work import CompressedWork, ParallelWork

__all__ = [
    "CompressedWork",
    "CopyTransport",
    "ParallelWork",
    "SymmetricTransport",
    "TorchTransport",
    "TransportError",
    "Transports",
    "all_gather",
    "all_gather_encoded",
    "all_reduce",
    "encode_slice",
    "fp32_all_reduce",
    "reduce_scatter",
    "uncompressed_all_gather",
    "uncompressed_all_reduce",
    "uncompressed_reduce_scatter",
]
