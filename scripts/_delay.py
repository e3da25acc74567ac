"""A cable with a delay between two network namespaces, for kernels without netem.

    python _delay.py NAME1 NAME2 MILLISECONDS

Makes two TUN devices of these names, prints "ready", and passes on each packet that goes in at one
of them out at the other, so many milliseconds later. The devices may be moved into namespaces; they
are gone when this process ends. scripts/two_nodes.sh starts it.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000  # packets as they are, without a header of the device's
LARGEST_PACKET = 65536


def open_device(name: str) -> int:
    """Make a TUN device and return its file descriptor, which does not block."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def forward(first: int, second: int, delay: float) -> None:
    """Pass packets on between two devices, in both directions, for ever.

    Args:
        first: descriptor of a device.
        second: that of the other.
        delay: seconds that each packet is under way.
    """
    # All packets take the same time, so they leave in the order in which they came.
    under_way: deque[tuple[float, int, bytes]] = deque()
    target_of = {first: second, second: first}
    poll = select.poll()
    for descriptor in target_of:
        poll.register(descriptor, select.POLLIN)
    while True:
        wait = None
        if under_way:
            wait = max(0.0, 1000 * (under_way[0][0] - time.monotonic()))
        for descriptor, _ in poll.poll(wait):
            try:
                while True:
                    packet = os.read(descriptor, LARGEST_PACKET)
                    under_way.append((time.monotonic() + delay, target_of[descriptor], packet))
            except BlockingIOError:
                pass  # no more packets for now
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, target, packet = under_way.popleft()
            try:
                os.write(target, packet)
            except OSError:
                pass  # a device that is down, or full, loses packets, as a cable would


def main() -> None:
    """Make the devices, say so, and forward."""
    first, second = (open_device(name) for name in sys.argv[1:3])
    print("ready", flush=True)
    forward(first, second, float(sys.argv[3]) / 1000)


if __name__ == "__main__":
    main()
