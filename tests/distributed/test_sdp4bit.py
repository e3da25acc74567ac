"""SDP4Bit and PowerSGD in training: replicas, bytes of the backend, damaged gradients."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, same_everywhere, start, train
from tests.distributed.transport_audit import TransportAudit, total_of

ON = {"compression": "sdp4bit"}


def replica_worker(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Train with and without the distributed optimizer, comparing weights on the way.

    Returns:
        First and last loss of each training.
    """
    start(rank)
    outcomes = []
    # Three ranks on nodes of two have no two hops; four have.
    plain = Setup(settings={**ON, "node_size": 2}, distributed_optimizer=False)
    for setup, iterations in ((Setup(settings=ON), 50), (plain, 10)):
        training = Training(rank, setup)
        losses = []
        for iteration in range(iterations):
            losses.append(training.step()[0])
            if iteration % 10 == 9:
                training.settle()
                assert same_everywhere(training.digest()), (setup, iteration)
        outcomes.append((losses[0], losses[-1]))
        topology = training.groups[0].plan.topology
        assert topology.regular == (world_size == 4 or "node_size" not in setup.settings)
        assert training.kinds() == {"compressed"}
    return outcomes


def test_replicas_stay_identical() -> None:
    """They do with the distributed optimizer and overlap for 50 iterations, and under plain DDP."""
    for outcomes in spawn(replica_worker, 3):
        (first, last), (plain_first, plain_last) = outcomes
        assert last < first - 1.0 and plain_last < plain_first - 0.5, "it must really have trained"


def bytes_worker(rank: int, world_size: int, node_size: int) -> dict:
    """An iteration's ledger, checked against what c10d was given; and the values in the buckets."""
    settings = {**ON, "node_size": node_size}
    results = {}
    for name, changes in {
        "sharded": dict(bucket_size=None),
        "plain": dict(distributed_optimizer=False, overlap=False),
    }.items():
        training = Training(rank, Setup(settings=settings, start_iteration=1, **changes))
        training.step()
        training.settle()
        assert training.kinds() == {"warmup"}
        training.run.ledger.tallies.clear()
        with TransportAudit() as audit:
            training.step()
            training.settle()
        sent = dict(audit.sent)
        assert sent.pop("all_reduce") < 100, "the gradient norm's"
        assert total_of(training.rows) == sent
        values = sum(b.grad_data.numel() for group in training.groups for b in group.buckets)
        results[name] = {"values": values, "rows": training.rows}
    return results


def started_bytes_worker(rank: int, world_size: int, node_size: int) -> dict:
    """``bytes_worker`` in ranks that have not begun."""
    start(rank)
    return bytes_worker(rank, world_size, node_size)


def _sent(rows: list[dict], channel: str, link: str, operation: str) -> int:
    key = dict(traffic=channel, link=link, operation=operation).items()
    return sum(row["sent_bytes"] for row in rows if key <= row.items())


def check_bytes(results: dict) -> None:
    """Bits a value of two nodes of two ranks."""
    rows = results["sharded"]["rows"]
    values = results["sharded"]["values"]
    # Inside a node each rank sends half of all values, between nodes a quarter (half of its half).
    assert 8.25 <= 8 * _sent(rows, "dp.gradient", "intra", "all_to_all") / (values / 2) <= 8.3
    assert 4.25 <= 8 * _sent(rows, "dp.gradient", "inter", "all_to_all") / (values / 4) <= 4.3
    weights = sum(_sent(rows, "dp.weight", link, "all_gather") for link in ("intra", "inter"))
    assert 4.0 < 8 * weights / (values * 3 / 4) <= 4.05
    plain = sum(row["plain_bytes"] for row in rows if row["traffic"] == "dp.gradient")
    assert plain == values * 4 * 3 // 4, "what a fp32 reduce-scatter would have sent"
    rows = results["plain"]["rows"]
    values = results["plain"]["values"]
    gathered = sum(_sent(rows, "dp.gradient", link, "all_gather") for link in ("intra", "inter"))
    assert 4.25 <= 8 * gathered / (values * 3 / 4) <= 4.4


