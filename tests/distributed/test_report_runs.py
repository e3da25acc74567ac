"""Reports of whole runs: the number of iterations, and figures that agree with Megatron's own line."""

import json
import re

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
