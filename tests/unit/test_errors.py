"""Traces of Megatron and torch that a command line caused become one line."""

import sys
from argparse import Namespace

import pytest

from megatron.compression import preflight
from megatron.compression.errors import InputError, end_with_one_line, explain, without_fix


def raised(function: str, error: Exception) -> Exception:
    """``error`` as it is when it has passed through a function of this name."""
    scope: dict = {"error": error}
    exec(f"def {function}():\n    raise error", scope)
    with pytest.raises(type(error)) as caught:
        scope[function]()
    return caught.value


RENDEZVOUS = "using env:// rendezvous: environment variable RANK expected, but not set"


@pytest.mark.parametrize(
    ("function", "error", "line"),
    [
        ("save_checkpoint_and_time", TypeError("not NoneType"), "a loss is NaN or infinite"),
        ("init_process_group", ValueError(RENDEZVOUS), "this process was not started by torchrun"),
        ("sampler", AssertionError("no sample to consume: 0"), "a share of the data has no sample"),
        (
            "update",
            AssertionError("current global batch size (6) is not divisible by 4"),
            "current global batch",
        ),
        ("core_transformer_config_from_args", ValueError("kv_channels"), "kv_channels"),
    ],
)
def test_what_the_command_line_caused(function: str, error: Exception, line: str) -> None:
    assert explain(raised(function, error), Namespace(save=None)).startswith(line)


def test_a_fault_keeps_its_trace() -> None:
    """The same exceptions from elsewhere, and a failing save that has a folder, are not explained away."""
    for error in (TypeError("not NoneType"), ValueError("kv_channels"), AssertionError("6 == 4")):
        assert explain(raised("forward", error), Namespace(save=None)) is None
    assert explain(raised("save_checkpoint_and_time", TypeError("x")), Namespace(save="here")) is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"wandb_project": "mine"}, "--wandb-project needs wandb, .*: pip install wandb"),
        (
            {"optimizer": "muon"},
            "--optimizer muon needs emerging_optimizers, .*: pip install emerging-optimizers",
        ),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, given: dict, line: str) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    preflight.check_packages(Namespace(wandb_project="", optimizer="adam"))
    with pytest.raises(InputError, match=line):
        preflight.check_packages(Namespace(**{"wandb_project": "", "optimizer": "sgd"} | given))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"expert_tensor_parallel_size": 2},
            "make 4 ranks, which do not divide the 2 .*tensor-parallel-size 1",
        ),
        ({"moe_layer_freq": [0, 1, 1]}, r"--moe-layer-freq \[0, 1, 1\] must have .* --num-layers 2"),
        ({"moe_layer_freq": [0, 2]}, "must have a 0 or a 1 for each"),
        ({"moe_latent_size": 64}, "--moe-latent-size needs Transformer Engine"),
    ],
)
def test_layouts_that_experts_cannot_have(given: dict, line: str) -> None:
    sizes = dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, expert_model_parallel_size=2)
    more = dict(pipeline_model_parallel_size=1, world_size=2, num_layers=2, moe_layer_freq=[0, 1])
    run = {"num_experts": 4, "transformer_impl": "local", "moe_latent_size": None} | sizes | more
    preflight.check_experts(Namespace(**run))
    preflight.check_experts(Namespace(**run | given | {"num_experts": None}))
    with pytest.raises(InputError, match=line):
        preflight.check_experts(Namespace(**run | given))


def test_what_is_wrong_can_stand_without_the_fix() -> None:
    """A message that has none stays whole."""
    assert without_fix(InputError("--a is 1; so is --b; drop it")) == "--a is 1; so is --b"
    assert without_fix(InputError("--a is 1")) == "--a is 1"


def test_several_parsers_put_in_one_hook(monkeypatch) -> None:
    before = sys.__excepthook__
    monkeypatch.setattr(sys, "excepthook", before)
    end_with_one_line()
    hook = sys.excepthook
    end_with_one_line()
    assert sys.excepthook is hook is not before
