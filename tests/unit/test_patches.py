"""Patches refuse unexpected symbols, wrap once and are taken out; Adam is fused on GPUs."""

import copy
import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.compression.patches import gaps, running, symbols
from megatron.compression.patches.communication import _record_gradient_sync
from megatron.compression.patches.gaps import fuse, fuse_torch_adam
from megatron.compression.patches.symbols import PatchError, replace
from tests.distributed.launch import REPO


class Owner:
    """Stands for a megatron-core class."""

    def double(self, value: int) -> int:
        """Return twice the value; patches wrap this."""
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


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [("triple", (), "does not exist"), ("double", ("value", "factor"), "no parameter factor")],
)
def test_replace_refuses_another_version(name, parameters, message) -> None:
    """A missing function or parameter fails loudly and changes nothing."""
    owner = type("Copy", (Owner,), {})
    with pytest.raises(PatchError, match=message):
        replace(owner, name, parameters, _plus_one)
    assert owner().double(3) == 6


def test_replace_refuses_what_another_patch_has_replaced() -> None:
    """Two patches of one symbol would undo each other, whichever came first."""
    owner = type("Copy", (Owner,), {})
    replace(owner, "double", ("value",), _plus_one)
    with pytest.raises(PatchError, match=r"is replaced by .*_plus_one already"):
        replace(owner, "double", ("value",), lambda original: original)
    assert owner().double(3) == 7


def test_patches_load_nothing_heavy() -> None:
    imports = "import sys; from megatron.compression.patches import communication, gaps, loop"
    code = f"{imports}; print({{'torch', 'megatron.core'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("distributed_optimizer", "instances", "expected"),
    [
        (False, 1, [("dp.gradient", "all_reduce", 4000, 4)]),
        (True, 1, [("dp.gradient", "reduce_scatter", 4000, 4)]),
        (
            True,
            2,
            [("dp.gradient", "reduce_scatter", 4000, 2), ("dp.outer", "all_reduce", 2000, 2)],
        ),
    ],
)
def test_gradient_bytes(distributed_optimizer, instances, expected) -> None:
    """One bucket of 4000 bytes over 4 data-parallel ranks."""
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(
            use_distributed_optimizer=distributed_optimizer,
            num_distributed_optimizer_instances=instances,
        ),
        buckets=[SimpleNamespace(grad_data=SimpleNamespace(nbytes=4000))],
        data_parallel_group=SimpleNamespace(size=lambda: 4),
        intra_distributed_optimizer_instance_size=4 // instances,
    )
    calls = []
    _record_gradient_sync(group, False, lambda traffic, _, *call: calls.append((traffic, *call)))
    assert calls == expected


class OnGpu(torch.nn.Parameter):
    """A CPU parameter that says it is on a GPU."""

    is_cuda = True


class OwnAdam(torch.optim.AdamW):
    """A subclass, which may step in its own way."""


def on_cpu() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def on_gpu() -> OnGpu:
    return OnGpu(torch.ones(3))


