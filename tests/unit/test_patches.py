"""Patches refuse unexpected symbols and wrap once."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron import host
from megatron.compression.patches import communication, gaps, loop
from megatron.compression.patches.symbols import PatchError, change_class, replace
from tests.distributed.launch import REPO


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


def test_replace_refuses_what_another_patch_has_replaced() -> None:
    """Two patches of one symbol would undo each other, whichever came first."""
    owner = type("Copy", (Owner,), {})
    replace(owner, "double", ("value",), _plus_one)
    with pytest.raises(PatchError, match=r"is replaced by .*_plus_one already"):
        replace(owner, "double", ("value",), lambda original: original)
    assert owner().double(3) == 7


class Louder(Owner):
    """Adds a method, and so can be put upon an instance of Owner."""

    def double(self, value: int) -> int:
        """Twice as much."""
        return 2 * super().double(value)


def test_change_class_there_and_back() -> None:
    instance = Owner()
    for cls, expected in ((Louder, 4), (Louder, 4), (Owner, 2)):
        change_class(instance, cls)
        assert type(instance) is cls and instance.double(1) == expected


def test_patches_load_nothing_heavy() -> None:
    imports = "import sys; from megatron.compression.patches import communication, gaps, loop"
    code = f"{imports}; print({{'torch', 'megatron.core'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "set()"


def test_what_comes_behind_validation(monkeypatch) -> None:
    """Each function once, in order, with the arguments as validated, before the tokenizer is made."""
    host.install()
    from megatron.compression.patches import loop as patched

    module = SimpleNamespace(
        __name__="arguments", validate_args=lambda args, defaults=None: args.append("valid")
    )
    monkeypatch.setattr("megatron.training.arguments", module)
    monkeypatch.setattr(patched, "_after_validating", [])

    def first(args):
        args.append("first")

    def second(args):
        args.append("second")

    patched.after_validating_arguments(first)
    patched.after_validating_arguments(first, second)
    args = []
    module.validate_args(args, {})
    assert args == ["valid", "first", "second"]


def test_megatron_core_has_every_symbol() -> None:
    """All patches fit the installed megatron-core, and the data-parallel ones count what they should."""
    host.install()
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import checkpointing, training

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
        loop.on_training_log(lambda iteration, losses: None)
        loop.around_evaluate(lambda split: None, lambda losses: None)
        communication.on_gradient_sync(lambda *args: None)
        communication.on_parameter_sync(lambda *args: None)
        gaps.on_master_copy(lambda optimizer: False)
        loop.around_checkpoint_state(lambda *args: None)
        loop.on_checkpoint_read(lambda *args: None)
        communication.through_pipeline_exchange(lambda *args, **kwargs: None)
        communication.after_schedules(lambda: None)
        communication.on_replicated_gradient_sync(lambda *args: None)
        communication.on_tied_embedding_gradient_sync(lambda *args: None)
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
    from megatron.compression.patches.communication import _record_gradient_sync

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
