"""Which ranks of a data-parallel group share a node, and the process groups inside and between nodes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron.compression.communication.host_memory import HostMemory
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.objects import gather_objects
from megatron.compression.communication.overflow import Overflow
from megatron.compression.communication.transport import (
    HostTransport,
    OnSend,
    TorchTransport,
    Transports,
    new_groups,
)

INTRA, INTER = "intra", "inter"


def group_by_node(node_of_rank: Sequence[int]) -> tuple[int, int] | None:
    """(nodes, ranks a node) of a group whose member i sits on node ``node_of_rank[i]``; None unless every
    node holds equally many ranks, one after the other, so that each has one of every other node to pair with.
    """
    world = len(node_of_rank)
    local = next((i for i in range(world) if node_of_rank[i] != node_of_rank[0]), world)
    nodes = node_of_rank[::local]
    regular = list(node_of_rank) == [node for node in nodes for _ in range(local)]
    return (len(nodes), local) if regular and len(set(nodes)) == len(nodes) else None


@dataclass(frozen=True, eq=False)
class Topology:
    """A data-parallel group as ``nodes`` times ``local`` ranks; rank = node * local + index."""

    group: dist.ProcessGroup
    nodes: int
    local: int
    hops: Mapping[str, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)
    """With two hops: ``intra``, the ranks of this node; ``inter``, those with this rank's index, one a node.
    Several groups of the same ranks share what they send."""
    more: tuple[dist.ProcessGroup, ...] = ()
    """Further groups with the ranks of ``group``, which share what goes to all of them."""
    memory: HostMemory | None = None
    """For the payloads that stay inside a node. None: they travel over torch.distributed, as what crosses
    nodes always does."""
    way: str = ""
    """How payloads travel inside a node and why, for the log."""
    regular: bool = True
    """False: nodes hold different numbers of ranks, and every rank counts as a node of its own."""
    overflow: Overflow = field(default_factory=Overflow)
    """Of the run whose transports found it: whether its lossless payloads fit."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.nodes * self.local

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()

    @property
    def index(self) -> int:
        """This rank in its node."""
        return self.rank % self.local

    @property
    def two_hops(self) -> bool:
        """Whether there is anything to sum inside a node before going between nodes."""
        return self.nodes > 1 and self.local > 1

    def split(self, operation: str, sent: int) -> dict[str, int]:
        """Bytes that one rank sends in a flat collective of the whole group, inside and between nodes: an
        all-to-all by the number of peers; of a ring's edges one a node leads to another node."""
        if self.nodes == 1:
            return {INTRA: sent, INTER: 0}
        if operation == "all_to_all":
            between = sent * (self.world_size - self.local) // (self.world_size - 1)
        else:
            between = sent // self.local
        return {INTRA: sent - between, INTER: between}

    def record_uncompressed(
        self, ledger: Ledger, traffic: str, kind: str, operation: str, buffer_bytes: int
    ) -> None:
        """Count a flat uncompressed collective of the group, what crosses nodes separately."""
        for link, part in self._parts(operation, buffer_bytes):
            ledger.record(traffic, kind, operation, part, part, link)

    def record_plain(self, ledger: Ledger, traffic: str, operation: str, buffer_bytes: int) -> None:
        """Say what the uncompressed collective would have sent in place of a compressed one."""
        for link, part in self._parts(operation, buffer_bytes):
            ledger.record(traffic, "compressed", f"instead_of_{operation}", 0, part, link)

    def _parts(self, operation: str, buffer_bytes: int) -> list[tuple[str, int]]:
        sent = bytes_sent(operation, buffer_bytes, self.world_size)
        return [(link, part) for link, part in self.split(operation, sent).items() if part]

    def transport(self, ledger: Ledger, traffic: str, link: str | None = None) -> TorchTransport:
        """Payload exchanges counted as compressed, over the whole group or the ranks of a link."""

        def count(operation: str, sent: int) -> None:
            for part, size in (
                self.split(operation, sent).items() if link is None else ((link, sent),)
            ):
                if size:
                    ledger.record(traffic, "compressed", operation, size, 0, part)

        return self.transport_over(link, count)

    def transport_over(
        self, link: str | None = None, on_send: OnSend | None = None
    ) -> TorchTransport:
        """As ``transport``, with what counts the bytes."""
        if self.memory is not None and link == (None if self.nodes == 1 else INTRA):
            return HostTransport(self.memory, on_send, self.overflow)
        group, *more = (self.group, *self.more) if link is None else self.hops[link]
        return TorchTransport(group, on_send, more, self.overflow)

    def describe(self) -> str:
        """For the log: ranks and nodes, communicators, how payloads travel."""
        if self.world_size == 1:
            return "1 rank on one node"
        nodes, ranks = self.nodes, f"{self.local} rank{'s' if self.local > 1 else ''}"
        shape = f"{ranks} on one node" if nodes == 1 else f"{nodes} nodes of {ranks}"
        if not self.regular:
            shape = (
                f"{nodes} ranks, unevenly spread over nodes: one exchange, as if each were a node"
            )
        shape += f", {1 + len(self.more)} communicators" if self.more else ""
        way = self.way or "payloads travel over torch.distributed"
        if self.memory is None or self.nodes == 1:
            return f"{shape}; {way}"
        return f"{shape}; inside a node {way}; between nodes over torch.distributed"