def _damage(model: torch.nn.Module) -> None:
    """Make a row of one gradient of this rank infinite, once."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient.index_fill(0, torch.tensor([3]), float("inf"))

    handle = model.decoder.layers[0].mlp.linear_fc1.weight.register_hook(spoil)


DAMAGED = {
    "sdp4bit, fp16": Setup(settings=ON, dtype=torch.float16),
    "sdp4bit, bf16": Setup(settings=ON),
    "tagc, packed": Setup(
        settings={"compression": "tagc", "weights": "sdp4bit:intra=4,group=2048,hadamard=off"}
    ),
    "tagc, sketches": Setup(
        settings={"compression": "tagc:wire=sketch"}, distributed_optimizer=False
    ),
}


def _damaged_worker(rank: int, world_size: int, name: str) -> None:
    from megatron.compression.tagc import parts

    start(rank)
    parts.SMALLEST = 2048
    _check_damaged(rank, replace(DAMAGED[name], loss_scale=128.0, bucket_size=50_000))


def _check_damaged(rank: int, setup: Setup) -> None:
    training = Training(rank, setup)
    reference = Training(rank, replace(setup, settings={}))
    for _ in range(2):
        training.step()
        reference.step()
    training.settle()
    before = training.digest()
    hook = _damage if rank == 1 else None
    assert not training.step(hook)[1], "the step is skipped, on every rank"
    assert not reference.step(hook)[1], "so it is without compression"
    training.settle()
    assert training.digest() == before, "the weight difference of a skipped step is nothing"
    for group in training.groups:
        for sync in group.plan.gradient_syncs:
            _check_memory(sync)
    assert training.step()[1], "the next one counts again"
    training.settle()
    assert training.digest() != before
    assert same_everywhere(training.digest())


def _check_memory(sync) -> None:
    """Assert that what a bucket remembers is finite, and something."""
    for memory in sync.state().values():
        assert memory.isfinite().all()
        assert memory.any()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_gradient_skips_the_step(name: str) -> None:
    """One rank's infinite value skips the step as without compression, and poisons nothing.

    It does in fp16, and in bf16 with a loss scale: without one Megatron ends the run before the
    reduction.
    """
    spawn(_damaged_worker, 2, name)


POWERSGD = Setup(settings={"compression": "examples.powersgd:PowerSGD:rank=8"}, bucket_size=50_000)
ITERATIONS = 30


PLAIN_POWERSGD = replace(
    POWERSGD, distributed_optimizer=False, fp32_gradients=False, micro_batches=2
)


def powersgd_worker(rank: int, world_size: int) -> None:
    start(rank)
    _, exact = train(rank, replace(POWERSGD, settings={}), ITERATIONS)
    for setup, iterations in ((POWERSGD, ITERATIONS), (PLAIN_POWERSGD, 10)):
        training, losses = train(rank, setup, iterations)
        assert same_everywhere(training.digest())
        assert training.kinds() == {"compressed", "excluded"}
        if setup is POWERSGD:  # the same batches; Adam is slower to start on what comes late
            assert _fall(losses) > 0.75 * _fall(exact) > 1.5, (losses, exact)
        assert losses[-1] < losses[0] - 0.4


def test_powersgd_learns() -> None:
    """examples/powersgd.py trains with the distributed optimizer and without."""
    spawn(powersgd_worker, 2)


def _fall(losses: list[float]) -> float:
    return losses[0] - sum(losses[-5:]) / 5


def powersgd_bytes_worker(rank: int, world_size: int) -> None:
    start(rank)
    training = Training(rank, replace(POWERSGD, distributed_optimizer=False, overlap=False))
    with TransportAudit() as audit:
        training.step()
    counted = total_of(training.rows)["all_reduce"]
    assert 0 <= audit.sent["all_reduce"] - counted < 100, "the gradient norm's, a few bytes"
    sent = sum(row["sent_bytes"] for row in training.rows if row["kind"] == "compressed")
    plain = sum(row["plain_bytes"] for row in training.rows if row["kind"] == "compressed")
    assert 0.15 < sent / plain < 0.2


def test_powersgd_is_counted() -> None:
    """The ledger has what c10d was given: two all-reduces of thin matrices, and one of vectors."""
    spawn(powersgd_bytes_worker, 2)


def powersgd_state_worker(rank: int, world_size: int) -> None:
    start(rank)
    training, _ = train(rank, PLAIN_POWERSGD, 3)
    for sync, bucket in training.gradients.syncs:
        states = []
        results = []
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


def test_powersgd_keeps_its_state_and_is_not_poisoned() -> None:
    """A state that was taken back gives the same bits; an infinity shows and poisons nothing."""
    spawn(powersgd_state_worker, 2)
