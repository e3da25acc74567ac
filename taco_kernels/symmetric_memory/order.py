"""One collective after the other on a device, whatever their groups and streams.

A kernel that waits for its peers and fills the device keeps out the others that they may be waiting in: two
ranks whose devices were taken in different orders would wait for ever.
"""

import torch

_last_stream: dict[int, torch.cuda.Stream] = {}


def queue_behind_others(stream: torch.cuda.Stream) -> None:
    """Let ``stream`` wait for the collectives that were given to other streams of its device."""
    last = _last_stream.get(stream.device_index)
    if last is not None and last != stream:
        stream.wait_stream(last)
    _last_stream[stream.device_index] = stream
