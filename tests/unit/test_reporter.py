"""The reporter over a run of one rank: means, times, lines; it never ends a run."""

import json

import torch

from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.loss_meter import LossCost
from megatron.compression.report import Reporter
from megatron.compression.report.reporter import _by_name, _totals
from tests.unit.one_rank import one_rank  # noqa: F401  (a fixture for every test here)


def _reporter(directory=None, ledger=None, **settings) -> Reporter:
    ledger = Ledger() if ledger is None else ledger
    defaults = {
        "train_iters": lambda: None,
        "track": lambda *_: None,
        "small_hint": "",
        "clock": lambda: 0.0,
    }
    settings = {"log_interval": 2, "settings": {}, **defaults, **settings}
    return Reporter(ledger, ErrorMeter(), directory=directory and str(directory), **settings)


def _loss(value: float) -> dict[str, torch.Tensor]:
    return {"lm loss": torch.tensor(value)}


def _rows(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


def test_losses_are_the_mean_of_an_interval(tmp_path) -> None:
    """Megatron's line has the same: skipped iterations bring no loss and do not count."""
    reporter = _reporter(tmp_path, log_interval=3)
    for iteration, losses in enumerate(
        [_loss(6.0), _loss(5.0), _loss(1.0), _loss(3.0), {}, _loss(4.0)], 1
    ):
        reporter.on_training_log(iteration, losses)
    assert [row["losses"]["lm loss"] for row in _rows(tmp_path)] == [4.0, 3.5]


def test_an_evaluation_is_not_counted_as_training() -> None:
    """The log line and the ratio do not move from its beginning to its end."""
    ledger = Ledger()
    reporter = _reporter(ledger=ledger)
    for split in ("valid", "test"):
        ledger.record("tp.forward", "compressed", "all_to_all", 100, 400)
        reporter.before_evaluate(split)
        ledger.record("tp.forward", "compressed", "all_to_all", 7, 28)
        ledger.record("dp.gradient", "compressed", "all_to_all", 7, 28, "inter")
        reporter.after_evaluate(None)
    assert ledger.totals()["tp.forward"]["compressed"] == (200, 800)
    assert ledger.totals("eval")["tp.forward"]["compressed"] == (14, 56)
    assert ledger.between_nodes()["dp.gradient"] == (0, 0)


def test_the_cost_in_loss_is_tracked_and_stored(tmp_path) -> None:
    """Beside the row of the log interval, which has the losses."""
    tracked = []
    reporter = _reporter(tmp_path, track=lambda values, iteration: tracked.append(values))
    reporter.on_training_log(1, _loss(2.0))
    reporter.on_training_log(2, _loss(2.0))
    tracked.clear()
    reporter.on_loss_cost(2, LossCost(0.5, 0.1, 8))
    assert tracked == [
        {
            "compression/cost in % of loss": 0.5,
            "compression/standard error of the cost": 0.1,
        }
    ]
    interval, cost = _rows(tmp_path)
    assert interval["losses"] == {"lm loss": 2.0}
    assert cost["iteration"] == 2
    assert cost["cost"] == {"percent": 0.5, "standard_error": 0.1, "pairs": 8, "broken_pairs": 0}


def test_bytes_are_those_of_one_iteration(tmp_path) -> None:
    """Differences since the last line; every entry of the ledger comes back under its name."""
    ledger = Ledger()
    reporter = _reporter(tmp_path, ledger)
    for iteration in range(1, 5):
        ledger.record("tp.forward", "compressed", "all_to_all", 10 * iteration, 40)
        ledger.record("dp.gradient", "off", "all_reduce", 6, 6, "inter")
        reporter.on_training_log(iteration, {})
    first, second = _rows(tmp_path)
    assert first["bytes_per_iteration"]["tp.forward"] == {
        "compressed": {"sent": 15.0, "plain": 40.0}
    }
    assert second["bytes_per_iteration"]["tp.forward"] == {
        "compressed": {"sent": 35.0, "plain": 40.0}
    }
    assert second["bytes_between_nodes"] == {"dp.gradient": {"sent": 6.0, "plain": 6.0}}
    by_name, between = _by_name(_totals(ledger))
    assert by_name["tp.forward"]["compressed"] == {"sent": 100, "plain": 160}
    assert list(by_name) == ["tp.forward", "dp.gradient"] and list(between) == ["dp.gradient"]


def test_small_messages_are_named_once(capsys) -> None:
    """The line names the flag that leaves them uncompressed."""
    ledger = Ledger()
    reporter = _reporter(None, ledger, log_interval=1, small_hint="--compression-min-mb 8")
    for iteration in (1, 2):
        ledger.record_uncompressed("tp.forward", "small", "all_reduce", 1_000_000, 2)
        reporter.on_training_log(iteration, {})
    lines = [line for line in capsys.readouterr().out.splitlines() if "go uncompressed" in line]
    assert lines == [
        " compression: 1.000 MB per iteration and GPU go uncompressed: these messages are under "
        "--compression-min-mb 8"
    ]


def test_a_folder_that_goes_away_does_not_end_the_run(tmp_path, capsys) -> None:
    """A file in its place: said once; the run goes on, and so does the log line."""
    reporter = _reporter(tmp_path / "report", log_interval=1)
    (tmp_path / "report").write_text("")
    for iteration in (1, 2):
        reporter.on_training_log(iteration, _loss(1.0))
    reporter.finish()
    printed = capsys.readouterr().out
    assert printed.count("communication ") == 2
    assert printed.count("writing the report's history failed (") == 1
    assert printed.count("writing the report failed (") == 1


def test_a_tracker_that_is_gone_does_not_end_the_run(capsys) -> None:
    """It raises what it likes; that is said once."""

    def gone(values, step):
        raise ConnectionError("tracking server\ndoes not answer")

    reporter = _reporter(log_interval=1, track=gone)
    for iteration in (1, 2):
        reporter.ledger.record_uncompressed("tp.forward", "off", "all_reduce", 100, 2)
        reporter.on_training_log(iteration, {})
    printed = capsys.readouterr().out
    assert (
        printed.count("writing scalars failed (ConnectionError: tracking server); training goes on")
        == 1
    )
