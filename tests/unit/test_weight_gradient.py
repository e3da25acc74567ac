"""Gradient accumulation fusion without apex: torch's GEMMs add weight gradients to main_grad."""

from argparse import Namespace

import pytest
import torch

from megatron.compression.tensor_parallel.functions import column_parallel_linear
from megatron.compression.tensor_parallel.weight_gradient import dropped_gradient
from megatron.compression.torch_native import spec
from tests.unit.one_rank import DEVICE, config, one_rank  # noqa: F401  (a fixture for every test here)
from tests.unit.test_overlap import OneRankPair, OneRankSite


def test_weights_without_main_grad_keep_their_gradient() -> None:
    """A model that DDP does not wrap has none, and trains as without fusion."""
    x = torch.randn(6, 2, 8)
    weight = torch.nn.Parameter(torch.randn(12, 8))
    pair = OneRankPair(OneRankSite([], "fc1"))
    column_parallel_linear(x, weight, None, pair, False, fusion=True).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(12, 8))


@pytest.fixture
def weight() -> torch.nn.Parameter:
    """A weight that a DDP has marked; an embedding will add its own gradient to main_grad."""
    weight = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    return weight


def test_autograd_gets_zeros_where_an_embedding_adds_its_gradient(weight) -> None:
    assert torch.equal(dropped_gradient(weight), torch.zeros(4, 3).bfloat16())
    assert weight.grad_added_to_main_grad


def test_autograd_gets_no_gradient_where_no_ddp_asks_for_one(weight) -> None:
    del weight.grad_added_to_main_grad
    assert dropped_gradient(weight) is None


@pytest.fixture
def fuse(monkeypatch):
    """A function that fuses as the arguments say; it returns them, the log's line, and the slots.

    One slot is filled for each call of ``fill_weight_gradient_slot``.
    """

    def fuse(**changes) -> tuple[Namespace, str | None, list[bool]]:
        slots = []

        def fill() -> bool:
            slots.append(True)
            return True

        monkeypatch.setattr(spec, "fill_weight_gradient_slot", fill)
        defaults = dict(
            transformer_impl="local",
            gradient_accumulation_fusion=True,
            use_megatron_fsdp=False,
            defer_embedding_wgrad_compute=False,
        )
        args = Namespace(**{**defaults, **changes})
        line = spec._fuse_weight_gradients(args)
        return args, line, slots

    return fuse


@pytest.mark.parametrize(
    "changes",
    [{}, {"transformer_impl": "transformer_engine", "defer_embedding_wgrad_compute": True}],
    ids=["local", "transformer_engine"],
)
def test_megatrons_default_stands_without_apex(fuse, changes: dict) -> None:
    args, line, slots = fuse(**changes)
    assert args.gradient_accumulation_fusion
    assert line is None
    assert slots


def test_it_stays_switched_off(fuse) -> None:
    args, line, slots = fuse(gradient_accumulation_fusion=False)
    assert not args.gradient_accumulation_fusion
    assert line is None
    assert not slots


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "defer_embedding_wgrad_compute"])
def test_it_is_off_where_megatron_core_would_call_other_kernels(fuse, name: str) -> None:
    args, line, slots = fuse(**{name: True})
    assert not args.gradient_accumulation_fusion
    assert line.startswith(f"--{name.replace('_', '-')}")
    assert slots
