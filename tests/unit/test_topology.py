"""Which ranks share a node, what of a collective crosses nodes, and what carries the rest."""

from unittest import mock

import pytest

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.host_memory import HostMemory
from megatron.compression.communication.topology import Topology, group_by_node, nodes_by_views
from megatron.compression.communication.transport import (
    SymmetricTransport,
    TransportError,
    Transports,
)


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([0, 0, 0, 0], (1, 4)),
        ([0, 0, 1, 1], (2, 2)),
        ([5, 5, 5, 7, 7, 7], (2, 3)),
        ([0, 0, 1], None),
        ([0, 0, 1, 1, 0, 0], None),
    ],
)
def test_nodes_of_a_group(nodes: list[int], shape: tuple[int, int] | None) -> None:
    """Equal nodes, one behind the other; anything else has no two hops."""
    assert group_by_node(nodes) == shape


@pytest.mark.parametrize(
    ("sizes", "hosts", "nodes"),
    [
        ([2, 2, 2, 2], "aabb", [0, 0, 2, 2]),
        ([2, 2, 2, 2], "aaaa", [0, 0, 2, 2]),  # containers of one name; nodes emulated on one host
        ([2, 2, 2, 2], "abab", [0, 1, 0, 1]),  # ranks that go round the hosts
        ([0, 0, 0, 0], "aabb", [0, 0, 2, 2]),
        ([4, 4, 4, 4, 2, 2], "aaaabb", [0, 0, 0, 0, 4, 4]),
        ([3, 3, 3, 2, 2, 2, 2], "aaaaaaa", [0, 0, 0, 3, 3, 5, 5]),
        ([4, 2, 4, 2, 4, 4], "abcdef", [0, 1, 2, 3, 4, 5]),  # nodes interleave ranks
        ([2, 2, 0, 0], "abcd", [0, 1, 2, 3]),
    ],
)
def test_nodes_by_what_ranks_say_and_the_names_of_their_hosts(sizes, hosts, nodes) -> None:
    assert nodes_by_views(sizes, list(hosts)) == nodes


@pytest.mark.parametrize(
    ("nodes", "local", "operation", "inside", "between"),
    [
        (1, 4, "all_gather", 1200, 0),
        (4, 1, "all_gather", 0, 1200),
        (2, 2, "all_gather", 600, 600),
        (2, 3, "all_gather", 800, 400),  # of a ring's edges, one a node leads to another node
        (3, 4, "reduce_scatter", 900, 300),
        (2, 3, "all_to_all", 480, 720),  # of five peers, two are on the same node
    ],
)
def test_bytes_inside_and_between_nodes(nodes, local, operation, inside, between) -> None:
    topology = Topology(None, nodes, local)
    assert topology.split(operation, 1200) == {"intra": inside, "inter": between}


NO_PEERS = "no peer access"


@pytest.mark.parametrize(
    ("choice", "disabled", "apart", "strangers", "through_host", "words"),
    [
        ("auto", "", None, NO_PEERS, True, f"through host memory between 2 ranks ({NO_PEERS})"),
        ("auto", "P2P", None, None, True, "NCCL_P2P_DISABLE=1 asks for no peer access"),
        ("auto", "P2P SHM", None, None, False, "NCCL_SHM_DISABLE=1 for none through host memory"),
        (
            "auto",
            "",
            None,
            None,
            False,
            "torch.distributed (no fused kernels",
        ),  # the link is faster
        ("auto", "", "several hosts", NO_PEERS, False, "torch.distributed (several hosts)"),
        (
            "collective",
            "",
            None,
            NO_PEERS,
            False,
            "torch.distributed (--compression-transport collective)",
        ),
        ("symmetric", "", None, NO_PEERS, False, f"torch.distributed ({NO_PEERS})"),
        ("host", "SHM", None, None, True, "(--compression-transport host)"),
        ("host", "", "several hosts", None, None, "host is not possible: several hosts; use auto"),
    ],
)
def test_what_carries_payloads(
    choice, disabled, apart, strangers, through_host, words, monkeypatch
):
    """Data parallelism's, by the rule of all groups without fused kernels."""
    where = "megatron.compression.communication.transport._disabled"
    monkeypatch.setattr(where, lambda group: set(disabled.split()))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("taco_kernels.symmetric_memory.hosts_reason", lambda group: apart)
    monkeypatch.setattr("taco_kernels.symmetric_memory.peer_access_reason", lambda group: strangers)
    monkeypatch.setattr(HostMemory, "__init__", lambda self, group: None)
    group = mock.Mock(**{"size.return_value": 2})
    transports = Transports(choice)
    if through_host is None:
        with pytest.raises(TransportError, match=words):
            transports.host_memory(group)
        return
    memory, line = transports.host_memory(group)
    assert isinstance(memory, HostMemory) == through_host and words in line


def test_without_a_cuda_device_nothing_changes() -> None:
    with mock.patch("torch.cuda.is_available", lambda: False):
        memory, line = Transports().host_memory(mock.Mock())
    assert memory is None and line == "payloads travel over torch.distributed (no CUDA device)"


@pytest.mark.parametrize(
    ("spec", "fused"),
    [
        ("taco", True),
        ("int6:outliers=on", True),
        ("int5:outliers=on/int6:outliers=on", True),
        ("int5/int6:outliers=on", False),  # a sum has lists or has none
        ("int5:hadamard=off/int6", False),
        ("int6:normalize=standardize", False),
        ("sdp4bit", False),
    ],
)
def test_codecs_that_one_kernel_sends(spec: str, fused: bool) -> None:
    assert SymmetricTransport(mock.Mock()).fuses(parse_codec(spec)) == fused