def test_adam_is_fused_where_every_parameter_is_on_a_gpu() -> None:
    optimizer = torch.optim.AdamW([{"params": [on_gpu()]}, {"params": [on_gpu()], "lr": 0.1}])
    assert fuse(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_adam_stays_fused_after_a_checkpoint_of_an_unfused_one() -> None:
    groups = [{"params": [on_gpu()]}, {"params": [on_gpu()]}]
    optimizer = torch.optim.AdamW(groups)
    assert fuse(optimizer)
    unfused = torch.optim.AdamW([{"params": [on_gpu()]}, {"params": [on_gpu()]}])
    optimizer.load_state_dict(unfused.state_dict())
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_adam_is_not_fused_where_a_parameter_is_on_the_cpu() -> None:
    optimizer = torch.optim.AdamW([on_cpu(), on_gpu()])
    assert not fuse(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "optimizer",
    [OwnAdam([on_gpu()]), torch.optim.SGD([on_gpu()]), None],
    ids=["own", "sgd", "none"],
)
def test_what_is_not_torchs_adam_is_not_fused(optimizer) -> None:
    assert not fuse(optimizer)


def test_fusing_adam_is_put_in_once() -> None:
    fuse_torch_adam()
    original = MegatronOptimizer.__init__.__wrapped__
    fuse_torch_adam()
    assert MegatronOptimizer.__init__.__wrapped__ is original


def _twice(original):
    return lambda self, value: 2 * original(self, value)


@pytest.fixture
def owner():
    """A class with a function of its own; what a test replaces in it is taken out afterwards."""
    yield type("Copy", (), {"double": Owner.double})
    symbols.take_out()


def test_the_original_is_back_when_replacements_are_taken_out(owner) -> None:
    original = owner.double
    symbols.replace(owner, "double", ("value",), _plus_one)
    symbols.take_out()
    assert owner.double is original


def test_a_base_classs_function_is_not_left_in_the_class(owner) -> None:
    """Later changes of the base class would not be seen otherwise."""
    derived = type("Derived", (owner,), {})
    symbols.replace(derived, "double", ("value",), _plus_one)
    assert derived().double(3) == 7
    assert owner().double(3) == 6
    symbols.take_out()
    assert "double" not in vars(derived)


def test_a_static_method_stays_one() -> None:
    owner = type("Copy", (), {"double": staticmethod(lambda value: 2 * value)})
    original = vars(owner)["double"]
    symbols.replace(owner, "double", ("value",), lambda function: lambda value: function(value) + 1)
    assert owner.double(3) == owner().double(3) == 7
    symbols.take_out()
    assert vars(owner)["double"] is original


def test_repairs_stay(owner) -> None:
    symbols.replace(owner, "double", ("value",), _plus_one, lasting=True)
    symbols.take_out()
    assert owner().double(3) == 7


@pytest.fixture
def wrapped_over(owner):
    """The owner, with a function of somebody else around our replacement; and that function."""
    symbols.replace(owner, "double", ("value",), _plus_one)
    foreign = _twice(owner.double)
    owner.double = foreign
    return owner, foreign


def test_what_somebody_else_has_wrapped_over_ours_is_left_alone(wrapped_over) -> None:
    owner, foreign = wrapped_over
    symbols.take_out()
    assert owner.double is foreign
    assert owner().double(3) == 14


def test_below_a_foreign_function_ours_is_not_wrapped_again(wrapped_over) -> None:
    owner, foreign = wrapped_over
    symbols.take_out()
    symbols.replace(owner, "double", ("value",), _plus_one)
    assert owner.double is foreign
    assert owner().double(3) == 14


def _noting(original, calls):
    """Return a function that gives its value to all calls before the original."""

    def wrapper(self, value):
        for call in calls:
            call(value)
        return original(self, value)

    return wrapper


def test_what_is_added_twice_to_a_replacement_is_called_once(owner) -> None:
    seen = []
    symbols.extend(owner, "double", ("value",), _noting, seen.append)
    symbols.extend(owner, "double", ("value",), _noting, seen.append)
    assert owner().double(3) == 6
    assert seen == [3]


def test_what_is_added_is_forgotten_with_its_replacement(owner) -> None:
    seen = []
    symbols.extend(owner, "double", ("value",), _noting, seen.append)
    symbols.take_out()
    symbols.extend(owner, "double", ("value",), _noting, print)
    owner().double(4)
    assert not seen


class Thing:
    """A thing that may belong to a run: a chunk, or the run itself."""

    module = None


@pytest.fixture
def claimed():
    """A run and the chunk that belongs to it."""
    run = Thing()
    chunk = Thing()
    running.claim([chunk], run)
    yield run, chunk
    running.close_run(run)


def test_a_run_is_known_by_its_chunk(claimed) -> None:
    run, chunk = claimed
    assert running.run_of_model(chunk) is run


def test_a_run_is_known_by_what_wraps_its_first_chunk(claimed) -> None:
    run, chunk = claimed
    wrapper = Thing()
    wrapper.module = chunk
    assert running.run_of_model([wrapper, Thing()]) is run


def test_a_copy_of_a_chunk_belongs_to_no_run(claimed) -> None:
    _, chunk = claimed
    assert running.run_of_model(copy.copy(chunk)) is None


def test_what_was_not_claimed_belongs_to_no_run(claimed) -> None:
    assert running.run_of(Thing()) is None


def test_a_chunk_belongs_to_no_run_once_its_run_is_closed(claimed) -> None:
    run, chunk = claimed
    running.close_run(run)
    assert running.run_of(chunk) is None


def test_the_innermost_run_is_at_work() -> None:
    """An object without a run hides the run around it: what it sends is nobody's."""
    run = Thing()
    assert running.current(otherwise="nothing") == "nothing"
    with running.at_work(run):
        assert running.current() is run
        with running.at_work(None):
            assert running.current(otherwise="nothing") is None
        assert running.current() is run
    assert running.current() is None


def test_a_run_ends_with_its_model(owner, monkeypatch) -> None:
    """Nobody closes it: the last run that is garbage leaves the functions as they were."""
    monkeypatch.setattr(running, "_open", {})
    original = owner.double
    run = Thing()
    chunk = Thing()
    running.claim([chunk], run)
    symbols.replace(owner, "double", ("value",), _plus_one)
    del run
    assert owner.double is not original, "the chunk is there"
    del chunk
    gc.collect()
    assert owner.double is original


def _gradients(count: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(1, 200, (count,), generator=generator).tolist()
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.fixture
def on_devices(monkeypatch) -> None:
    """Let tensors of the host take the path of those on CUDA devices."""
    gaps.launch_optimizers_together()
    monkeypatch.setattr(gaps, "_on_devices", bool)


def test_the_norm_of_all_gradients_at_once(on_devices) -> None:
    """That of megatron-core, which takes it one by one."""
    gradients = _gradients()
    norm, _ = clip_grads.multi_tensor_applier(
        clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False
    )
    assert norm.shape == (1,) and norm.dtype == torch.float32
    assert norm.item() == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-6)


def test_gradients_are_scaled_at_once_to_the_same_bits(on_devices) -> None:
    gradients = _gradients()
    expected = [gradient * 0.3 for gradient in gradients]
    clip_grads.multi_tensor_applier(
        clip_grads.multi_tensor_scale_impl, torch.zeros(1), [gradients, gradients], 0.3
    )
    for gradient, scaled in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, scaled)


def test_weights_are_copied_at_once_to_the_same_bits(on_devices) -> None:
    masters = _gradients()
    weights = [torch.zeros_like(master, dtype=torch.bfloat16) for master in masters]
    optimizer_module._multi_tensor_copy_this_to_that(this=masters, that=weights)
    for weight, master in zip(weights, masters, strict=True):
        assert torch.equal(weight, master.bfloat16())


def test_tensors_of_the_host_are_left_to_megatron(monkeypatch) -> None:
    gaps.launch_optimizers_together()
    monkeypatch.setattr(torch, "_foreach_mul_", None)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    gradients = _gradients(3)
    expected = [gradient * 0.5 for gradient in gradients]
    clip_grads.multi_tensor_scale_impl(1, torch.zeros(1), [gradients, gradients], 0.5)
    assert all(map(torch.equal, gradients, expected))
    copies = [torch.zeros_like(gradient) for gradient in gradients]
    optimizer_module._multi_tensor_copy_this_to_that(gradients, copies)
    assert all(map(torch.equal, copies, gradients))
