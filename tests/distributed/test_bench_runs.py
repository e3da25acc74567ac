"""The benchmarks of scripts/ as a user starts them, of tiny models on two CPU processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import REPO, environment

TINY = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --vocab-size 256"


def run(script: str, flags: str, rows: Path) -> tuple[dict[str, dict], str]:
    """Run a script and return its rows, by setting, and what it printed."""
    words = [sys.executable, "-W", "ignore", REPO / "scripts" / script, *flags.split()]
    words += ["--regimes", "nvlink", "--codecs", "none", "int8", "--json", rows, *TINY.split()]
    done = subprocess.run(words, env=environment(), cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {row["codec"]: row for row in json.loads(rows.read_text())}, done.stdout


@pytest.fixture(scope="module")
def iterations(tmp_path_factory) -> tuple[dict[str, dict], str]:
    """Rows and output of bench_end_to_end.py: two blocks of one run, over two communicators."""
    flags = "--tensor-parallel 2 --iterations 5 --micro-batch-size 2 --micro-batches 2 "
    flags += "--seq-length 64 --max-position-embeddings 64 --communicators 2"
    return run("bench_end_to_end.py", flags, tmp_path_factory.mktemp("bench") / "rows.json")


def test_each_block_compresses_by_its_own_setting(iterations) -> None:
    rows, _ = iterations
    assert list(rows) == ["none", "int8"]
    for traffic in ("tp.forward", "tp.backward"):
        uncompressed = rows["none"]["megabytes"][traffic]
        # 8 bits and the scales, of 16.
        assert 0 < rows["int8"]["megabytes"][traffic] < 0.6 * uncompressed


def test_iterations_behind_the_warm_up_are_timed(iterations) -> None:
    rows, _ = iterations
    for row in rows.values():
        assert row["iterations"] == 2
        assert 0 < row["least"] <= row["milliseconds"] <= row["most"]
        assert 3 < row["last_loss"] < 12


def test_the_table_is_printed(iterations) -> None:
    _, output = iterations
    assert "| nvlink | none | int8 | over torch.distributed (no CUDA device), a share" in output
    assert output.endswith("Communicators of every message: 2.\n")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> tuple[dict[str, dict], str]:
    """Rows and output of bench_prefill.py."""
    flags = "--tensor-parallel 2 --tokens 64"
    return run("bench_prefill.py", flags, tmp_path_factory.mktemp("prefill") / "rows.json")


def test_a_prompt_is_timed_with_and_without_compression(prompts) -> None:
    rows, output = prompts
    assert list(rows) == ["none", "int8"]
    uncompressed = rows["none"]["uncompressed"]
    assert rows["none"]["sent"] == uncompressed > 0
    assert rows["int8"]["uncompressed"] == uncompressed
    assert rows["int8"]["sent"] < 0.6 * uncompressed
    assert "| nvlink | 64 | none | int8 | " in output
