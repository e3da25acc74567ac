"""Python objects that ranks tell each other, outside the hot path."""

import torch.distributed as dist


def gather_objects[Value](value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return every rank's ``value``, in the order of the group's ranks.

    Collective. The objects are pickled and the host waits for all ranks, so this belongs to set-up
    and to decisions between iterations, never to a message.

    Args:
        value: anything that pickles; its type may differ from rank to rank.
        group: the ranks that tell each other; None: all ranks of the job.
    """
    # torch fills a list of the right length.
    ranks = dist.get_world_size() if group is None else group.size()
    values: list = [None] * ranks
    dist.all_gather_object(values, value, group=group)
    return values
