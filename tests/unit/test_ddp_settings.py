"""The settings of ``ddp.attach``, and what is refused before a rank is asked."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron.compression import CompressionConfigError
from megatron.compression.ddp import attach


@pytest.fixture
def wrapped(tmp_path):
    """A model under DDP on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"reduce": "auto"},
            "reduce auto is neither a codec nor a recipe; give the recipe gradients-4bit",
        ),
        (
            {"reduce": "sdp4bit:outer=int8"},
            "reduce outer=int8 is for the distributed optimizer's instances, which DDP does not "
            "have; drop outer=",
        ),
        (
            {"reduce": "pipeline-6bit"},
            "reduce pipeline-6bit is a recipe of PipelineParallelConfig.compression; reduce has "
            "gradients-4bit",
        ),
        (
            {"reduce": "tah-quant"},
            "reduce tah-quant needs tokens and channels, not a bucket's; use int8",
        ),
        ({"start_iteration": -1}, "start_iteration -1 must be an iteration >= 0"),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else "",
)
def test_settings_are_refused_as_they_are_typed(settings: dict, line: str, wrapped) -> None:
    """The line names the argument, the reason and the fix; the model can be attached after it."""
    with pytest.raises(CompressionConfigError) as error:
        attach(wrapped, **settings)
    assert str(error.value) == line
    assert attach(wrapped, "int8", log=lambda line: None).summary().startswith("sent dp.gradient")


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), [torch.nn.Linear(2, 2)]])
def test_what_is_not_under_ddp_is_refused(model) -> None:
    """A module that is not wrapped, and a list of models."""
    line = r"^attach\(\) takes one model under torch.nn.parallel.DistributedDataParallel, not a "
    with pytest.raises(CompressionConfigError, match=rf"{line}(Linear|list); wrap it before"):
        attach(model)


def test_one_rank_sends_nothing(wrapped) -> None:
    """Its gradients are its own."""
    compression = attach(wrapped, "int8", log=lambda line: None)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert torch.equal(wrapped.module.weight.grad, torch.ones(2, 2))
    assert compression.iteration == 1
    assert "sent dp.gradient 0.000 of 0.000 MB, ratio 1.00" in compression.summary()


def test_a_model_that_is_compiled(wrapped) -> None:
    """torch.compile sees neither the hook nor the check of the first iteration's bytes."""
    attach(wrapped, "int8", log=lambda line: None)
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        compiled(torch.ones(1, 2)).sum().backward()
    assert torch.equal(wrapped.module.weight.grad, 2 * torch.ones(2, 2))


def test_the_model_is_not_kept_alive(wrapped) -> None:
    """What attach() returns does not hold it, and neither does this package."""
    import gc
    import weakref

    compression = attach(wrapped, "tagc", log=lambda line: None)
    inner = weakref.ref(wrapped.module)
    assert compression._model() is wrapped
    assert inner() is not None
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    other = attach(model, "tagc", log=lambda line: None)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and other.summary()
