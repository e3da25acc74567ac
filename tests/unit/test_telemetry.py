"""Byte conventions, the ledger, the error probe, and the report made of them."""

import json

import pytest
import torch

from megatron.compression.config import CompressionConfigError
from megatron.compression.report import write_report
from megatron.compression.reporter import check_report_directory, log_line, read_history, tensorboard_scalars
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.probe import ErrorProbe


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


def test_ledger_keeps_phases_channels_and_kinds_apart() -> None:
    """Training and evaluation, compressed and not."""
    ledger = Ledger()
    ledger.record("tp.forward", "compressed", "all_to_all", sent=50, plain=0)
    ledger.record_plain("tp.forward", "all_reduce", 200, world_size=2)
    ledger.record_uncompressed("tp.forward", "small", "all_reduce", 10, world_size=2)
    ledger.evaluating = True
    ledger.record_uncompressed("tp.forward", "small", "all_reduce", 1000, world_size=2)
    totals = ledger.totals()["tp.forward"]
    assert totals["compressed"] == (50, 200)
    assert totals["small"] == (10, 10)
    assert ledger.totals("eval")["tp.forward"]["small"] == (1000, 1000)
    with pytest.raises(KeyError):
        ledger.record("tp.sideways", "off", "send", 1, 1)


def test_error_probe() -> None:
    """Relative L2 error over all observations; a site is due once in an iteration that is due."""
    probe = ErrorProbe(interval=2)
    assert probe.due("a", "tp.forward", 0)
    assert not probe.due("a", "tp.forward", 0)
    assert probe.due("a", "tp.backward", 0)
    assert not probe.due("a", "tp.forward", 1)
    assert probe.due("a", "tp.forward", 2)
    probe.observe("a", "tp.forward", torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.4]))
    probe.observe("a", "tp.forward", torch.tensor([0.0, 4.0]), torch.tensor([0.3, 4.0]))
    (row,) = probe.rows()
    assert row["relative_error"] == pytest.approx(0.1)
    assert row["samples"] == 2
    assert not ErrorProbe(interval=0).due("a", "tp.forward", 0)


PER_ITERATION = {
    "tp.forward": {"compressed": {"sent": 0.5e6, "plain": 1e6}, "probe": {"sent": 9e6, "plain": 9e6}},
    "tp.other": {"exact": {"sent": 0.1e6, "plain": 0.1e6}},
    "dp.gradient": {"off": {"sent": 2e6, "plain": 2e6}},
}


def test_log_line_and_scalars() -> None:
    """The ratio counts every tensor-parallel byte, the exact ones too, but not the probe's own."""
    line = log_line(5, 100, PER_ITERATION)
    assert "communication        5/     100 |" in line
    assert "tp.forward (MB): 0.500 of 1.000 |" in line
    assert "dp.gradient (MB): 2.000 |" in line
    assert "tensor-parallel ratio: 1.833 |" in line
    scalars = tensorboard_scalars(PER_ITERATION)
    assert scalars["communication/tp.forward bytes"] == 0.5e6
    assert scalars["communication/tensor-parallel ratio"] == pytest.approx(1.1 / 0.6)


def _report() -> dict:
    history = [
        {"iteration": 1, "losses": {"lm loss": 5.0}, "bytes_per_iteration": PER_ITERATION},
        {"iteration": 2, "split": "valid", "losses": {"lm loss": 4.5}},
        {"iteration": 2, "losses": {"lm loss": 4.0}, "bytes_per_iteration": PER_ITERATION},
    ]
    errors = [
        {
            "site": f"decoder.layers.{i}.mlp.linear_fc2",
            "channel": "tp.forward",
            "relative_error": 0.03,
            "samples": 1,
        }
        for i in range(3)
    ]
    return {"settings": {}, "world_size": 2, "history": history, "ledger_by_rank": [], "errors": errors}


