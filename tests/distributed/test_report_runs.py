"""Reports of whole runs: what the log line says, and that a run never ends because of its report."""

import json
import re

import pytest

from tests.distributed.launch import pretrain, start, tiny_flags


def test_a_run_by_samples(tmp_path) -> None:
    """``--train-samples``, as upstream's Llama 3 script has it: the number of iterations is Megatron's."""
    flags = tiny_flags("--train-samples", "12", "--compression-report", str(tmp_path / "report"))
    place = flags.index("--train-iters")
    del flags[place : place + 2]
    run = start("pretrain_gpt.py", *flags).finish(timeout=240)
    assert run.returncode == 0, run.output[-4000:]
    ours = re.findall(r"communication +(\d+)/ *(\d+) \|", run.output)
    assert ours == [("1", "3"), ("2", "3"), ("3", "3")]
    assert (tmp_path / "report" / "report.md").exists()


def test_figures_agree_with_megatrons_own_line() -> None:
    """The loss is the mean of a log interval."""
    run = pretrain(processes=1, exact=True, log_interval="2")
    losses = run.log("lm loss")
    rows = [json.loads(line) for line in (run.report / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [2, 4]
    for row in rows:
        assert f"{row['losses']['lm loss']:.6E}" == f"{losses[row['iteration']]:.6E}"
    summary = json.loads((run.report / "report.json").read_text())["summary"]
    assert summary["peak_memory_bytes"]["resident"] > 10e6


def test_the_log_line_adds_up() -> None:
    """What the line says adds up to every byte of the ledger."""
    flags = ["--tensor-model-parallel-size", "2", "--taco", "--compression-min-mb", "0"]
    run = pretrain(*flags, exact=True, train_iters="1")
    (line,) = re.findall(r"communication +1/.*", run.output)
    report = json.loads((run.report / "report.json").read_text())
    settings = report["settings"]
    assert settings["compression"]["tensor_parallel"]["compression"] == "taco"
    assert settings["compression"]["tensor_parallel"]["min_mb"] == 0
    assert settings["megatron"]["tensor_model_parallel_size"] == 2 and settings["megatron"]["seed"]
    rows = [row for rank in report["ledger_by_rank"] for row in rank if row["phase"] == "train"]
    said = sum(map(float, re.findall(r"tp\.\w+ \(MB\): ([\d.]+)", line)))
    assert said == pytest.approx(sum(row["sent_bytes"] for row in rows) / 2 / 1e6, abs=0.002)
    assert re.search(r"tensor-parallel ratio: \d\.\d{3} \|", line)
