"""Two nodes of two ranks: topology, training, bytes."""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from megatron.compression.communication import Ledger, Transports
from megatron.compression.communication.topology import find_topology, nodes_of
from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import nodes_worker
from tests.distributed.test_sdp4bit import check_bytes, started_bytes_worker
from tests.distributed.tiny_ddp import Setup, Training, digest, same_everywhere, start, train


def hosts_worker(rank: int, world_size: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
    host = SimpleNamespace(nodename=f"host{rank // 2}")
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("os.uname", return_value=host),
    ):
        assert nodes_of(dist.group.WORLD) == [0, 0, 2, 2]
        topology = find_topology(dist.group.WORLD)
    assert (topology.nodes, topology.local, topology.index) == (2, 2, rank % 2)
    assert dist.get_process_group_ranks(topology.hops["inter"][0]) == [rank % 2, rank % 2 + 2]


def test_nodes_by_the_hosts_names() -> None:
    """Hosts' names count if no launcher gives the number of ranks of a node."""
    spawn(hosts_worker, 4)


def uneven_nodes_worker(rank: int, world_size: int) -> None:
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3" if rank < 3 else "1"):
        topology = find_topology(dist.group.WORLD)
        pair = find_topology(pairs[rank // 2])
        assert nodes_of(dist.group.WORLD) == [0, 0, 0, 3]
    assert not topology.regular and (topology.nodes, topology.local) == (4, 1)
    assert (pair.nodes, pair.local) == ((1, 2) if rank < 2 else (2, 1))
    descriptions = [None] * 4
    dist.all_gather_object(descriptions, topology.describe())
    assert len(set(descriptions)) == 1
    # a launcher that says it on some nodes only: by the hosts' names
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3" if rank < 3 else ""):
        assert nodes_of(dist.group.WORLD) == [0] * 4


def test_uneven_nodes() -> None:
    """All ranks see the same nodes, of three ranks and of one, which know only their number."""
    spawn(uneven_nodes_worker, 4)


def communicators_worker(rank: int, world_size: int) -> None:
    topology = find_topology(dist.group.WORLD, 2, Transports("collective", communicators=3))
    assert ", 3 communicators; " in topology.describe()
    for link, ranks in ((None, [0, 1, 2, 3]), ("inter", [rank % 2, rank % 2 + 2])):
        transport = topology.transport(Ledger(), "dp.weight", link)
        assert [dist.get_process_group_ranks(group) for group in transport.groups] == [ranks] * 3
        gathered, pending = transport.all_gather(torch.full((1, 7), rank, dtype=torch.uint8))
        pending.wait()
        assert torch.equal(gathered, torch.tensor(ranks, dtype=torch.uint8)[:, None].expand(-1, 7))
    assert len(topology.transport(Ledger(), "dp.gradient", "intra").groups) == 1


def test_each_exchange_between_nodes_has_its_communicators() -> None:
    """Gradients and weights have theirs, over two hops too."""
    spawn(communicators_worker, 4)


OFFSET = "decoder.layers.0.self_attention.core_attention.softmax_offset"


def cut_worker(rank: int, world_size: int) -> tuple[float, float]:
    """Return the relative errors of a gradient and of its weight at TP 2 x DP 2."""
    from megatron.compression.replicated_parameters import sharded_without_mark

    start(rank, tensor_ranks=2)
    setup = Setup(softmax="learnable")
    plain = replace(setup, distributed_optimizer=False, overlap=False)
    expected, compressed = (
        train(rank, replace(plain, settings=settings), 1)[0]
        for settings in ({}, {"compression": "identity"})
    )
    assert sorted(sharded_without_mark(compressed.model).values()) == [
        OFFSET,
        OFFSET.replace("0", "1"),
    ]
    gradient = _error(expected, compressed, OFFSET, "main_grad")
    expected, compressed = (
        train(rank, replace(setup, settings=settings), 4)[0]
        for settings in ({}, {"compression": "sdp4bit", "weights": "int8"})
    )
    norms = torch.cat(
        [p.detach().float() for n, p in compressed.model.named_parameters() if "layernorm" in n]
    )
    assert same_everywhere(digest(norms)), "replicas are alike"
    return gradient, _error(expected, compressed, OFFSET, "data")


def _error(expected: Training, compressed: Training, name: str, attribute: str) -> float:
    """Return the relative L2 error of a parameter that starts from zeros, or of its gradient.

    Args:
        expected: the uncompressed training.
        compressed: the compressed training.
        name: of the parameter.
        attribute: data, or where the gradient is.
    """
    exact = getattr(dict(expected.model.named_parameters())[name], attribute).float()
    lossy = getattr(dict(compressed.model.named_parameters())[name], attribute).float()
    assert exact.any()
    return float((lossy - exact).norm() / exact.norm())


def test_parameters_cut_without_the_mark() -> None:
    """Tensor-parallel ranks train softmax offsets of their own, which lack Megatron's mark."""
    for gradient, weight in spawn(cut_worker, 4):
        assert gradient < 1e-3 and weight < 0.5


def test_training_on_two_nodes() -> None:
    """Exact codecs over two hops: the same training up to the order of sums."""
    spawn(nodes_worker, 4, 2)


def test_bytes_between_nodes_and_inside() -> None:
    """Bits a value, of what c10d was really given."""
    for result in spawn(started_bytes_worker, 4, 2):
        check_bytes(result)
