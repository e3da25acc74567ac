"""How long one message takes, as it is or through a codec, inside a node or over two hops between nodes."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron.compression.advise.cluster import Constants, Group
from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.transports import TCP_COMMUNICATORS
from megatron.compression.data_parallel.codec_gradients import PIECES


@dataclass(frozen=True)
class Cost:
    """Of one message on one rank."""

    link: float
    """Milliseconds on the link."""
    kernels: float = 0.0
    """Milliseconds of codec kernels, in which this GPU computes nothing else."""
    sent: float = 0.0
    """Bytes, as the ledger counts them."""
    overlaps: bool = True
    """Whether GEMMs can run meanwhile; a fused collective takes all multiprocessors."""
    copied: bool = False
    """By copy engines, which take no multiprocessor."""
    host: float = 0.0
    """Milliseconds that the host needs beyond those of an uncompressed message."""


def uncompressed(group: Group, operation: str, nbytes: int, communicators: int = 1) -> Cost:
    """A collective over ``nbytes`` (of the whole buffer, as the ledger takes it)."""
    return Cost(
        _link_time(group, operation, nbytes, communicators), 0.0, _sent(operation, nbytes, group.ranks)
    )


def compressed(
    group: Group, operation: str, values: int, codec: Codec, communicators: int = 0, value_bytes: int = 2
) -> Cost:
    """A collective over ``values`` of the whole tensor through a codec; all_to_all: of tokens, not summed.

    Args:
        communicators: as ``--compression-communicators``.
        value_bytes: of what is encoded, where that matters to the codec.
    """
    constants, (first, second), ranks = group.cluster.constants, codec.hops, group.ranks
    if ranks == 1:
        return Cost(0.0)
    gathers, scatters = operation in ("all_reduce", "all_gather"), operation != "all_gather"
    sums, fused = operation != "all_to_all", group.slowest.fused and group.nodes == 1
    payloads = [
        payload(codec, values, value_bytes) for codec, used in ((first, scatters), (second, gathers)) if used
    ]
    exchanges = [name for name, used in (("all_to_all", scatters), ("all_gather", gathers)) if used]
    sent = sum(_sent(name, nbytes, ranks) for name, nbytes in zip(exchanges, payloads, strict=True))
    if sums and fused and codec.fused_config is not None:
        work = constants.fused_us * values / 2**20 * len(payloads) / 2
        latency = group.slowest.curve("all_reduce")[0][1] * 0.6
        link = (latency + work) / 1e3 + sent / group.slowest.bandwidth
        return Cost(link, 0.0, sent, overlaps=False, host=constants.host_fused_ms)
    share = communicators or (TCP_COMMUNICATORS if group.slowest.tcp else 1)
    copied = _copied(group)
    link = sum(_link_time(group, name, n, share, copied) for name, n in zip(exchanges, payloads, strict=True))
    own = values / ranks
    kernels = _kernel(constants, first, "encode", values if scatters else own)
    if scatters:
        kernels += _kernel(constants, first, "sum" if sums else "decode", values)
    if gathers:
        kernels += _kernel(constants, second, "decode", values)
    return Cost(link, kernels, sent, copied=copied, host=constants.host_exchange_ms * len(exchanges))


def gradients(
    group: Group, values: int, codec: Codec, sharded: bool, communicators: int = 0, value_bytes: int = 4
) -> Cost:
    """Data parallelism's sum: inside a node with the codec's first hop, between nodes with its second."""
    constants, (intra, inter) = group.cluster.constants, codec.hops
    cluster, share = group.cluster, communicators or (TCP_COMMUNICATORS if group.slowest.tcp else 1)
    hops, kernels, sent = [0.0], 0.0, 0.0
    for codec, link_of, ranks, part, copied in (
        (intra, cluster.intra, group.local, values, cluster.intra.copied),
        (inter, cluster.inter, group.nodes, values // group.local, False),
    ):
        if ranks > 1:
            bytes_of_hop = _sent("all_to_all", payload(codec, part, value_bytes), ranks)
            hops.append(link_of.milliseconds("all_to_all", bytes_of_hop, ranks, share, copied))
            kernels += _kernel(constants, codec, "encode", part) + _kernel(constants, codec, "sum", part)
            sent += bytes_of_hop
    link = (
        max(hops) + (sum(hops) - max(hops)) / PIECES
    )  # a piece's second hop runs behind the next one's first
    if not sharded and group.ranks > 1:
        last = inter if group.nodes > 1 else intra
        gather = gathered(group, values, last, share, value_bytes)
        link, kernels, sent = link + gather.link, kernels + gather.kernels, sent + gather.sent
    return Cost(link, kernels, sent, copied=_copied(group))


def gathered(group: Group, values: int, codec: Codec, communicators: int = 0, value_bytes: int = 2) -> Cost:
    """An all-gather of what each rank holds a part of, as payloads: the distributed optimizer's weights."""
    share = communicators or (TCP_COMMUNICATORS if group.slowest.tcp else 1)
    nbytes, constants = payload(codec, values, value_bytes), group.cluster.constants
    kernels = _kernel(constants, codec, "encode", values / group.ranks)
    kernels += _kernel(constants, codec, "decode", values)
    copied = _copied(group)
    link = _link_time(group, "all_gather", nbytes, share, copied)
    return Cost(link, kernels, _sent("all_gather", nbytes, group.ranks), copied=copied)


