"""Whole runs under SDP4Bit: a resume is bitwise, and goes on at another data-parallel size."""

import shutil

from tests.distributed.forked import pretrain
from tests.distributed.launch import tiny_flags

FLAGS = (
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--ddp-bucket-size", "10000", "--dp-compression", "sdp4bit", "--dp-error-feedback", "int8:average=0.5"),
)


def _run(tmp_path, ranks: int, iterations: int, *flags: str, micro_batch: str = "2"):
    tiny = tiny_flags(*FLAGS, *flags, train_iters=str(iterations), micro_batch_size=micro_batch)
    return pretrain(*tiny, ranks=ranks, directory=tmp_path)


def test_resume(tmp_path) -> None:
    """Six iterations at once, and four and two; then two on four ranks instead of two."""
    saved = tmp_path / "checkpoints"
    whole = _run(tmp_path, 2, 6, "--save", str(saved), "--save-interval", "4")
    assert (
        "data parallelism uses sdp4bit: weight changes sdp4bit:intra=4,group=2048,hadamard=off"
        in whole.output
    )
    shutil.rmtree(saved / "iter_0000006")
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = _run(tmp_path, 2, 6, "--load", str(saved))
    assert "every rank took back its own" in resumed.output
    assert [rank.parameters for rank in resumed.ranks] == [rank.parameters for rank in whole.ranks]
    assert resumed.ranks[0].parameters == resumed.ranks[1].parameters, "replicas"
    assert resumed.losses[6] == whole.losses[6]

    alone = _run(tmp_path, 1, 6, "--load", str(saved))
    assert "the checkpoint's error feedback is dropped: this run goes on on one" in alone.output

    wider = _run(tmp_path, 4, 6, "--load", str(saved), micro_batch="1")
    assert "the sum over the 2 ranks that saved it was spread over 4 ranks" in wider.output
    assert len({str(rank.parameters) for rank in wider.ranks}) == 1, "replicas"
    assert abs(wider.losses[6] - whole.losses[6]) < 0.02
