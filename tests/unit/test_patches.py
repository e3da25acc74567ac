"""Patches refuse unexpected symbols and wrap once."""

import importlib
from types import SimpleNamespace

import pytest

from megatron.compression.patches import PatchError, replace


class Owner:
    """Stands for a megatron-core class."""

    def double(self, value: int) -> int:
        """What is wrapped."""
        return 2 * value


def _plus_one(original):
    return lambda self, value: original(self, value) + 1


def test_replace_wraps_once() -> None:
    """A second replacement wraps the original, not the first replacement."""
    owner = type("Copy", (Owner,), {})
    replace(owner, "double", ("self", "value"), _plus_one)
    assert owner().double(3) == 7
    replace(owner, "double", ("self", "value"), _plus_one)
    assert owner().double(3) == 7
    assert Owner().double(3) == 6


def test_replace_refuses_another_version() -> None:
    """A missing function or parameter fails loudly and changes nothing."""
    owner = type("Copy", (Owner,), {})
    with pytest.raises(PatchError, match="does not exist"):
        replace(owner, "triple", (), _plus_one)
    with pytest.raises(PatchError, match="no parameter factor"):
        replace(owner, "double", ("value", "factor"), _plus_one)
    assert owner().double(3) == 6


def test_megatron_core_has_every_symbol() -> None:
    """All patches fit the installed megatron-core, and the data-parallel ones count what they should."""
    from megatron import host

    host.install()
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import checkpointing, training

    from megatron.compression import patches

    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    owners = [
        (training, "training_log"),
        (training, "evaluate"),
        (training, "evaluate_and_print_results"),
        (_ParamAndGradBucketGroup, "start_grad_sync"),
        (_ParamAndGradBucketGroup, "start_param_sync"),
        (P2PCommunicator, "_communicate"),
        (schedules, "forward_backward_pipelining_without_interleaving"),
        (schedules, "forward_backward_pipelining_with_interleaving"),
        (DistributedOptimizer, "_copy_main_params_to_model_params"),
        (checkpointing, "generate_state_dict"),
        (checkpointing, "_load_base_checkpoint"),
        (finalize_model_grads, "_allreduce_non_tensor_model_parallel_grads"),
        (finalize_model_grads, "_allreduce_word_embedding_grads"),
    ]
    before = [getattr(owner, name) for owner, name in owners]
    try:
        patches.on_training_log(lambda iteration, losses: None)
        patches.around_evaluate(lambda split: None, lambda losses: None)
        patches.on_gradient_sync(lambda *args: None)
        patches.on_parameter_sync(lambda *args: None)
        patches.on_master_copy(lambda optimizer: False)
        patches.around_checkpoint_state(lambda *args: None)
        patches.on_checkpoint_read(lambda *args: None)
        patches.through_pipeline_exchange(lambda *args, **kwargs: None)
        patches.after_schedules(lambda: None)
        patches.on_replicated_gradient_sync(lambda *args: None)
        patches.on_tied_embedding_gradient_sync(lambda *args: None)
        for (owner, name), original in zip(owners, before, strict=True):
            assert getattr(owner, name) is not original
    finally:
        for (owner, name), original in zip(owners, before, strict=True):
            setattr(owner, name, original)


@pytest.mark.parametrize(
    ("distributed_optimizer", "instances", "expected"),
    [
        (False, 1, [("all_reduce", 4000, 4)]),
        (True, 1, [("reduce_scatter", 4000, 4)]),
        (True, 2, [("reduce_scatter", 4000, 2), ("all_reduce", 2000, 2)]),
    ],
)
def test_gradient_bytes(distributed_optimizer, instances, expected) -> None:
    """One bucket of 4000 bytes over 4 data-parallel ranks."""
    from megatron.compression.patches.distributed import _record_gradient_sync

    group = SimpleNamespace(
        ddp_config=SimpleNamespace(
            use_distributed_optimizer=distributed_optimizer, num_distributed_optimizer_instances=instances
        ),
        buckets=[SimpleNamespace(grad_data=SimpleNamespace(nbytes=4000))],
        data_parallel_group=SimpleNamespace(size=lambda: 4),
        intra_distributed_optimizer_instance_size=4 // instances,
    )
    calls = []
    _record_gradient_sync(group, False, lambda *call: calls.append(call))
    assert calls == expected
