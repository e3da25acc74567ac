"""Which ranks of a data-parallel group share a node, and the process groups inside and between
nodes."""

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

INTRA = "intra"
INTER = "inter"
"""Links: inside a node, and between nodes."""


def group_by_node(node_of_rank: Sequence[int]) -> tuple[int, int] | None:
    """Return (nodes, ranks a node) of a group whose member i sits on node ``node_of_rank[i]``.

    None unless every node holds equally many ranks, one after the other, so that each rank has one
    of every other node to pair with.
    """
    local = list(node_of_rank).count(node_of_rank[0])
    # The node of each run of ``local`` members, if runs are regular.
    nodes = node_of_rank[::local]
    expected = [node for node in nodes for _ in range(local)]
    if list(node_of_rank) != expected or len(set(nodes)) != len(nodes):
        return None
    return len(nodes), local


@dataclass(frozen=True, eq=False)
class Topology:
    """A data-parallel group as ``nodes`` times ``local`` ranks.

    rank = node * local + index, and with two hops a sum goes over the rows of this matrix, then its
    columns:

                   index 0    index 1
        node 0     rank 0     rank 1         intra: the ranks of a row
        node 1     rank 2     rank 3         inter: the ranks of a column
    """

    group: dist.ProcessGroup
    nodes: int
    """Number of nodes."""
    local: int
    """Number of ranks on each."""
    hops: Mapping[str, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)
    """With two hops: ``intra``, the ranks of this node; ``inter``, those with this rank's index,
    one a node. Several groups of the same ranks share what they send."""
    more: tuple[dist.ProcessGroup, ...] = ()
    """Further groups with the ranks of ``group``, which share what goes to all of them."""
    memory: HostMemory | None = None
    """Carries the payloads that stay inside a node. None: they travel over torch.distributed, as
    what crosses nodes always does."""
    method: str = ""
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
        """True where there is anything to sum inside a node before going between nodes."""
        return self.nodes > 1 and self.local > 1

    def split(self, operation: str, sent: int) -> dict[str, int]:
        """Divide the bytes that one rank sends in a flat collective of the whole group by link.

        Args:
            operation: of the collective.
            sent: bytes that the rank sends.
        """
        if self.nodes == 1:
            return {INTRA: sent, INTER: 0}
        if operation == "all_to_all":  # as much to each peer
            between = sent * (self.world_size - self.local) // (self.world_size - 1)
        else:  # a ring, of whose edges one a node leads to another node
            between = sent // self.local
        return {INTRA: sent - between, INTER: between}

    def record_uncompressed(
        self, ledger: Ledger, traffic: str, kind: str, operation: str, buffer_bytes: int
    ) -> None:
        """Count a flat uncompressed collective of the group, by link.

        Args:
            ledger: counts it.
            traffic: its class.
            kind: why it goes uncompressed, one of ``ledger.KINDS``.
            operation: its name.
            buffer_bytes: size of its buffer.
        """
        for link, part in self._parts(operation, buffer_bytes):
            ledger.record(traffic, kind, operation, part, part, link)

    def record_plain(self, ledger: Ledger, traffic: str, operation: str, buffer_bytes: int) -> None:
        """Count what an uncompressed collective would have sent in place of a compressed one, by
        link.

        Args:
            ledger: counts it.
            traffic: its class.
            operation: of the uncompressed collective.
            buffer_bytes: size of its buffer.
        """
        for link, part in self._parts(operation, buffer_bytes):
            ledger.record(traffic, "compressed", f"instead_of_{operation}", 0, part, link)

    def _parts(self, operation: str, buffer_bytes: int) -> list[tuple[str, int]]:
        """Return (link, bytes that one rank sends over it) for the links that are used."""
        sent = bytes_sent(operation, buffer_bytes, self.world_size)
        return [(link, part) for link, part in self.split(operation, sent).items() if part]

    def transport(self, ledger: Ledger, traffic: str, link: str | None = None) -> TorchTransport:
        """Return what carries payloads and counts them.

        Args:
            ledger: counts them, as compressed.
            traffic: their class.
            link: of whose ranks; None: of the whole group.
        """

        def count(operation: str, sent: int) -> None:
            by_link = self.split(operation, sent) if link is None else {link: sent}
            for name, size in by_link.items():
                if size:
                    ledger.record(traffic, "compressed", operation, size, 0, name)

        return self.transport_over(link, count)

    def transport_over(
        self, link: str | None = None, on_send: OnSend | None = None
    ) -> TorchTransport:
        """Return what carries payloads, as ``transport``, with a counter of the caller's."""
        inside_a_node = link == INTRA if self.nodes > 1 else link is None
        if self.memory is not None and inside_a_node:
            return HostTransport(self.memory, on_send, self.overflow)
        if link is None:
            return TorchTransport(self.group, on_send, self.more, self.overflow)
        # Several groups of the same ranks: each takes a share.
        group, *more = self.hops[link]
        return TorchTransport(group, on_send, more, self.overflow)

    def describe(self) -> str:
        """Return for the log: ranks and nodes, communicators, how payloads travel."""
        if self.world_size == 1:
            return "1 rank on one node"
        ranks = "1 rank" if self.local == 1 else f"{self.local} ranks"
        if not self.regular:
            shape = f"{self.nodes} ranks, unevenly spread over nodes: "
            shape += "one exchange, as if each were a node"
        elif self.nodes == 1:
            shape = f"{ranks} on one node"
        else:
            shape = f"{self.nodes} nodes of {ranks}"
        if self.more:
            shape += f", {1 + len(self.more)} communicators"
        method = self.method or "payloads travel over torch.distributed"
        if self.memory is None or self.nodes == 1:
            return f"{shape}; {method}"
        return f"{shape}; inside a node {method}; between nodes over torch.distributed"


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
        transports: the run's: how payloads travel inside a node, and how many communicators share
            one that crosses nodes, or that of the only exchange. None: one communicator of
            torch.distributed.
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
    # Unevenly spread ranks are treated as if each were a node: one flat exchange.
    nodes = len(ranks)
    local = 1
    if shape is not None:
        nodes, local = shape
    node, index = divmod(group.rank(), local)
    # With one rank a node, or one node, a sum has one hop.
    two_hops = nodes > 1 and local > 1
    memory = None
    method = ""
    if nodes == 1 and local > 1:
        memory, method = transports.host_memory(group)
    # Several communicators share what no memory carries: the only exchange, or the one between
    # nodes.
    count = transports.count(group) if memory is None else 1
    hop_ranks = []
    if two_hops:
        inside = ranks[node * local : (node + 1) * local]
        between = ranks[index::local]
        hop_ranks = [inside] + [between] * count
    created = new_groups(hop_ranks + [ranks] * (count - 1), callers)
    if created is None:
        method = (
            "one exchange over torch.distributed: these ranks alone cannot make groups of nodes"
        )
        return Topology(group, len(ranks), 1, method=method, overflow=transports.overflow)
    hops: dict[str, tuple[dist.ProcessGroup, ...]] = {}
    if two_hops:
        hops = {INTRA: (created[0],), INTER: tuple(created[1 : len(hop_ranks)])}
        # Inside a node payloads may travel through its memory.
        memory, method = transports.host_memory(created[0])
    return Topology(
        group,
        nodes,
        local,
        hops,
        more=tuple(created[len(hop_ranks) :]),
        memory=memory,
        method=method,
        regular=shape is not None,
        overflow=transports.overflow,
    )


