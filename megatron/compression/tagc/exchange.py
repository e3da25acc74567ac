"""Payloads to their owners, counted: compressed parts, and what goes uncompressed beside them."""

import torch
import torch.distributed as dist

from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.transport import shared_between
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import GradientBucket


def start_to_owners(
    payloads: list[torch.Tensor], exact_bytes: list[int], bucket: GradientBucket, link: str | None = None
) -> tuple[torch.Tensor, Work | dist.Work]:
    """Start sending every rank of a group its payload, of a size that may differ from rank to rank.

    Args:
        payloads: uint8, by rank of the group.
        exact_bytes: how much of each payload is uncompressed.
        link: the group: None = all ranks, intra = this node's, inter = those with this rank's index.
    Returns: uint8 ``[ranks, own bytes]``, row r from rank r, and the work handle. What goes to one rank has
    the same size from every rank.
    """
    topology = bucket.topology
    group = {None: topology.group, INTRA: topology.intra, INTER: topology.inter}[link]
    more = topology.sharing(link)
    sizes, rank = [payload.numel() for payload in payloads], group.rank()
    received = payloads[0].new_empty((group.size(), sizes[rank]))
    if not more:
        work = _exchange(received, payloads, rank, group)
    else:  # every communicator takes its share of each payload
        shares = [payload.tensor_split(1 + len(more)) for payload in payloads]
        parts, works = [], []
        for number, communicator in enumerate((group, *more)):
            pieces = [share[number] for share in shares]
            parts.append(received.new_empty((group.size(), pieces[rank].numel())))
            works.append(_exchange(parts[-1], pieces, rank, communicator))
        work = shared_between(received, parts, works)
    compressed = [size - exact for size, exact in zip(sizes, exact_bytes, strict=True)]
    for kind, parts in (("compressed", compressed), ("excluded", exact_bytes)):
        sent = {INTRA: 0, INTER: 0}
        for other, part in enumerate(parts):
            if other != rank:
                same_node = other // topology.local == rank // topology.local
                sent[link or (INTRA if same_node else INTER)] += part
        for where, part in sent.items():
            if part:
                plain = part if kind == "excluded" else 0
                bucket.ledger.record("dp.gradient", kind, "all_to_all", part, plain, where)
    return received, work


def _exchange(received: torch.Tensor, payloads: list[torch.Tensor], rank: int, group) -> dist.Work:
    """All-to-all of payloads of different sizes; ``rank`` is this one's in ``group``."""
    return dist.all_to_all_single(
        received.view(-1),
        torch.cat(payloads),
        output_split_sizes=[payloads[rank].numel()] * group.size(),
        input_split_sizes=[payload.numel() for payload in payloads],
        group=group,
        async_op=True,
    )
