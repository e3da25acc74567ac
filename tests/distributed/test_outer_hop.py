"""The hop between instances of the distributed optimizer: values, bytes, replicas."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.compression.communication.audit import BackendAudit
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, device_of, same_everywhere, start

ITERATIONS = 3
OUTER = Setup(instances=2)
SEQUENTIAL = replace(OUTER, overlap=False)
SETUPS = {
    "none:outer=int8": (OUTER, 0.52, 1e-3),
    "int8:outer=int4": (OUTER, 0.27, 1e-3),
    "sdp4bit": (
        replace(SEQUENTIAL, micro_batches=2),
        0.27,
        1,
    ),  # other micro-batches, so another loss
    "sdp4bit:outer=none": (OUTER, None, 1),
    "none:outer=lossless": (replace(OUTER, fp32_gradients=False), 1.9, 1e-3),
}
"""Setup, largest share of a bf16 sum's bytes (Megatron's are fp32 here), largest change of loss."""


def sent(
    training: Training, traffic: str = "dp.outer", link: str | None = "inter"
) -> tuple[int, int]:
    """Bytes this rank has sent over a link, and would have sent uncompressed."""
    rows = [
        row for row in training.rows if row["traffic"] == traffic and link in (None, row["link"])
    ]
    return sum(row["sent_bytes"] for row in rows), sum(row["plain_bytes"] for row in rows)


def run(
    rank: int, setup: Setup, spec: str | None = None, node_size: int = 2
) -> tuple[Training, float]:
    """Train; each instance counts as a node. Return it and the mean loss over ranks and iterations.

    In the first iteration the ledger is compared with what the backend was given.
    """
    if spec is not None:
        setup = replace(setup, settings={"compression": spec, "node_size": node_size})
    training = Training(rank, setup)
    audit = BackendAudit(training.run.ledger, lambda: {"data parallel": [dist.group.WORLD]})
    audit.start()
    losses = [training.step()[0]]
    assert audit.finish() == []
    losses += [training.step()[0] for _ in range(ITERATIONS - 1)]
    training.settle()
    loss = torch.tensor(sum(losses) / ITERATIONS, dtype=torch.float64, device=device_of(rank))
    dist.all_reduce(loss)
    assert same_everywhere(training.digest())
    return training, float(loss) / dist.get_world_size()


def exact_worker(rank: int, world_size: int) -> None:
    start(rank, instances=2)
    for setup in (SEQUENTIAL, OUTER):
        plain, loss = run(rank, setup)
        exact, same = run(rank, setup, "none:outer=identity")
        assert (exact.digest(), same) == (plain.digest(), loss)
        assert plain.kinds("dp.outer") == {"off"}


def test_an_exact_codec_between_instances_changes_no_bit() -> None:
    """2 instances of 2 ranks, with and without overlap."""
    spawn(exact_worker, 4)


def instances_worker(rank: int, world_size: int, spec: str) -> tuple:
    """Return bytes sent, bytes uncompressed, the distance of the losses, and the reasons."""
    start(rank, instances=2)
    setup = SETUPS[spec][0]
    _, loss = run(rank, OUTER)
    compressed, compressed_loss = run(rank, setup, spec)
    assert sent(compressed, link="intra") == (0, 0)
    assert sent(compressed, "dp.gradient") == (0, 0), "the inner hop stays inside its instance"
    return sent(compressed), abs(compressed_loss / loss - 1), compressed.kinds("dp.outer")


@pytest.mark.parametrize("spec", SETUPS)
def test_bytes_between_instances_and_loss(spec: str) -> None:
    """2 instances of 2 ranks: what the outer hop sends, and a loss near the uncompressed one."""
    _, most, difference = SETUPS[spec]
    for (now, before), differs, kinds in spawn(instances_worker, 4, spec):
        assert differs < difference and before > 0
        assert now == before if most is None else now <= most * before / 2
        assert kinds - {"overflow"} == {"off" if most is None else "compressed"}


def repeated_worker(rank: int, world_size: int) -> None:
    start(rank, instances=2)
    digests = [run(rank, SETUPS["sdp4bit"][0], "sdp4bit")[0].digest() for _ in range(2)]
    assert digests[0] == digests[1]


def test_the_same_bits_in_every_run() -> None:
    """Sums do not depend on timing."""
    spawn(repeated_worker, 4)


def one_rank_worker(rank: int, world_size: int) -> float:
    """The share of the uncompressed bytes that is sent."""
    start(rank, instances=2)
    plain, loss = run(rank, OUTER)
    compressed, compressed_loss = run(rank, OUTER, "int8", node_size=1)
    assert {row["traffic"] for row in compressed.rows if row["sent_bytes"]} == {"dp.outer"}
    now, before = sent(compressed)
    plain_now, _ = sent(plain, link=None)
    assert before == plain_now
    assert abs(compressed_loss / loss - 1) < 1e-3
    return now / before


def test_instances_of_one_rank() -> None:
    """2 instances of 1 rank: the outer hop is all there is."""
    for ratio in spawn(one_rank_worker, 2):
        assert ratio <= 0.52 / 2
