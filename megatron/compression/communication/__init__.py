"""Communication over any codec: handles, transports, collectives, the policy, the byte ledger."""

from megatron.compression.communication.collectives import all_gather, all_reduce, reduce_scatter
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Decision, Policy, Rule
from megatron.compression.communication.site import CommSite, Message, MessagePair, Run
from megatron.compression.communication.transport import TorchTransport, TransportError, Transports
from megatron.compression.communication.work import Work, join
