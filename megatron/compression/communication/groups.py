"""Process groups for some of the ranks, made so that no rank can be left waiting."""

from collections.abc import Sequence

import torch.distributed as dist


def new_groups(wanted: Sequence[Sequence[int]], backend: str | None = None) -> list[dist.ProcessGroup]:
    """Process groups of these ranks. Collective over all ranks of the job, each with its own wishes.

    Every rank makes every group that any rank wants, in one order. (With ``use_local_synchronization`` only
    the members make one, under a name made of how many groups a rank is in; where that differs between
    members they wait for each other forever.)

    Args:
        wanted: global ranks of each group; this rank is in all of them, and their other members want them in
            the same places of their lists. The same ranks may come several times; none at all is fine too.
        backend: torch.distributed's; None for the job's own.
    """
    everyone: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [tuple(ranks) for ranks in wanted])
    keys = {(number, ranks) for wishes in everyone for number, ranks in enumerate(wishes)}
    created = {key: dist.new_group(list(key[1]), backend=backend) for key in sorted(keys)}
    return [created[number, tuple(ranks)] for number, ranks in enumerate(wanted)]
