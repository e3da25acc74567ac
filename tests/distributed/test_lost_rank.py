"""One rank fails: torchrun's summary shows that rank and its error.

It never shows a rank that only lost the connection. torchrun names the rank that failed first by
the times in the ranks' error files; the other rank notices within milliseconds, and its line would
be the earlier one.
"""

import pytest

from tests.distributed.launch import Run, tiny_flags, torchrun

WATCHDOG_SECONDS = 150


def run_that_loses_rank_1(fails_by: str) -> Run:
    """Run two tensor-parallel ranks under torchrun; rank 1 ends in the second iteration or so."""
    flags = tiny_flags(
        "--tensor-model-parallel-size=2",
        "--compression-min-mb=0",
        "--tp-compression=tests.distributed.failing_codec:FailsLate",
        train_iters="1000",
    )
    started = torchrun("pretrain_gpt.py", *flags, processes=2, FAILS_BY=fails_by)
    return started.finish(WATCHDOG_SECONDS)


def root_cause(run: Run) -> str:
    """Return the part of torchrun's summary on the first observed failure."""
    assert run.returncode != 0
    heading = "Root Cause (first observed failure):"
    assert heading in run.output, run.output[-3000:]
    return run.output.partition(heading)[2]


@pytest.mark.parametrize(
    ("fails_by", "cause"),
    [
        ("exception", "RuntimeError: boom on rank 1 ("),
        ("exit", "sys.exit(3)"),
        ("signal", "Signal 9 (SIGKILL)"),
    ],
)
def test_the_rank_that_failed_is_the_root_cause(fails_by: str, cause: str) -> None:
    """The summary has its exception, its exit, or the signal that ended it."""
    run = run_that_loses_rank_1(fails_by)
    summary = root_cause(run)
    assert "iteration " in run.output, "it failed before the first iteration"
    assert "rank      : 1 (local_rank: 1)" in summary, run.output[-3000:]
    assert cause in summary, run.output[-3000:]
    assert "lost the connection" not in summary
