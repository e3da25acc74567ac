"""How the rest of a cut message gets to the next pipeline stage.

Sender and receiver learn from the payload that a rest follows. The receiver has asked for later payloads by
then, in whose order NCCL would take it for one of them; and stages that wait for each other's rests in one
NCCL queue would wait forever. So rests, which are rare, go over gloo, from host to host, where a send waits
for nobody; each kind of traffic has a tag, since with two ranks both kinds may go from one to the other.
"""

import torch
import torch.distributed as dist

from megatron.compression.communication.groups import new_groups
from megatron.compression.communication.work import Work

TAGS = {"pp.forward": 1, "pp.backward": 2}


class RestChannel:
    """Sends rests between the ranks of one pipeline, in order. Made by all ranks of the job together.

    Args:
        pipeline: this rank's pipeline-parallel group.
    """

    def __init__(self, pipeline: dist.ProcessGroup) -> None:
        (self._group,) = new_groups([dist.get_process_group_ranks(pipeline)], backend="gloo")

    def send(self, rest: torch.Tensor, traffic: str, rank: int) -> Work:
        """Start to send uint8 ``rest`` to a global rank; the work holds it on the host until it is waited
        for."""
        held = [rest.cpu()]
        request = dist.isend(held[0], dst=rank, group=self._group, tag=TAGS[traffic])
        return Work(request, held.clear)

    def receive(self, shape: tuple[int, ...], traffic: str, rank: int, device: torch.device) -> torch.Tensor:
        """Wait for the oldest rest from a global rank that has not been received: uint8 of this shape."""
        rest = torch.empty(shape, dtype=torch.uint8)
        dist.recv(rest, src=rank, group=self._group, tag=TAGS[traffic])
        return rest.to(device)
