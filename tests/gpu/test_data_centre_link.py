"""The link between data centres with payloads on GPUs: copies, streams, and memory that is reused."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron.compression.local_steps import link
from tests.distributed.launch import free_port
from tests.distributed.spawn import spawn
from tests.gpu.devices import needs

pytestmark = pytest.mark.multigpu

BYTES = 32 * 2**20
ROUNDS = 10


def payload_of(data_centre: int, number: int) -> int:
    """The byte that fills a payload."""
    return (17 * number + 100 * data_centre) % 251


def link_worker(rank: int, ranks: int, port: int) -> tuple[bool, bool, int]:
    """Each rank is a data centre of one rank: whether all payloads have arrived whole, whether the
    training stream went on meanwhile, and the device bytes that the link holds at the end."""
    dist.get_rank = lambda group=None: 0
    here = link.DataCentreLink(f"127.0.0.1:{port}", ranks, rank, 60.0, lambda line: None)
    here.agree({"--local-steps": 3})
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    whole = True
    went_on = True
    for number in range(ROUNDS):
        payload = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        # What fills it comes late, behind a kernel of some 0.1 s.
        torch.cuda._sleep(100_000_000)
        payload.fill_(payload_of(rank, number))
        exchange = here.start(payload, number)
        del payload
        # Training goes on, in memory that the payload may have given back.
        begin = time.monotonic()
        while not exchange.done.is_set():
            torch.empty(BYTES, dtype=torch.uint8, device="cuda").fill_(255)
            went_on = went_on and time.monotonic() - begin < 60
        received = here.wait(exchange)
        # The pinned payloads are dropped while their copy to the GPU may be under way.
        del exchange
        expected = [payload_of(data_centre, number) for data_centre in range(ranks)]
        is_equal = [bool((row == byte).all()) for row, byte in zip(received, expected, strict=True)]
        whole = whole and received.is_cuda and all(is_equal)
        del received
    torch.cuda.synchronize()
    return whole, went_on, torch.cuda.memory_allocated() - before


@needs(2)
def test_payloads_of_gpus_arrive_whole() -> None:
    """Filled late, given back at once: each data centre receives what was sent, and holds nothing
    of it on the GPU afterwards."""
    results = spawn(link_worker, 2, free_port(), backend="nccl")
    assert results == [(True, True, 0)] * 2


def scatter_worker(rank: int, ranks: int, port: int) -> list[list[int]]:
    dist.get_rank = lambda group=None: 0
    here = link.DataCentreLink(f"127.0.0.1:{port}", ranks, rank, 60.0, lambda line: None)
    here.agree({"--local-steps": 3})
    rows = 10 * rank + torch.arange(ranks, dtype=torch.uint8, device="cuda")
    return here.wait(here.start(rows[:, None].expand(-1, 2).contiguous(), 1, True)).tolist()


@needs(2)
def test_pieces_of_gpus_go_to_their_data_centre() -> None:
    assert spawn(scatter_worker, 2, free_port(), backend="nccl") == [
        [[0, 0], [10, 10]],
        [[1, 1], [11, 11]],
    ]
