"""Megatron's own loop on CPU tensors: resumes, signals, lengths by samples, and the report."""

import json
import os
import re
import signal

import pytest

from tests.distributed.launch import Run, go_back_to, pretrain, start, tiny_flags
from tests.distributed.test_matrix import check_copies

TENSOR = ("--tensor-model-parallel-size", "2")


class TestResume:
    """A run with dropout, and its resume from the second of four iterations."""

    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory) -> tuple[Run, Run]:
        """The uninterrupted run, and the resumed one."""
        folder = tmp_path_factory.mktemp("resume")
        flags = tiny_flags(*TENSOR, "--bf16", "--hidden-dropout", "0.3", "--ckpt-format", "torch")
        uninterrupted = pretrain(*flags, "--save", str(folder), "--save-interval", "2")
        go_back_to(2, folder)
        return uninterrupted, pretrain(*flags, "--load", str(folder))

    def test_tensor_ranks_drop_the_same_activations(self, runs: tuple[Run, Run]) -> None:
        """Otherwise copies of a parameter would differ."""
        check_copies(runs[0])

    def test_the_loss_falls(self, runs: tuple[Run, Run]) -> None:
        losses = runs[0].losses
        assert list(losses) == [1, 2, 3, 4]
        assert losses[4] < losses[1]

    def test_losses_are_equal_to_the_last_digit(self, runs: tuple[Run, Run]) -> None:
        """The resumed run draws the masks that the uninterrupted one drew."""
        uninterrupted, resumed = runs
        losses = uninterrupted.losses
        assert resumed.losses == {3: losses[3], 4: losses[4]}

    def test_gradient_norms_are_equal(self, runs: tuple[Run, Run]) -> None:
        uninterrupted, resumed = runs
        norms = uninterrupted.log("grad norm")
        assert resumed.log("grad norm") == {3: norms[3], 4: norms[4]}

    def test_nothing_is_traced(self, runs: tuple[Run, Run]) -> None:
        for run in runs:
            assert "Traceback" not in run.output


def test_a_signal_saves_and_ends_the_run(tmp_path):
    """Workers of the data loaders have Megatron's handler of the signal too, and end as well."""
    flags = ("--exit-signal-handler", "--num-workers", "2")
    save = ("--save", str(tmp_path), "--save-interval", "1000000")
    command = tiny_flags(*flags, *save, train_iters="1000000")
    run = start("pretrain_gpt.py", *command, processes=2)
    run.wait_for("iteration        3/", timeout=200)
    os.kill(run.processes[0].pid, signal.SIGTERM)
    run.wait_for("exiting program after receiving SIGTERM", timeout=60)
    ended = run.finish(timeout=60)
    assert ended.returncode == 0, ended.output[-3000:]
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) >= 3
    assert "Traceback" not in ended.output


def test_a_run_by_samples(tmp_path) -> None:
    """The log has Megatron's number of iterations under ``--train-samples``: 12 samples are 3."""
    flags = tiny_flags("--train-samples", "12", "--compression-report", str(tmp_path / "report"))
    position = flags.index("--train-iters")
    del flags[position : position + 2]
    run = start("pretrain_gpt.py", *flags).finish(timeout=240)
    assert run.returncode == 0, run.output[-4000:]
    iterations = re.findall(r"communication +(\d+)/ *(\d+) \|", run.output)
    assert iterations == [("1", "3"), ("2", "3"), ("3", "3")]
    assert (tmp_path / "report" / "report.md").exists()


def test_the_reports_loss_is_the_mean_of_a_log_interval(tmp_path) -> None:
    """It is the loss of Megatron's own line."""
    run = pretrain(*tiny_flags("--compression-report", str(tmp_path), log_interval="2"), ranks=1)
    losses = run.log("lm loss")
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [2, 4]
    for row in rows:
        assert f"{row['losses']['lm loss']:.6E}" == f"{losses[row['iteration']]:.6E}"
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert summary["peak_memory_bytes"]["resident"] > 10e6
