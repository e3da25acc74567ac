"""scripts/losses.py: runs are made once, a stop loses none, the noise is there to see."""

import json
from pathlib import Path

import losses
import pytest

LOSSES = {("none", 1): 4.0, ("codec", 1): 4.1, ("control", 1): 4.4, ("none", 2): 3.92}
BASELINE = "none"


def _runs() -> list[dict]:
    plan = losses.plan(["none", "codec", "control"], [1], noise_seed=2)
    return [{"iterations": 5, "setting": setting, "seed": seed} for setting, seed in plan]


class Trainings:
    """Stands for the trainings; each takes 100 seconds of a clock that nothing else moves."""

    def __init__(self, monkeypatch) -> None:
        self.trained, self.now = [], 0.0
        monkeypatch.setattr(losses.time, "monotonic", lambda: self.now)

    def __call__(self, run: dict) -> dict:
        self.now += 100.0
        self.trained.append((run["setting"], run["seed"]))
        loss = LOSSES[run["setting"], run["seed"]]
        return {"validation_loss": loss, "test_loss": loss, "bytes_per_iteration": {}}


def test_an_unknown_codec_is_refused_before_a_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["losses.py", "--data-parallel", "2", "--codecs", "none", "int8 int9"]
    )
    monkeypatch.setattr("os._exit", print)
    losses.parse_args()
    assert "error: --dp-compression WEIGHTS: codec 'int9' is unknown" in capsys.readouterr().err


def test_a_seed_is_planned_once() -> None:
    assert losses.plan(["none", "none"], [1, 2], 2) == [("none", 1), ("none", 2)]


def test_the_table_shows_loss_and_traffic() -> None:
    """A class of traffic that only some settings have is zero elsewhere."""
    plain = {"sent": 2e6, "uncompressed": 2e6}
    common = {"setting": "none", "seed": 1, "validation_loss": 4.0, "test_loss": 4.1}
    results = [common | {"bytes_per_iteration": {"pp.forward": plain, "pp.other": plain}}]
    sent = {"pp.forward": {"sent": 5e5, "uncompressed": 2e6}, "pp.backward": plain}
    codec = {
        "setting": "int4 int6",
        "validation_loss": 4.1,
        "test_loss": 4.2,
        "bytes_per_iteration": sent,
    }
    results.append(common | codec)
    results.append(results[0] | {"seed": 2, "validation_loss": 3.92})
    text = losses.table(results, BASELINE)
    columns = "| setting | seed | validation loss | against none | test loss | pp.forward MB | of uncompressed"
    assert f"{columns} | pp.backward MB" in text
    assert "| int4 int6 | 1 | 4.1000 | +2.50% | 4.2000 | 0.500 | 0.250 | 2.000 | 1.000 |" in text
    assert "| none | 1 | 4.0000 | - | 4.1000 | 2.000 | 1.000 | 0.000 | 0.000 |" in text
    assert "validation loss of none by 2.04%" in text
    assert "A seed alone" not in losses.table(results[:2], BASELINE)


def test_the_time_limit_leaves_the_rest_for_the_next_start(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Two runs of 100 seconds fit into 250; the next start makes the other two and no more."""
    first = Trainings(monkeypatch)
    assert len(losses.train_missing(_runs(), first, tmp_path, time_limit=250)) == 2
    assert "2 of 4 runs are left: start again" in capsys.readouterr().out
    again = Trainings(monkeypatch)
    results = losses.train_missing(_runs(), again, tmp_path, time_limit=250)
    assert first.trained + again.trained == list(LOSSES) and len(results) == 4
    assert [(row["setting"], row["seed"]) for row in results] == list(LOSSES)
    assert (tmp_path / "results.md").read_text().count("\n| ") == 4


def test_a_failed_run_ends_the_script_and_keeps_the_others(tmp_path: Path) -> None:
    def train(run: dict) -> dict:
        if run["setting"] == "codec":
            raise RuntimeError("the codec run failed")
        return {"validation_loss": 4.0, "test_loss": 4.0, "bytes_per_iteration": {}}

    with pytest.raises(SystemExit) as ended:
        losses.train_missing(_runs(), train, tmp_path)
    assert ended.value.code == f"error: 'codec', logs in {tmp_path}: the codec run failed"
    assert [row["setting"] for row in json.loads((tmp_path / "results.json").read_text())] == [
        "none"
    ]