def test_report_files(tmp_path) -> None:
    """JSON with a summary, Markdown that shows it, and the three plots as real PNG files."""
    write_report(_report(), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"]["tp_bytes_per_iteration"] == pytest.approx(0.6e6)
    assert report["summary"]["tp_ratio"] == pytest.approx(1.1 / 0.6)
    assert report["summary"]["first_loss"] == 5.0 and report["summary"]["last_loss"] == 4.0
    assert report["summary"]["validation_loss"] == 4.5
    markdown = (tmp_path / "report.md").read_text()
    assert "| tp.forward | 0.500 | 1.000 | 2.000 |" in markdown
    for name in ("loss.png", "bytes.png", "error.png"):
        assert name in markdown
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_report_sums_up_three_dimensions(tmp_path) -> None:
    """One table: tensor, data and pipeline parallelism and all of it, with ratios and shares."""
    report = _report()
    channels = {"tp.forward": 4, "dp.gradient": 2, "dp.weight": 1, "pp.forward": 2, "pp.backward": 1}
    bytes_per_iteration = {
        channel: {"compressed": {"sent": 1e6 * sent, "plain": 4e6 * sent}}
        for channel, sent in channels.items()
    }
    report["history"] = [{"iteration": 1, "losses": {}, "bytes_per_iteration": bytes_per_iteration}]
    write_report(report, tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    for row in (
        "| tensor parallel | 4.000 | 16.000 | 4.000 | 40.0% |",
        "| data parallel | 3.000 | 12.000 | 4.000 | 30.0% |",
        "| pipeline parallel | 3.000 | 12.000 | 4.000 | 30.0% |",
        "| all | 10.000 | 40.000 | 4.000 | 100.0% |",
    ):
        assert row in markdown
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert summary["dimensions"]["all"] == {"sent": 1e7, "uncompressed": 4e7, "ratio": 4.0}


def test_history_of_a_resumed_run(tmp_path) -> None:
    """Where a resumed run repeated an iteration, its row counts; the order is by iteration."""
    rows = [{"iteration": i, "losses": {"lm loss": float(i)}} for i in (1, 2, 3)]
    rows += [{"iteration": 3, "losses": {"lm loss": 30.0}}, {"iteration": 3, "split": "valid", "losses": {}}]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = read_history(path)
    assert [row["iteration"] for row in history] == [1, 2, 3, 3]
    assert history[2]["losses"]["lm loss"] == 30.0


def test_report_directory_of_another_run_is_refused(tmp_path) -> None:
    """Nothing is overwritten: only a resumed run may continue a report."""
    check_report_directory(str(tmp_path / "new"), resuming=False)
    check_report_directory(None, resuming=False)
    (tmp_path / "history.jsonl").write_text("{}\n")
    with pytest.raises(CompressionConfigError, match="already holds"):
        check_report_directory(str(tmp_path), resuming=False)
    check_report_directory(str(tmp_path), resuming=True)
    with pytest.raises(CompressionConfigError, match="is a file"):
        check_report_directory(str(tmp_path / "history.jsonl"), resuming=False)


def test_what_crosses_nodes_is_told_apart() -> None:
    """Totals count both links; the log line and the report show what left the node."""
    ledger = Ledger()
    ledger.record("dp.gradient", "compressed", "all_to_all", 100, 0, "intra")
    ledger.record("dp.gradient", "compressed", "all_to_all", 30, 0, "inter")
    ledger.record("dp.gradient", "compressed", "instead_of_reduce_scatter", 0, 240, "intra")
    ledger.record("dp.gradient", "compressed", "instead_of_reduce_scatter", 0, 120, "inter")
    assert ledger.totals()["dp.gradient"]["compressed"] == (130, 360)
    assert ledger.between_nodes()["dp.gradient"] == (30, 120)
    kinds = {"dp.gradient": {"compressed": {"sent": 2e6, "plain": 8e6}}}
    between = {"dp.gradient": {"sent": 5e5, "plain": 2e6}}
    line = log_line(3, 10, kinds, between)
    assert "dp.gradient (MB): 2.000 of 8.000 | between nodes: 0.500 of 2.000 |" in line
    with pytest.raises(KeyError, match="unknown ledger"):
        ledger.record("dp.gradient", "compressed", "all_to_all", 1, 1, "sideways")