def nodes_of(group: dist.ProcessGroup, callers: dist.ProcessGroup | None = None) -> list[int]:
    """Return the node of every member, in the group's order: a number that members on one node
    share.

    Collective over ``callers`` (None: all ranks of the job), by torchrun's LOCAL_WORLD_SIZE or the
    hosts' names; see ``nodes_by_views``.
    """
    views = gather_objects((os.environ.get("LOCAL_WORLD_SIZE"), os.uname().nodename), callers)
    nodes = nodes_by_views([int(size or 0) for size, _ in views], [host for _, host in views])
    if callers is group:
        return nodes
    return [nodes[rank] for rank in dist.get_process_group_ranks(group)]


def nodes_by_views(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Return the node of every rank of the job: a number that ranks on one node share.

    By the sizes of nodes, as launchers tell them to ranks; by the hosts' names where a rank does
    not know its node's size, nodes would not hold consecutive ranks, or one node would be several
    hosts.

    Args:
        sizes: for every rank, how many ranks its node has; 0: it does not know.
        hosts: for every rank, the name of its host.
    """
    nodes: list[int] = []
    by_host = [hosts.index(host) for host in hosts]
    while len(nodes) < len(sizes):
        first = len(nodes)
        size = sizes[first]
        members = list(
            sizes[first : first + size]
        )  # fewer at the end: not all of its ranks are in the job
        if not size or members != [size] * len(members):
            # A launcher that does not say, or one that has spread ranks unevenly.
            return by_host
        nodes += [first] * len(members)
    # A size that is wrong for the hosts: a container's, say.
    several_hosts_a_node = len(set(zip(nodes, hosts, strict=True))) > len(set(nodes))
    return by_host if several_hosts_a_node else nodes
