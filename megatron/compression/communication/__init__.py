"""Communication over any codec: handles, transports, collectives, the policy, the byte ledger."""

from megatron.compression.communication.all_gather import all_gather, all_gather_encoded, encode_slice
from megatron.compression.communication.all_reduce import all_reduce
from megatron.compression.communication.policy import Decision, Policy, Rule
from megatron.compression.communication.reduce_scatter import reduce_scatter
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.transports import TransportError, Transports
from megatron.compression.communication.uncompressed import (
    fp32_all_reduce,
    uncompressed_all_gather,
    uncompressed_all_reduce,
    uncompressed_reduce_scatter,
)
from megatron.compression.communication.work import Work, join
