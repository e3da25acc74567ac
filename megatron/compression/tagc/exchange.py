"""Payloads to their owners, counted: compressed parts, and what goes uncompressed beside them."""

import torch
import torch.distributed as dist

from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.transport import TorchTransport, shared_between
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
    transport = topology.carrier(link)
    sizes, rank = [payload.numel() for payload in payloads], transport.group.rank()
    if len(transport.groups) == 1:
        received, work = _exchange(payloads, rank, transport)
    else:  # every communicator takes its share of each payload
        received = payloads[0].new_empty((transport.world_size, sizes[rank]))
        shares = [payload.tensor_split(len(transport.groups)) for payload in payloads]
        parts, works = [], []
        for number, group in enumerate(transport.groups):
            part, work = _exchange([share[number] for share in shares], rank, TorchTransport(group))
            parts.append(part)
            works.append(work)
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


def _exchange(
    payloads: list[torch.Tensor], rank: int, transport: TorchTransport
) -> tuple[torch.Tensor, Work | dist.Work]:
    """All-to-all of payloads of different sizes; ``rank`` is this one's. Uint8 ``[W, own bytes]``."""
    sizes = [payload.numel() for payload in payloads]
    came = [sizes[rank]] * transport.world_size
    received, work = transport.all_to_all_rows(torch.cat(payloads)[:, None], sizes, came)
    return received.view(transport.world_size, sizes[rank]), work