def message(group: Group, shape: tuple[int, int, int], value_bytes: int, codec: Codec | None) -> Cost:
    """One message between pipeline stages, ``[tokens, samples, channels]``; it has one communicator."""
    tokens, samples, channels = shape
    values = tokens * samples * channels
    dtype = torch.bfloat16 if value_bytes == 2 else torch.float32
    nbytes = values * value_bytes if codec is None else codec.message_bytes(shape, dtype)
    kernels = 0.0
    if codec is not None:
        constants = group.cluster.constants
        kernels = _kernel(constants, codec, "encode", values) + _kernel(constants, codec, "decode", values)
    return Cost(group.slowest.milliseconds("send", nbytes, 2), kernels, nbytes)


@lru_cache(maxsize=4096)
def payload(codec: Codec, values: int, value_bytes: int = 2) -> int:
    """Bytes of the payloads of so many values, in rows long enough for padding not to matter."""
    shape = (1024, 1, 1024) if codec.sees_shape else (2**20,)
    dtype = torch.bfloat16 if value_bytes == 2 else torch.float32
    return codec.message_bytes(shape, dtype) * values // 2**20


def _copied(group: Group) -> bool:
    """Whether copy engines carry all of a group's payloads: they do not leave a node."""
    return group.nodes == 1 and group.cluster.intra.copied


def _sent(operation: str, nbytes: float, ranks: int) -> float:
    return bytes_sent(operation, int(nbytes), ranks)


def _link_time(
    group: Group, operation: str, nbytes: float, communicators: int, copied: bool = False
) -> float:
    """Inside a node a measured curve. Over nodes both hops are under way at once, and the slower one counts:
    each GPU's adapter carries its share of what the node sends."""
    cluster, local, nodes = group.cluster, group.local, group.nodes
    if nodes == 1:
        sent = _sent(operation, nbytes, local)
        return cluster.intra.milliseconds(operation, sent, local, communicators, copied)
    if operation == "all_to_all":
        inside, outside = (local - 1) / group.ranks * nbytes, (group.ranks - local) / group.ranks * nbytes
        between = cluster.inter.milliseconds(operation, outside, group.ranks - local + 1, communicators)
    else:
        inside = _sent(operation, nbytes, local)
        outside = _sent(operation, nbytes, nodes) / local
        between = cluster.inter.milliseconds(operation, outside, nodes, communicators)
    return max(cluster.intra.milliseconds(operation, inside, local, communicators), between)


def _kernel(constants: Constants, codec: Codec, which: str, values: float) -> float:
    """Milliseconds of one codec kernel over ``values`` (sums: over all senders' together)."""
    index = ("encode", "decode", "sum").index(which)
    return (constants.launch_us + codec_us(constants, codec)[index] * values / 2**20) / 1e3


def codec_us(constants: Constants, codec: Codec) -> tuple[float, float, float]:
    """Encode, decode, sum: microseconds for 2^20 values."""
    name = codec.name.partition(":")[0]
    if getattr(codec, "normalize", "none") != "none":
        name = "normalize"
    elif getattr(codec, "outliers", False):
        name = "outliers"
    elif name in ("int5", "int4"):
        name = "int6"  # within 10 % (docs/results/kernels.md)
    return constants.codecs.get(name, constants.slowest)
