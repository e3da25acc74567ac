"""Which device ranks share, and what NCCL is told (megatron/compression/startup/shared_gpus.py)."""

import os
from argparse import Namespace

import pytest
import torch

from megatron.compression.errors import InputError
from megatron.compression.startup.shared_gpus import share_gpus, share_gpus_if_asked


@pytest.fixture(autouse=True)
def no_host_id(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "before")  # so that it is put back
    monkeypatch.delenv("NCCL_HOSTID")
    return monkeypatch


@pytest.mark.parametrize(("ranks", "devices"), [(4, 1), (4, 2), (3, 2), (8, 4)])
def test_no_device_twice_under_one_host_id(ranks: int, devices: int, monkeypatch) -> None:
    """NCCL refuses the same device twice on one host."""
    seen = set()
    for rank in range(ranks):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        device = share_gpus(rank, ranks, devices)
        assert 0 <= device < devices
        seen.add((os.environ["NCCL_HOSTID"], device))
    assert len(seen) == ranks
    assert len({host for host, _ in seen}) == -(-ranks // devices)  # no more hosts than needed


def test_a_device_each_changes_nothing(monkeypatch) -> None:
    assert [share_gpus(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.parametrize(
    ("asked", "found", "local_rank", "logged"),
    [(True, 2, 1, True), (False, 2, 3, False), (True, 0, 3, False)],
)
def test_the_flag(asked: bool, found: int, local_rank: int, logged: bool, monkeypatch) -> None:
    """Rank 3 of 4 takes the second of two devices; nothing happens unasked, or without devices."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    args = Namespace(share_gpus=asked, local_rank=3)
    lines = share_gpus_if_asked(args)
    assert args.local_rank == local_rank
    assert bool(lines) == logged and all("times mean nothing" in line for line in lines)


def test_nobody_says_how_many_ranks_there_are(monkeypatch) -> None:
    """The flag does not silently do nothing."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE"):
        share_gpus_if_asked(Namespace(share_gpus=True, local_rank=3))
    assert share_gpus_if_asked(Namespace(share_gpus=False, local_rank=3)) == []
