"""Counts the bytes that torch.distributed hands to a backend, to check the ledger."""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.compression.communication.ledger import bytes_sent

# c10d operator -> (operation, position of the tensors that make up the buffer)
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
_UNCOUNTED = {"barrier", "monitored_barrier_", "recv_"}


class TransportAudit(TorchDispatchMode):
    """Records the bytes this rank sends in each c10d operation run inside the ``with`` block.

    An operation it does not know fails the test rather than passing unseen.

    Args:
        world_size: ranks of the group of every operation; None reads it off the operation's group.
        smallest: bytes; smaller buffers are left out: the norm of the gradients, for example.
    """

    def __init__(self, world_size: int | None = None, smallest: int = 0) -> None:
        super().__init__()
        self.world_size = world_size
        self.smallest = smallest
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            if name not in _UNCOUNTED:
                operation, position = _OPERATORS[name]
                buffers = args[position]
                buffer_bytes = sum(buffer.nbytes for buffer in pytree.tree_leaves(buffers))
                received = name == "broadcast_" and _group_of(args).rank() != args[2]
                if buffer_bytes >= self.smallest and not received:
                    ranks = self.world_size or _group_of(args).size()
                    self.sent[operation] += bytes_sent(operation, buffer_bytes, ranks)
        return function(*args, **(kwargs or {}))


def _group_of(args: tuple) -> dist.ProcessGroup:
    """The group among an operator's arguments."""
    (group,) = (
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    )
    return dist.ProcessGroup.unbox(group)


def total_of(rows: list[dict]) -> Counter[str]:
    """Bytes by operation from ``Ledger.rows``."""
    total: Counter[str] = Counter()
    for row in rows:
        if row["sent_bytes"]:
            total[row["operation"]] += row["sent_bytes"]
    return total
