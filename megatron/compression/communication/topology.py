"""Which ranks of a data-parallel group share a node, and the process groups inside and between nodes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron.compression.communication.host_memory import HostMemory
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.transport import (
    HostTransport,
    OnSend,
    TorchTransport,
    Transports,
    new_groups,
)

INTRA, INTER = "intra", "inter"


def group_by_node(node_of_rank: Sequence[int]) -> tuple[int, int] | None:
    """(nodes, ranks a node) of a group whose member i sits on node ``node_of_rank[i]``.

    None unless every node holds equally many ranks, one after the other: only then can an exchange between
    nodes pair each rank with one of every other node.
    """
    world = len(node_of_rank)
    local = next((i for i in range(world) if node_of_rank[i] != node_of_rank[0]), world)
    if world % local:
        return None
    nodes = [node_of_rank[start] for start in range(0, world, local)]
    expected = [node for node in nodes for _ in range(local)]
    if list(node_of_rank) != expected or len(set(nodes)) != len(nodes):
        return None
    return len(nodes), local


@dataclass(frozen=True)
class Topology:
    """A data-parallel group as ``nodes`` times ``local`` ranks; rank = node * local + index."""

    group: dist.ProcessGroup
    nodes: int
    local: int
    intra: dist.ProcessGroup | None = None
    """The ranks of this node; None where there is one node, or one rank a node."""
    inter: dist.ProcessGroup | None = None
    """The ranks with this rank's index, one a node; None like ``intra``."""
    more: tuple[dist.ProcessGroup, ...] = ()
    """Further groups with the ranks of ``group``, to share the payloads that go to all of them."""
    more_inter: tuple[dist.ProcessGroup, ...] = ()
    """Further groups with the ranks of ``inter``, as many."""
    memory: HostMemory | None = None
    """Carries the payloads that stay inside a node: ``intra``'s, or with one node ``group``'s. None: they
    travel over torch.distributed, as what crosses nodes always does."""
    way: str = ""
    """How payloads travel inside a node and why, for the log."""
    regular: bool = True
    """False: nodes hold different numbers of ranks, and every rank counts as a node of its own."""

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

    def sharing(self, link: str | None = None) -> tuple[dist.ProcessGroup, ...]:
        """Groups that share the payloads of the whole one (None), or of ``intra`` or ``inter``."""
        return {None: self.more, INTRA: (), INTER: self.more_inter}[link]

    @property
    def link(self) -> str:
        """What the only exchange crosses where there is one hop."""
        return INTRA if self.nodes == 1 else INTER

    def split(self, operation: str, sent: int) -> dict[str, int]:
        """Bytes that one rank sends in a flat collective of the whole group, inside and between nodes.

        All-to-all: by the number of peers on this node and on others. Rings (all-gather, reduce-scatter,
        all-reduce): of a ring's edges, one a node leads to another node.
        """
        if self.nodes == 1 or self.world_size == 1:
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
        for link, sent in self._links(operation, buffer_bytes):
            ledger.record(traffic, kind, operation, sent, sent, link)

    def record_plain(self, ledger: Ledger, traffic: str, operation: str, buffer_bytes: int) -> None:
        """Say what the uncompressed collective would have sent in place of a compressed one."""
        for link, sent in self._links(operation, buffer_bytes):
            ledger.record(traffic, "compressed", f"instead_of_{operation}", 0, sent, link)

    def _links(self, operation: str, buffer_bytes: int) -> list[tuple[str, int]]:
        sent = bytes_sent(operation, buffer_bytes, self.world_size)
        return [(link, part) for link, part in self.split(operation, sent).items() if part]

    def transport(self, ledger: Ledger, traffic: str, link: str | None = None) -> TorchTransport:
        """Payload exchanges counted as compressed: over the whole group, or its ``intra`` or ``inter``
        ranks."""

        def count(operation: str, sent: int) -> None:
            for part, size in self.split(operation, sent).items() if link is None else ((link, sent),):
                if size:
                    ledger.record(traffic, "compressed", operation, size, 0, part)

        return self.carrier(link, count)

    def carrier(self, link: str | None = None, on_send: OnSend | None = None) -> TorchTransport:
        """As ``transport``, with what counts the bytes."""
        if self.memory is not None and link == (None if self.nodes == 1 else INTRA):
            return HostTransport(self.memory, on_send)
        group = {None: self.group, INTRA: self.intra, INTER: self.inter}[link]
        return TorchTransport(group, on_send, self.sharing(link))

    def describe(self) -> str:
        """For the log: ranks and nodes, communicators, how payloads travel."""
        if self.world_size == 1:
            return "1 rank on one node"
        if not self.regular:
            shape = (
                f"{self.world_size} ranks, unevenly spread over nodes: one exchange, as if each were a node"
            )
        else:
            ranks = f"{self.local} rank{'s' if self.local > 1 else ''}"
            shape = f"{ranks} on one node" if self.nodes == 1 else f"{self.nodes} nodes of {ranks}"
        shape += f", {1 + len(self.more)} communicators" if self.more else ""
        way = self.way or "payloads travel over torch.distributed"
        if self.memory is None or self.nodes == 1:
            return f"{shape}; {way}"
        return f"{shape}; inside a node {way}; between nodes over torch.distributed"


