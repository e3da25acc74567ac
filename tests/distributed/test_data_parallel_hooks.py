"""The hooks into DDP and the distributed optimizer: with an exact codec nothing changes, to the bit."""

from dataclasses import replace

import torch

from megatron.compression.data_parallel.codecs import exact_codecs
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, same_everywhere, start, train

ITERATIONS = 3
# The exact codec of a settings object that is off would not be bound: any enabled settings do.
ENABLED = {"dp_compression": "sdp4bit", "gradient_alltoall_pipeline": 3, "dp_communicators": 2}
SETUPS = {
    "overlap": Setup(),
    "accumulation, bf16 gradients": Setup(micro_batches=2, fp32_gradients=False),
    "no overlap": Setup(overlap=False),
    "plain DDP": Setup(distributed_optimizer=False),
    "fp32 weights": Setup(dtype=torch.float32),
}


def identity_worker(rank: int, world_size: int) -> dict[str, tuple[str, str, int]]:
    """Digests of the weights without and with hooks, and the number of bucket groups, by set-up."""
    start(rank)
    results = {}
    for name, setup in SETUPS.items():
        plain, losses = train(rank, setup, ITERATIONS)
        hooked, same = train(
            rank, replace(setup, settings=ENABLED, codecs=lambda: exact_codecs(3)), ITERATIONS
        )
        kinds = {(row["traffic"], row["kind"]) for row in hooked.runtime.ledger.rows()}
        assert ("dp.gradient", "compressed") in kinds
        assert ("dp.gradient", "off") not in kinds, "every reduction went through the codec"
        with_weights = setup.distributed_optimizer and setup.dtype != torch.float32
        assert (("dp.weight", "compressed") in kinds) == with_weights
        assert losses == same
        results[name] = (plain.digest(), hooked.digest(), len(hooked.groups))
    return results


def test_an_exact_codec_changes_nothing() -> None:
    """Two ranks, where the order of the sum cannot matter: the same weights bit for bit as without hooks."""
    for results in spawn(identity_worker, 2):
        for name, (plain, hooked, groups) in results.items():
            assert plain == hooked, name
            assert groups > 2 or name == "no overlap", "several buckets"


def nodes_worker(rank: int, node_size: int) -> None:
    """With and without the distributed optimizer: the same training up to the order of sums."""
    for setup in (Setup(), Setup(distributed_optimizer=False)):
        _, losses = train(rank, setup, 3)
        settings = {**ENABLED, "dp_intra_node_size": node_size}
        hooked, same = train(rank, replace(setup, settings=settings, codecs=exact_codecs), 3)
        torch.testing.assert_close(same, losses, rtol=2e-2, atol=2e-2)
        assert same_everywhere(hooked.digest())
