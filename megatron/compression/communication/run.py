"""What the communication sites of one training run share."""

from dataclasses import dataclass, field

from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.probe import ErrorProbe
from megatron.compression.communication.transports import Transports


@dataclass
class Run:
    """Built once by setup.py and handed to every hook; there is no global one."""

    policy: Policy
    """Decides what is compressed."""
    ledger: Ledger
    """Counts bytes."""
    probe: ErrorProbe = field(default_factory=ErrorProbe)
    """Compares compressed collectives with exact ones."""
    transports: Transports = field(default_factory=Transports)
    """Carry the payloads."""
