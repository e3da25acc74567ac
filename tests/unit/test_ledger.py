"""Byte conventions and the ledger."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.compression import CompressionConfig, CompressionConfigError, Host, Session
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC, Ledger, bytes_sent
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig


@pytest.mark.parametrize(
    ("operation", "world_size", "sent"),
    [
        ("all_reduce", 4, 1500),
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_to_all", 2, 500),
        ("broadcast", 4, 1000),
        ("send", 2, 1000),
        ("all_reduce", 1, 0),
    ],
)
def test_bytes_sent(operation: str, world_size: int, sent: int) -> None:
    """The convention of nccl-tests for a buffer of 1000 bytes."""
    assert bytes_sent(operation, 1000, world_size) == sent


def test_ledger_keeps_phases_traffic_and_kinds_apart() -> None:
    """Training and evaluation, compressed and not."""
    ledger = Ledger()
    ledger.record("tp.forward", "compressed", "all_to_all", sent=50, uncompressed=0)
    ledger.record_plain("tp.forward", "all_reduce", 200, world_size=2)
    ledger.record_uncompressed("tp.forward", "small", "all_reduce", 10, world_size=2)
    ledger.phase = "eval"
    ledger.record_uncompressed("tp.forward", "small", "all_reduce", 1000, world_size=2)
    totals = ledger.totals()["tp.forward"]
    assert totals["compressed"] == (50, 200)
    assert totals["small"] == (10, 10)
    assert ledger.totals("eval")["tp.forward"]["small"] == (1000, 1000)
    with pytest.raises(KeyError):
        ledger.record("tp.sideways", "off", "send", 1, 1)


def test_links_are_told_apart() -> None:
    """Totals count both links."""
    ledger = Ledger()
    ledger.record("dp.gradient", "compressed", "all_to_all", 100, 0, "intra")
    ledger.record("dp.gradient", "compressed", "all_to_all", 30, 0, "inter")
    ledger.record("dp.gradient", "compressed", "instead_of_reduce_scatter", 0, 240, "intra")
    ledger.record("dp.gradient", "compressed", "instead_of_reduce_scatter", 0, 120, "inter")
    assert ledger.totals()["dp.gradient"]["compressed"] == (130, 360)
    assert ledger.between_nodes()["dp.gradient"] == (30, 120)
    with pytest.raises(KeyError, match="unknown ledger traffic"):
        ledger.record("dp.gradient", "compressed", "all_to_all", 1, 1, "sideways")


def test_every_traffic_class_belongs_to_one_dimension() -> None:
    """Experts' too; rows name the class."""
    for traffic in TRAFFIC:
        assert sum(traffic.startswith(prefix) for prefix in DIMENSIONS.values()) == 1
    ledger = Ledger()
    ledger.record_uncompressed("ep.forward", "off", "all_to_all", 100, 2)
    (row,) = ledger.rows()
    assert (row["traffic"], row["sent_bytes"], row["calls"]) == ("ep.forward", 50, 1)


class Lines(Host):
    """A loop that keeps lines."""

    def __init__(self, lines: list[str]) -> None:
        self.log = lines.append


@pytest.mark.slow
def test_a_loop_of_ones_own_hears_of_small_messages_once() -> None:
    """Nobody else would tell it: the log line is megatron.training's."""
    lines: list[str] = []
    config = CompressionConfig(tensor_parallel=TensorParallelConfig(compression="int6"))
    compression = Session(config, Lines(lines))
    compression.step()
    assert not lines
    compression.ledger.record("tp.forward", "small", "all_reduce", 2_000_000, 2_000_000)
    compression.step()
    compression.step()
    [line] = lines
    assert "2.000 MB so far are in messages under min_mb = 8" in line


def test_a_call_that_an_own_loop_leaves_out_is_named(monkeypatch) -> None:
    """Before the model runs in a training: gradients would go uncompressed without a word."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 2)
    settings = DataParallelConfig(compression="int8")
    compression = Session(CompressionConfig(data_parallel=settings, start_iteration=1))
    with torch.no_grad():
        compression.refuse_missing_calls()
    with pytest.raises(
        CompressionConfigError, match=r"call compression.attach_wrapped\(chunks\) after"
    ):
        compression.refuse_missing_calls()
    compression.attach_wrapped([])
    compression.refuse_missing_calls()
    compression.ledger.record_uncompressed("dp.gradient", "warmup", "all_reduce", 64, 2)
    with pytest.raises(CompressionConfigError, match=r"call compression.step\(\) after each"):
        compression.refuse_missing_calls()
    compression.step()
    compression.refuse_missing_calls()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_lines_come_from_the_first_rank(rank: int, monkeypatch, capsys) -> None:
    """The first rank prints them if the loop gives no function that does."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    compression = Session(
        CompressionConfig(tensor_parallel=TensorParallelConfig(compression="int6"))
    )
    compression.ledger.record("tp.forward", "small", "all_reduce", 1, 1)
    compression.step()
    assert ("min_mb" in capsys.readouterr().out) == (rank == 0)


def test_two_audits_may_end_in_any_order() -> None:
    """A session audits its first iteration; after the last audit torch's methods are its own."""
    methods = dict(vars(torch.distributed.ProcessGroup))
    first, second = (BackendAudit(Ledger(), dict) for _ in range(2))
    first.start()
    second.start()
    first.stop()
    assert dict(vars(torch.distributed.ProcessGroup)) != methods
    second.stop()
    assert dict(vars(torch.distributed.ProcessGroup)) == methods
