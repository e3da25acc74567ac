"""One rank fails: what torchrun shows last is that rank and why, never a rank that lost the connection to it.

torchrun names the rank that failed first by the times in the ranks' error files; the other rank notices within
milliseconds, and its line would be the earlier one.
"""

import pytest

from tests.distributed.launch import Run, tiny_flags, torchrun

WATCHDOG_SECONDS = 150


def run_that_loses_rank_1(fails_by: str) -> Run:
    """Two tensor-parallel ranks under torchrun, of which rank 1 ends in the second iteration or so."""
    flags = tiny_flags(
        *("--tensor-model-parallel-size", "2", "--compression-min-mb", "0"),
        *("--tp-compression", "tests.distributed.failing_codec:FailsLate"),
        train_iters="1000",
    )
    started = torchrun("pretrain_gpt.py", *flags, processes=2, FAILS_BY=fails_by)
    return started.finish(WATCHDOG_SECONDS)


def root_cause(run: Run) -> str:
    """The part of torchrun's summary on the first observed failure."""
    assert run.returncode != 0
    _, found, summary = run.output.partition("Root Cause (first observed failure):")
    assert found, run.output[-3000:]
    return summary


@pytest.mark.parametrize(
    ("fails_by", "cause"),
    [
        ("exception", "RuntimeError: boom on rank 1 ("),
        ("exit", "sys.exit(3)"),
        ("signal", "Signal 9 (SIGKILL)"),
    ],
)
def test_the_rank_that_failed_is_the_root_cause(fails_by: str, cause: str) -> None:
    """With its exception, its exit, or the signal that ended it."""
    run = run_that_loses_rank_1(fails_by)
    assert "rank      : 1 (local_rank: 1)" in root_cause(run), run.output[-3000:]
    assert cause in root_cause(run), run.output[-3000:]
    assert "lost the connection" not in root_cause(run)
