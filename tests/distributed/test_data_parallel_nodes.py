"""Two nodes of two ranks: training, bytes, and state that changes its ranks; one set of processes for all."""

import pytest
import torch

from tests.distributed.data_parallel_state import state_worker
from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import nodes_worker
from tests.distributed.test_sdp4bit import bytes_worker, check_bytes
from tests.distributed.tiny_ddp import start


def four_ranks_worker(rank: int, world_size: int) -> dict:
    """Everything that takes four ranks; what fails in here fails every test of the file."""
    start(rank)
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
