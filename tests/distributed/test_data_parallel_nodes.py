"""Two nodes of two ranks: training, bytes, and state that changes its ranks; one set of processes for all."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.compression.data_parallel.topology import find_topology, nodes_of
from tests.distributed.data_parallel_state import state_worker
from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import nodes_worker
from tests.distributed.test_sdp4bit import bytes_worker, check_bytes
from tests.distributed.tiny_ddp import start


def hosts_worker(rank: int) -> None:
    """Nodes by the hosts' names, where no launcher says how many ranks a node has."""
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
    host = SimpleNamespace(nodename=f"host{rank // 2}")
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch("os.uname", return_value=host):
        assert nodes_of(dist.group.WORLD) == [0, 0, 2, 2]
        topology = find_topology(dist.group.WORLD)
    assert (topology.nodes, topology.local, topology.index) == (2, 2, rank % 2)
    assert dist.get_process_group_ranks(topology.inter) == [rank % 2, rank % 2 + 2]


def four_ranks_worker(rank: int, world_size: int) -> dict:
    """Everything that takes four ranks; what fails in here fails every test of the file."""
    start(rank)
    hosts_worker(rank)
    nodes_worker(rank, 2)
    if not torch.cuda.is_available():  # it is about values, not about devices
        state_worker(rank, world_size)
    return bytes_worker(rank, world_size, 2)


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """By rank."""
    return spawn(four_ranks_worker, 4)


def test_two_nodes_train_and_change_ranks(results) -> None:
    """nodes_worker's and state_worker's own assertions hold on every rank."""
    assert len(results) == 4


def test_bytes_between_nodes_and_inside(results) -> None:
    """Bits a value, of what c10d was really given."""
    for result in results:
        check_bytes(result)