def find_topology(
    group: dist.ProcessGroup, node_size: int | None = None, transports: Transports | None = None
) -> Topology:
    """The topology of ``group``, with its process groups. Collective over all ranks of the job.

    Args:
        node_size: members that count as one node, in the group's order; None takes the real nodes.
        transports: the run's: how payloads travel inside a node, and how many communicators share one that
            crosses nodes, or that of the only exchange. None: one communicator of torch.distributed.
    Raises: TransportError: ``--compression-transport host``, and ranks of a node cannot share memory.
    """
    transports = transports or Transports("collective", communicators=1)
    ranks = dist.get_process_group_ranks(group)
    node_of_rank = nodes_of(group) if node_size is None else [i // node_size for i in range(len(ranks))]
    shape = group_by_node(node_of_rank)
    nodes, local = shape or (len(ranks), 1)
    node, index = divmod(group.rank(), local)
    inside, between = ranks[node * local : (node + 1) * local], ranks[index::local]
    two_hops = nodes > 1 and local > 1
    memory, way = transports.host_memory(group) if nodes == 1 and local > 1 else (None, "")
    count = transports.count(group) if memory is None else 1
    hops = [inside, between, *[between] * (count - 1)] if two_hops else []
    created = new_groups(hops + [ranks] * (count - 1))
    intra, inter = created[:2] if two_hops else (None, None)
    if intra is not None:
        memory, way = transports.host_memory(intra)
    more, more_inter = tuple(created[len(hops) :]), tuple(created[2 : len(hops)])
    return Topology(group, nodes, local, intra, inter, more, more_inter, memory, way, shape is not None)


def nodes_of(group: dist.ProcessGroup) -> list[int]:
    """The node of every member, in the group's order. Collective over all ranks of the job.

    By every rank's LOCAL_WORLD_SIZE, which torchrun sets and which nodes may differ in; by the hosts' names
    where a launcher does not set it, or ranks do not fill one node after the other.
    """
    ranks = dist.get_process_group_ranks(group)
    views: list = [None] * dist.get_world_size()
    dist.all_gather_object(views, (os.environ.get("LOCAL_WORLD_SIZE"), os.uname().nodename))
    nodes = nodes_by_views([int(size or 0) for size, _ in views], [host for _, host in views])
    return [nodes[rank] for rank in ranks]


def nodes_by_views(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """The node of every rank of the job: by ``nodes_by_size``; by the hosts' names where that says nothing,
    or would make one node of several hosts (ranks that go round the hosts)."""
    nodes = nodes_by_size(sizes)
    if nodes is None or len(set(zip(nodes, hosts, strict=True))) > len(set(nodes)):
        return [hosts.index(host) for host in hosts]
    return nodes


def nodes_by_size(sizes: Sequence[int]) -> list[int] | None:
    """The node of every rank of the job, given how many ranks each says its own has (0: it does not know).

    None where that cannot be: nodes hold consecutive ranks, all of one word.
    """
    nodes: list[int] = []
    for rank, size in enumerate(sizes):
        if rank == len(nodes):  # the first of a node
            own = list(sizes[rank : rank + size])
            if not own or own != [size] * len(own):
                return None
            nodes += [rank] * len(own)
    return nodes
