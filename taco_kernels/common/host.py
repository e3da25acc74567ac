"""The host that a process runs on, told from all others."""

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: random text, another one after each start of the machine. Its containers have the
machine's."""


def host_identity() -> str:
    """Text that processes have in common if they run on one host, and only then.

    Names will not do: containers of one machine have names of their own, and machines of a cluster
    may all be called ``localhost``. The host's name stands in where there is no boot id (not
    Linux).
    """
    if BOOT_ID.exists():
        return BOOT_ID.read_text().strip()
    return socket.gethostname()
