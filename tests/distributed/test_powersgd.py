"""A gradient compressor outside the packages (examples/powersgd.py): it learns, and is counted."""

from collections import Counter
from dataclasses import replace

import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, same_everywhere, start, train
from tests.distributed.transport_audit import TransportAudit

NAME = "examples.powersgd:PowerSGD"
SETUP = Setup(settings={"compression": f"{NAME}:rank=8"}, bucket_size=50_000)
ITERATIONS = 30


def training_worker(rank: int, world_size: int) -> None:
    """With and without the distributed optimizer against no compression; then bytes, state, and a NaN."""
    start(rank)
    _, exact = train(rank, replace(SETUP, settings={}), ITERATIONS)
    plain = replace(SETUP, distributed_optimizer=False, fp32_gradients=False, micro_batches=2)
    for setup, iterations in ((SETUP, ITERATIONS), (plain, 10)):
        training, losses = train(rank, setup, iterations)
        assert same_everywhere(training.digest())
        assert training.kinds() == {"compressed", "excluded"}
        if setup is SETUP:  # the same batches; Adam is slower to start on what comes late
            assert _fall(losses) > 0.75 * _fall(exact) > 1.5, (losses, exact)
        assert losses[-1] < losses[0] - 0.4
    _check_bytes(rank)
    _check_state_and_damage(rank, training)


def _fall(losses: list[float]) -> float:
    return losses[0] - sum(losses[-5:]) / 5


def _check_bytes(rank: int) -> None:
    """The ledger has what c10d was given: two all-reduces of thin matrices, and one of vectors."""
    training = Training(rank, replace(SETUP, distributed_optimizer=False, overlap=False))
    with TransportAudit() as audit:
        training.step()
    counted: Counter[str] = Counter()
    for row in training.rows:
        counted[row["operation"]] += row["sent_bytes"]
    assert 0 <= audit.sent["all_reduce"] - counted["all_reduce"] < 100, "the gradient norm's, a few bytes"
    sent = sum(row["sent_bytes"] for row in training.rows if row["kind"] == "compressed")
    plain = sum(row["plain_bytes"] for row in training.rows if row["kind"] == "compressed")
    assert 0.15 < sent / plain < 0.2


def _check_state_and_damage(rank: int, training: Training) -> None:
    """A state that was taken back gives the same bits; an infinity shows and poisons nothing."""
    for sync, bucket in training.gradients.syncs:
        states, results = [], []
        before = {slot: values.clone() for slot, values in sync.state().items()}
        for _ in range(2):
            sync.load_state(before)
            bucket.gradients.copy_(torch.linspace(rank, 1, bucket.numel))
            sync.start().wait()
            results.append(bucket.gradients.clone())
            states.append(sync.state())
        assert torch.equal(*results)
        assert all(torch.equal(states[0][slot], states[1][slot]) for slot in before)
        bucket.gradients.copy_(torch.linspace(rank, 1, bucket.numel))
        if rank == 1:
            bucket.gradients[bucket.spans[0].start] = float("inf")
        sync.start().wait()
        assert not bucket.gradients.isfinite().all(), "on every rank"
        assert all(values.isfinite().all() for values in sync.state().values())
        bucket.gradients.copy_(torch.linspace(rank, 1, bucket.numel))
        sync.start().wait()
        assert bucket.gradients.isfinite().all()


def test_training() -> None:
    spawn(training_worker, 2)
