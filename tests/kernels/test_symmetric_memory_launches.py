"""Launches of the symmetric-memory kernels: every rank runs the same code.

A rank that compiled a kernel of its own would keep its peers waiting for it, in every process for the first
time, and a kernel that waits may keep the device from loading another one.
"""

import pytest
import torch

pytest.importorskip("triton")

from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import CodecConfig
from tests.kernels.architectures import pretended

RANKS = 4
CONFIG = CodecConfig("int6", scales="signed")


def channel_of(rank: int, offset: int) -> Channel:
    """A rank's end of a channel whose memory starts at an address with these lowest bits."""
    memory = torch.zeros(channel_bytes(RANKS, 8) + 16, dtype=torch.uint8)
    address = memory.data_ptr() // 16 * 16 + offset
    return Channel([address] * RANKS, rank, torch.device("cpu"), 8, timeout=20.0)


def all_reduce(channel: Channel, x: torch.Tensor) -> None:
    collectives.all_reduce(channel, x, CONFIG)


def reduce_scatter(channel: Channel, x: torch.Tensor) -> None:
    collectives.reduce_scatter(channel, x, CONFIG)


def all_gather(channel: Channel, x: torch.Tensor) -> None:
    wire = torch.zeros(1, CONFIG.wire_bytes(x.numel()), dtype=torch.uint8)
    collectives.all_gather_encoded(channel, wire, x.shape, x.dtype, CONFIG)


@pytest.mark.parametrize("collective", (all_reduce, reduce_scatter, all_gather))
def test_all_ranks_run_the_same_kernel(collective) -> None:
    """Rank and address do not matter, though 1 and multiples of 16 are numbers that Triton compiles for."""
    x = torch.zeros(RANKS, 2**14, dtype=torch.bfloat16)
    with pretended(90) as compiled:
        for rank in range(RANKS):
            for offset in (0, 8):
                collective(channel_of(rank, offset), x)
    assert len(compiled) == 1


@pytest.mark.parametrize("collective", (all_reduce, reduce_scatter, all_gather))
def test_a_piece_of_one_group_runs_the_same_kernel(collective) -> None:
    """A number of groups that is 1 stays a number."""
    with pretended(90) as compiled:
        for groups in (1, 2, 16):
            collective(channel_of(0, 0), torch.zeros(RANKS, 128 * groups, dtype=torch.bfloat16))
    assert len(compiled) == 1
