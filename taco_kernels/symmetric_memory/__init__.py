"""Compressed all-reduce, reduce-scatter and all-gather on one host, each one kernel over peer
memory.

A rank writes its payloads into the memory of its peers and waits for flags in its own: writes over
a link are posted, reads wait for an answer. ``SymmetricGroup`` is the interface; ``channel.py`` has
the protocol.
"""

from taco_kernels.symmetric_memory.channel import SymmetricMemoryError
from taco_kernels.symmetric_memory.group import (
    SymmetricGroup,
    hosts_reason,
    peer_access_reason,
    unavailable_reason,
)
