"""Communication over any codec: handles, transports, collectives, the policy, the byte ledger."""

import atexit
import time

from megatron.compression.communication.collectives import all_gather, all_reduce, reduce_scatter
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Decision, Policy, Rule
from megatron.compression.communication.site import CommSite, Message, Run
from megatron.compression.communication.transport import TorchTransport, TransportError, Transports
from megatron.compression.communication.work import Work, join

# Gloo's threads drop a collective's tensors after its end, and need Python's lock for it: before Python 3.14
# the process aborts where the interpreter ends first (pytorch/pytorch#190489). So give them time.
atexit.register(time.sleep, 0.2)
