"""The hooks into DDP and the distributed optimizer: an exact codec changes no bit.

Any codec serves, and what is not compressed is Megatron's own.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.compression.communication.work import Work
from tests.distributed.launch import pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, batch_of, same_everywhere, start, train

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
    return results


def test_an_exact_codec_changes_nothing() -> None:
    """Two ranks, whose sums have one order, have the weights' bits of a run without hooks."""
    for results in spawn(identity_worker, 2):
        for name, (plain, hooked, groups) in results.items():
            assert plain == hooked, name
            assert groups > 2 or name == "no overlap", "several buckets"


def codecs_worker(rank: int, world_size: int) -> None:
    start(rank)
    _, exact = train(rank, Setup(), 8)
    for name, setup in CODECS.items():
        training, losses = train(rank, setup, 8)
        assert same_everywhere(training.digest()), name
        assert ("compression" in setup.settings) == ("compressed" in training.kinds()), name
        assert ("weights" in setup.settings) == ("compressed" in training.kinds("dp.weight")), name
        near = abs(losses[-1] - exact[-1]) < 0.1
        assert near and losses[-1] < losses[0] - 0.4, (name, losses, exact)


def test_any_codec_serves() -> None:
    """On gradients and on weights: it learns, and replicas stay alike."""
    spawn(codecs_worker, 2)


def warm_up_worker(rank: int, world_size: int) -> None:
    start(rank)
    setup = Setup(settings={"compression": "int4", "weights": "int4"}, start_iteration=2)
    for iterations in (2, 3):
        plain, _ = train(rank, Setup(), iterations)
        warm, _ = train(rank, setup, iterations)
        started = iterations == 3
        assert (warm.digest() == plain.digest()) != started
        for traffic in ("dp.gradient", "dp.weight"):
            kinds = warm.kinds(traffic) - {"exact"}  # before the first step nothing has changed
            assert kinds == ({"warmup", "compressed"} if started else {"warmup"}), (traffic, kinds)


def test_warm_up() -> None:
    """Two iterations are Megatron's own, weights too; the third is compressed."""
    spawn(warm_up_worker, 2)


