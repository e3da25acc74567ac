"""A run that only evaluates, with its training command's --dp-compression."""

from tests.distributed.forked import pretrain
from tests.distributed.launch import tiny_flags


def test_skip_train(tmp_path) -> None:
    """It gives the uncompressed run's losses, and says that nothing is there to compress."""
    words = "--bf16 --use-distributed-optimizer --skip-train --eval-iters 2"
    runs = [
        pretrain(*tiny_flags(*words.split(), *more.split()), ranks=2, directory=tmp_path)
        for more in ("", "--dp-compression tagc sdp4bit")
    ]
    assert "--dp-compression has nothing to compress" in runs[1].output
    losses = [[line for line in run.output.splitlines() if "validation loss" in line] for run in runs]
    assert losses[0] == losses[1] and losses[0], losses
