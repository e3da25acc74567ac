"""The hooks into DDP and the distributed optimizer: with an exact codec nothing changes, to the bit.

Any codec serves, and what is not compressed is Megatron's own.
"""

from dataclasses import replace

import torch

from tests.distributed.launch import pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, same_everywhere, start, train

ITERATIONS = 3
EXACT = {"compression": "identity", "weights": "identity"}
SETUPS = {
    "overlap": Setup(),
    "accumulation, bf16 gradients": Setup(micro_batches=2, fp32_gradients=False),
    "no overlap": Setup(overlap=False),
    "plain DDP": Setup(distributed_optimizer=False),
    "fp32 weights": Setup(dtype=torch.float32),
}
CODECS = {
    "taco": Setup(settings={"compression": "taco", "weights": "taco"}),
    "sdp4bit, weights in int8": Setup(
        settings={"compression": "sdp4bit:intra=4", "weights": "int8"}
    ),
    "int8, weights alone": Setup(settings={"weights": "int8"}),
    "two codecs, plain DDP": Setup(
        settings={"compression": "int5/int6"}, distributed_optimizer=False
    ),
}


def identity_worker(rank: int, world_size: int) -> dict[str, tuple[str, str, int]]:
    """Digests of the weights without and with hooks, and the number of bucket groups, by set-up."""
    start(rank)
    results = {}
    for name, setup in SETUPS.items():
        plain, losses = train(rank, setup, ITERATIONS)
        hooked, same = train(rank, replace(setup, settings=EXACT, communicators=2), ITERATIONS)
        assert hooked.kinds() == {"compressed"}, "every reduction went through the codec"
        with_weights = setup.distributed_optimizer and setup.dtype != torch.float32
        assert ("compressed" in hooked.kinds("dp.weight")) == with_weights
        assert losses == same
        results[name] = (plain.digest(), hooked.digest(), len(hooked.groups))
    _codecs(rank)
    _warm_up(rank)
    return results


def _codecs(rank: int) -> None:
    """Any codec, on gradients and on weights: it learns, and replicas stay alike."""
    _, exact = train(rank, Setup(), 8)
    for name, setup in CODECS.items():
        training, losses = train(rank, setup, 8)
        assert same_everywhere(training.digest()), name
        assert ("compression" in setup.settings) == ("compressed" in training.kinds()), name
        assert ("weights" in setup.settings) == ("compressed" in training.kinds("dp.weight")), name
        assert abs(losses[-1] - exact[-1]) < 0.1 and losses[-1] < losses[0] - 0.4, (
            name,
            losses,
            exact,
        )


def _warm_up(rank: int) -> None:
    """Two iterations are Megatron's own, weights too; the third is compressed."""
    setup = Setup(settings={"compression": "int4", "weights": "int4"}, start_iteration=2)
    for iterations in (2, 3):
        plain, _ = train(rank, Setup(), iterations)
        warm, _ = train(rank, setup, iterations)
        started = iterations == 3
        assert (warm.digest() == plain.digest()) != started
        for traffic in ("dp.gradient", "dp.weight"):
            kinds = warm.kinds(traffic) - {"exact"}  # before the first step nothing has changed
            assert kinds == ({"warmup", "compressed"} if started else {"warmup"}), (traffic, kinds)


def test_an_exact_codec_changes_nothing_and_any_codec_serves() -> None:
    """Two ranks, where the order of the sum cannot matter: the same weights bit for bit as without hooks."""
    for results in spawn(identity_worker, 2):
        for name, (plain, hooked, groups) in results.items():
            assert plain == hooked, name
            assert groups > 2 or name == "no overlap", "several buckets"


def nodes_worker(rank: int, node_size: int) -> None:
    """With and without the distributed optimizer: the same training up to the order of sums."""
    for setup in (Setup(), Setup(distributed_optimizer=False)):
        _, losses = train(rank, setup, 3)
        hooked, same = train(rank, replace(setup, settings={**EXACT, "node_size": node_size}), 3)
        torch.testing.assert_close(same, losses, rtol=2e-2, atol=2e-2)
        assert same_everywhere(hooked.digest())


def test_skip_train() -> None:
    """An evaluation gives the uncompressed run's losses, and says that nothing is there to compress."""
    words = "--bf16 --use-distributed-optimizer --skip-train --eval-iters 2"
    codecs = ("", "--dp-compression tagc sdp4bit")
    runs = [pretrain(*tiny_flags(*words.split(), *more.split())) for more in codecs]
    assert "--dp-compression has nothing to compress" in runs[1].output
    losses = [
        [line for line in run.output.splitlines() if "validation loss" in line] for run in runs
    ]
    assert losses[0] == losses[1] and losses[0], losses