def small_groups_worker(rank: int, world_size: int) -> None:
    start(rank)
    sizes = [
        sum(bucket.grad_data.nbytes for bucket in group.buckets) for group in Training(rank).groups
    ]
    weight_sizes = [size // 2 for size in sizes]  # bf16, the gradients are fp32
    for traffic, bounds in (("dp.gradient", sizes), ("dp.weight", weight_sizes)):
        between = (min(bounds) + max(bounds)) / 2
        settings = {"compression": "int8", "weights": "int8", "min_mb": between / 2**20}
        training, _ = train(rank, Setup(settings=settings), 1)
        assert training.kinds(traffic) - {"exact"} == {"small", "compressed"}, traffic
        saved = sum(row["plain_bytes"] for row in training.rows if is_large(row, traffic))
        large = sum(size for size in bounds if size >= between)
        # half of a buffer is what one of two ranks sends
        assert saved == large // 2, traffic


def is_large(row: dict, traffic: str) -> bool:
    """Return true if a row of the ledger counts what compressed messages stand for."""
    return row["traffic"] == traffic and row["kind"] == "compressed"


def test_groups_under_the_threshold_go_uncompressed() -> None:
    """The uncompressed size of the whole bucket group counts, of gradients and of weights."""
    spawn(small_groups_worker, 2)


def forced_worker(rank: int, world_size: int) -> None:
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    start(rank)
    gradients = []
    for settings in ({}, {"compression": "int8"}):
        training = Training(rank, Setup(overlap=False, settings=settings))
        training.ddp.zero_grad_buffer()
        training.ddp(**batch_of(0, rank)).float().mean().backward()
        finalize_model_grads([training.ddp], force_all_reduce=True)
        buckets = [bucket.grad_data for group in training.groups for bucket in group.buckets]
        gradients.append(torch.cat(buckets))
    assert training.kinds() == {"exact"}
    assert torch.equal(*gradients)


def test_an_iteration_that_saves_its_gradients_is_exact() -> None:
    """--save-wgrads-interval: Megatron all-reduces them in whole, also with a codec."""
    spawn(forced_worker, 2)


WRITES = {
    "in place": lambda parameter, saved: parameter.copy_(saved),
    "past torch's version counters": lambda parameter, saved: parameter.data.copy_(saved),
}


def rollback_worker(rank: int, world_size: int, weights: str, write: str) -> int:
    """Return the number of parameters that are not the saved ones, after the next gather."""
    start(rank)
    training = Training(rank, Setup(settings={"compression": "int8", "weights": weights}))
    training.step()
    training.settle()
    saved = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.step()  # its update waits to be gathered at the next forward pass
    with torch.no_grad():
        for parameter, values in zip(training.model.parameters(), saved, strict=True):
            WRITES[write](parameter, values)
    training.optimizer.reload_model_params()
    training.settle()
    pairs = zip(training.model.parameters(), saved, strict=True)
    different = sum(not torch.equal(parameter, values) for parameter, values in pairs)
    training.step()
    training.settle()
    assert same_everywhere(training.digest()), "replicas after the next step"
    return different


@pytest.mark.parametrize("weights", ["int8", "sdp4bit", "lossless", "none"])
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_before_the_next_forward_pass_stay(weights: str, write: str) -> None:
    """Under --overlap-param-gather an update waits, and going back to saved weights undoes it."""
    assert spawn(rollback_worker, 2, weights, write) == [0, 0]


def two_steps_worker(rank: int, world_size: int) -> None:
    start(rank)
    training = Training(rank, Setup(settings={"compression": "int8", "weights": "int8"}))
    training.step()
    training.optimizer.step()
    training.settle()
    assert same_everywhere(training.digest())


def test_two_steps_without_a_forward_pass() -> None:
    """The first one's update is gathered before the second is encoded: replicas stay alike."""
    spawn(two_steps_worker, 2)


def written_misfit_worker(rank: int, world_size: int) -> None:
    start(rank)
    training = Training(rank, Setup(settings={"weights": "lossless"}))
    training.step()
    with torch.no_grad():
        for parameter in training.model.parameters():
            exponents = torch.arange(parameter.numel()).view(parameter.shape) % 50
            parameter.copy_(2.0**-exponents)
    training.settle()
    with pytest.raises(RuntimeError, match=r"call start_param_sync\(force_sync=True\)"):
        training.step()


def test_written_weights_that_do_not_fit_are_no_silent_zeros() -> None:
    """Lossless: the next step ends the run, and says what to call before writing weights."""
    spawn(written_misfit_worker, 2)


def test_experts_do_not_move_dense_reductions_on() -> None:
    """Second exchanges of a kind start in its buckets' order, whatever the other kind does."""
    started = []

    def reduction(name: str) -> Work:
        def second_exchange() -> Work:
            started.append(name)
            return Work(None)

        return Work(None, second_exchange, exchanges=2)

    from megatron.compression.communication.work import InFlight

    dense = InFlight()
    experts = InFlight()
    dense.add(reduction("dense 0"))
    dense.add(reduction("dense 1"))
    for number in range(3):
        experts.add(reduction(f"expert {number}"))
    assert started == ["expert 0"]
    dense.add(reduction("dense 2"))
    assert started == ["expert 0", "dense 0"]


def nodes_worker(rank: int, world_size: int, node_size: int) -> None:
    """Compare trainings up to the order of sums, with and without the distributed optimizer."""
    start(rank)
    for setup in (Setup(), Setup(distributed_optimizer=False)):
        _, losses = train(rank, setup, 3)
        hooked, same = train(rank, replace(setup, settings={**EXACT, "node_size": node_size}), 3)
        torch.testing.assert_close(same, losses, rtol=2e-2, atol=2e-2)
        assert same_everywhere(hooked.digest())


def test_skip_train() -> None:
    """An evaluation gives the uncompressed run's losses, and logs that nothing is compressed."""
    words = "--bf16 --use-distributed-optimizer --skip-train --eval-iters 2"
    codecs = ("", "--dp-compression tagc sdp4bit")
    runs = [pretrain(*tiny_flags(*words.split(), *more.split())) for more in codecs]
    assert "--dp-compression has nothing to compress" in runs[1].output
    losses = [
        [line for line in run.output.splitlines() if "validation loss" in line] for run in runs
    ]
    assert losses[0] == losses[1] and losses[0], losses


# megatron-core 0.20 has its DDP mark parameters with a callback that publishes their bucket group.

READY = "_ensure_param_ready_callback"
"""Its name there: ``megatron.core.utils.PARAM_READY_CALLBACK_ATTR``."""


class ReadyCallback:
    """Stands in for its DDP's callback: what it asks a bucket group, and what it calls."""

    def __init__(self, ddp: DistributedDataParallel, group) -> None:
        self.ddp = weakref.ref(ddp)
        self.group = weakref.ref(group)
        self.calls = 0

    def __call__(self) -> None:
        group = self.group()
        if group.param_gather_dispatched and group.param_gather_handle is None:
            return
        self.calls += 1
        # The hooks of the model's modules are there, so the next group's gather may start.
        assert self.ddp().remove_forward_pre_hook_handles
        group.finish_param_sync(skip_next_bucket_dispatch=False)


class MarkingDDP(DistributedDataParallel):
    """megatron-core's DDP as 0.20 has it: it marks parameters before anything is attached."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for group in self.bucket_groups:
            callback = ReadyCallback(self, group)
            for bucket in group.buckets:
                for parameter in bucket.params_list:
                    setattr(parameter, READY, callback)


def publish(training: Training) -> int:
    """Call each callback of a model's parameters once; return how many had something to do."""
    callbacks = {id(c): c for c in (getattr(p, READY) for p in training.model.parameters())}
    for callback in callbacks.values():
        callback()
    return sum(callback.calls for callback in callbacks.values())


def published_worker(rank: int, world_size: int, settings: dict) -> None:
    """Two runs alike: the weights of one are read through its callbacks, before its forward pass."""
    start(rank)
    expected, losses = train(rank, Setup(settings=settings), ITERATIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.distributed.DistributedDataParallel", MarkingDDP)
        training = Training(rank, Setup(settings=settings))
    if settings:
        assert "compressed" in expected.kinds("dp.weight")
    for number in range(ITERATIONS):
        loss, _ = training.step()
        assert loss == losses[number]
        calls = publish(training)
        assert calls == (number + 1) * len(training.groups), "each bucket group is published"
    assert training.digest() == expected.digest()
    assert training.kinds("dp.weight") == expected.kinds("dp.weight")


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_callbacks_of_parameters_publish_gathered_weights(weights: str) -> None:
    """Of megatron-core 0.20's DDP, made before bucket groups are attached: what is read is the last step's."""
    settings = {} if weights == "none" else {"compression": "int8", "weights": weights}
    spawn(published_worker, 2, settings)
