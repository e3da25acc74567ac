"""One collective after the other on a device, whatever their groups and streams, and how long one may wait.

A kernel that waits for its peers and fills the device keeps out the others that they may be waiting in: two
ranks whose devices were taken in different orders would wait for ever.
"""

import torch
import torch.distributed as dist

_last_stream: dict[int, torch.cuda.Stream] = {}


def queue_behind_others(stream: torch.cuda.Stream) -> None:
    """Let ``stream`` wait for the collectives that were given to other streams of its device."""
    last = _last_stream.get(stream.device_index)
    if last is not None and last != stream:
        stream.wait_stream(last)
    _last_stream[stream.device_index] = stream


def queue_current_stream(device: int) -> None:
    """``queue_behind_others`` of a device's current stream; quickly, if it is the last one's again."""
    last = _last_stream.get(device)
    if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(device):
        queue_behind_others(torch.cuda.current_stream(device))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a process group gives its own collectives up (NCCL's default is ten minutes).

    A rank may be late for good reasons, such as a slow disk: what NCCL waits for, kernels here wait for.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return group._get_backend(device).options._timeout.total_seconds()
