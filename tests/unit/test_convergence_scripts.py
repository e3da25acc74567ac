"""What the convergence scripts share: runs are made once, a stop loses none, the noise is there to see."""

import importlib
import json
import threading
from pathlib import Path

import pytest

from scripts import _convergence

LOSSES = {("none", 1): 4.0, ("codec", 1): 4.1, ("control", 1): 4.4, ("none", 2): 3.92}
BASELINE = {"setting": "none"}


def _runs() -> list[dict]:
    plan = _convergence.plan(["none", "codec", "control"], "none", [1], noise_seed=2)
    return [{"iterations": 5, "setting": setting, "seed": seed} for setting, seed in plan]


class Trainings:
    """Stands for the trainings; each takes ``seconds`` of a clock that nothing else moves."""

    def __init__(self, monkeypatch, seconds: float = 0.0) -> None:
        self.trained, self.now, self.seconds = [], 0.0, seconds
        monkeypatch.setattr(_convergence.time, "monotonic", lambda: self.now)

    def __call__(self, run: dict) -> dict:
        self.now += self.seconds
        self.trained.append((run["setting"], run["seed"]))
        return {"validation_loss": LOSSES[run["setting"], run["seed"]]}


def test_differences_and_noise(tmp_path: Path, monkeypatch) -> None:
    """Against the baseline of the same seed; the noise is the baseline's spread over seeds."""
    results = _convergence.train_missing(_runs(), Trainings(monkeypatch), tmp_path)
    assert [(row["setting"], row["seed"]) for row in results] == list(LOSSES)
    differences = [_convergence.difference(row, results, BASELINE) for row in results]
    assert differences == [None, pytest.approx(0.025), pytest.approx(0.1), None]
    assert _convergence.noise(results, BASELINE) == pytest.approx(4.0 / 3.92 - 1)
    assert "uncompressed validation loss by 2.04%" in _convergence.noise_line(results, BASELINE)
    assert _convergence.noise_line(results[:3], BASELINE) == ""
    assert _convergence.plan(["codec"], "none", [1], 2) == [("codec", 1)], "no baseline, no noise"
    assert _convergence.plan(["none"], "none", [1, 2], 2) == [("none", 1), ("none", 2)], "a seed once"


def test_the_time_limit_leaves_the_rest_for_the_next_start(tmp_path: Path, monkeypatch, capsys) -> None:
    """Two runs of 100 seconds fit into 250; the next start makes the other two and no more."""
    first, second = Trainings(monkeypatch, 100.0), []
    assert len(_convergence.train_missing(_runs(), first, tmp_path, time_limit=250)) == 2
    assert "2 of 4 runs are left: start again" in capsys.readouterr().out
    again = Trainings(monkeypatch, 100.0)
    results = _convergence.train_missing(_runs(), again, tmp_path, time_limit=250, report=second.append)
    assert first.trained + again.trained == list(LOSSES) and len(results) == 4
    assert [len(rows) for rows in second] == [3, 4], "the table after each run"


def test_another_setup_is_another_run(tmp_path: Path, monkeypatch) -> None:
    """Results of fewer iterations are not taken for those of more."""
    trainings = Trainings(monkeypatch)
    _convergence.train_missing(_runs()[:1], trainings, tmp_path)
    longer = {**_runs()[0], "iterations": 6}
    assert _convergence.train_missing([longer], trainings, tmp_path) == [{**longer, "validation_loss": 4.0}]
    assert len(trainings.trained) == 2


def test_a_failed_run_ends_the_script_and_keeps_the_others(tmp_path: Path, monkeypatch, capsys) -> None:
    def train(run: dict) -> dict:
        if run["setting"] == "codec":
            raise RuntimeError("the codec run failed")
        return {"validation_loss": 4.0}

    with pytest.raises(SystemExit) as ended:
        _convergence.train_missing(_runs(), train, tmp_path)
    assert ended.value.code == 1 and "error: the codec run failed" in capsys.readouterr().err
    assert [row["setting"] for row in json.loads((tmp_path / "results.json").read_text())] == ["none"]


def test_jobs_are_trained_at_once_and_all_kept(tmp_path: Path) -> None:
    """Two trainings that wait for each other end; each result is there once, whatever the order."""
    barrier = threading.Barrier(2, timeout=30)

    def train(run: dict) -> dict:
        barrier.wait()
        return {"validation_loss": LOSSES[run["setting"], run["seed"]]}

    results = _convergence.train_missing(_runs(), train, tmp_path, jobs=2)
    assert [(row["setting"], row["seed"]) for row in results] == list(LOSSES), "in the order of the plan"
    assert len(json.loads((tmp_path / "results.json").read_text())) == 4


def test_the_next_run_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started ahead, let go one after the other, stopped when its turn does not come."""
    monkeypatch.syspath_prepend(str(Path(_convergence.__file__).parent))
    turns_of = importlib.import_module("data_parallel_convergence").Turns
    runs, log = [{"number": number} for number in range(4)], []

    class Training:
        def __init__(self, run: dict, go: Path) -> None:
            self.run, self.go, self.process = run["number"], go, self
            log.append(f"start {self.run}")

        def finish(self) -> dict:
            assert self.go.exists()
            log.append(f"finish {self.run}")
            return {"number": self.run}

        def terminate(self) -> None:
            log.append(f"stop {self.run}")

        def wait(self) -> None:
            assert not self.go.exists(), "it has never run"

    turns = turns_of(runs, Training, tmp_path, ahead=True)
    assert turns.train(runs[0]) == {"number": 0}
    assert turns.train(runs[2]) == {"number": 2}, "1 was there already"
    turns.end()
    assert log == [
        *("start 0", "start 1", "finish 0"),
        *("stop 1", "start 2", "start 3", "finish 2"),
        "stop 3",
    ]
    assert not list(tmp_path.iterdir())


def test_a_word_names_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark and the losses take the same names; every one is a codec that there is."""
    monkeypatch.syspath_prepend(str(Path(_convergence.__file__).parent))
    from megatron.compression.codecs import build_codec

    names = importlib.import_module("_codec_names")
    setting = importlib.import_module("bench_end_to_end").parse_setting
    assert names.taco_flags("none") == []
    assert names.taco_flags("int8:single")[:5] == [
        "--taco",
        "--taco-format",
        "int8",
        "--taco-scales",
        "single",
    ]
    for word in ("fp8-e4m3", "int8:single", "int6:dither:single", "int4:stochastic"):
        config = build_codec("taco", **names.parse_codec(word)).config
        assert set(word.split(":")) <= {config.format, config.scales, config.rounding}
        assert setting(f"caat0.5+{word}:chunks2:copies") == (
            type(setting("none"))(names.parse_codec(word), 0.5, 2, "copies")
        )
    with pytest.raises(ValueError, match="sinlge in int8:sinlge"):
        names.taco_flags("int8:sinlge")