def find_topology(
    group: dist.ProcessGroup,
    node_size: int | None = None,
    transports: Transports | None = None,
    callers: dist.ProcessGroup | None = None,
) -> Topology:
    """Find the topology of a process group, and make the groups inside and between its nodes.

    Collective over ``callers``.

    Args:
        group: the ranks that share gradients or weights.
        node_size: members that count as one node, in the group's order; None: the real nodes.
        transports: the run's: how payloads travel inside a node, and how many communicators share one that
            crosses nodes, or that of the only exchange. None: one communicator of torch.distributed.
        callers: the ranks that call, ``group`` itself; None: all of the job.

    Raises:
        TransportError: ``--compression-transport host``, and ranks of a node cannot share memory.
    """
    transports = transports or Transports("collective", communicators=1)
    ranks = dist.get_process_group_ranks(group)
    if node_size is None:
        node_of_rank = nodes_of(group, callers)
    else:
        node_of_rank = [index // node_size for index in range(len(ranks))]
    shape = group_by_node(node_of_rank)
    nodes, local = shape or (len(ranks), 1)
    node, index = divmod(group.rank(), local)
    inside = ranks[node * local : (node + 1) * local]
    between = ranks[index::local]
    two_hops = nodes > 1 and local > 1
    memory, way = transports.host_memory(group) if nodes == 1 and local > 1 else (None, "")
    count = transports.count(group) if memory is None else 1
    hops = [inside, between, *[between] * (count - 1)] if two_hops else []
    created = new_groups(hops + [ranks] * (count - 1), callers)
    if created is None:
        way = "one exchange over torch.distributed: these ranks alone cannot make groups of nodes"
        return Topology(group, len(ranks), 1, way=way, overflow=transports.overflow)
    by_link: dict[str, tuple[dist.ProcessGroup, ...]] = {}
    if two_hops:
        by_link = {INTRA: (created[0],), INTER: tuple(created[1 : len(hops)])}
        memory, way = transports.host_memory(created[0])
    more = tuple(created[len(hops) :])
    regular = shape is not None
    return Topology(group, nodes, local, by_link, more, memory, way, regular, transports.overflow)


def nodes_of(group: dist.ProcessGroup, callers: dist.ProcessGroup | None = None) -> list[int]:
    """Return the node of every member, in the group's order: a number that members on one node share.

    Collective over ``callers`` (None: all ranks of the job), by torchrun's LOCAL_WORLD_SIZE or the hosts'
    names; see ``nodes_by_views``.
    """
    views = gather_objects((os.environ.get("LOCAL_WORLD_SIZE"), os.uname().nodename), callers)
    nodes = nodes_by_views([int(size or 0) for size, _ in views], [host for _, host in views])
    if callers is group:
        return nodes
    return [nodes[rank] for rank in dist.get_process_group_ranks(group)]


def nodes_by_views(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """The node of every rank of the job, by how many ranks each says its own has (0: it does not know); by
    the hosts' names where nodes would not hold consecutive ranks or one node would be several hosts."""
    nodes: list[int] = []
    while len(nodes) < len(sizes):
        first, size = len(nodes), sizes[len(nodes)]
        if not size or list(sizes[first : first + size]) != [size] * min(size, len(sizes) - first):
            break
        nodes += [first] * min(size, len(sizes) - first)
    if len(nodes) < len(sizes) or len(set(zip(nodes, hosts, strict=True))) > len(set(nodes)):
        return [hosts.index(host) for host in hosts]
    return nodes
