"""Megatron's own loop on CPU tensors: runs agree to the last digit, the report with Megatron's own line."""

import json
import os
import re
import signal

from tests.distributed.launch import go_back_to, pretrain, start, tiny_flags
from tests.distributed.test_matrix import check_copies

TENSOR = ("--tensor-model-parallel-size", "2")


def test_resume_is_bitwise(tmp_path):
    """With dropout: the resumed run must draw the masks that the uninterrupted one drew."""
    flags = tiny_flags(*TENSOR, "--bf16", "--hidden-dropout", "0.3", "--ckpt-format", "torch")
    whole = pretrain(*flags, "--save", str(tmp_path), "--save-interval", "2")
    check_copies(whole)  # they are alike only where both ranks drop the same activations
    go_back_to(2, tmp_path)
    resumed = pretrain(*flags, "--load", str(tmp_path))

    losses = whole.losses
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    assert resumed.losses == {3: losses[3], 4: losses[4]}
    norms = whole.log("grad norm")
    assert resumed.log("grad norm") == {3: norms[3], 4: norms[4]}
    assert "Traceback" not in whole.output + resumed.output


def test_a_signal_saves_and_ends_the_run(tmp_path):
    """With workers of the data loaders, which have Megatron's handler of the signal too."""
    flags = (
        f"--exit-signal-handler --num-workers 2 --save {tmp_path} --save-interval 1000000".split()
    )
    run = start("pretrain_gpt.py", *tiny_flags(*flags, train_iters="1000000"), processes=2)
    run.wait_for("iteration        3/", timeout=200)
    os.kill(run.processes[0].pid, signal.SIGTERM)
    run.wait_for("exiting program after receiving SIGTERM", timeout=60)
    ended = run.finish(timeout=60)
    assert ended.returncode == 0, ended.output[-3000:]
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) >= 3
    assert "Traceback" not in ended.output


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


def test_figures_agree_with_megatrons_own_line(tmp_path) -> None:
    """The loss is the mean of a log interval."""
    run = pretrain(*tiny_flags("--compression-report", str(tmp_path), log_interval="2"), ranks=1)
    losses = run.log("lm loss")
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [2, 4]
    for row in rows:
        assert f"{row['losses']['lm loss']:.6E}" == f"{losses[row['iteration']]:.6E}"
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert summary["peak_memory_bytes"]["resident"] > 10e6
