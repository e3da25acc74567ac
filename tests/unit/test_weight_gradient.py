"""Gradient accumulation fusion without apex: weight gradients are added to main_grad by torch's GEMMs."""

from argparse import Namespace

import pytest
import torch

from megatron.compression.tensor_parallel.functions import column_parallel_linear
from megatron.compression.tensor_parallel.weight_gradient import dropped_gradient
from megatron.compression.torch_native import spec
from tests.unit.one_rank import DEVICE, config, one_rank  # noqa: F401  (a fixture for every test here)
from tests.unit.test_overlap import OneRankPair, OneRankSite


def test_weights_without_main_grad_keep_their_gradient() -> None:
    """A model that DDP does not wrap trains as ever."""
    x = torch.randn(6, 2, 8)
    weight = torch.nn.Parameter(torch.randn(12, 8))
    column_parallel_linear(
        x, weight, None, OneRankPair(OneRankSite([], "fc1")), False, fusion=True
    ).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(12, 8))


def test_dropped_gradients_follow_the_protocol() -> None:
    """Zero where an embedding adds its own gradient to it; none where no DDP asks for one."""
    weight = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    assert torch.equal(dropped_gradient(weight), torch.zeros(4, 3).bfloat16())
    assert weight.grad_added_to_main_grad
    del weight.grad_added_to_main_grad
    assert dropped_gradient(weight) is None


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        ({"gradient_accumulation_fusion": False}, False),
        ({"use_megatron_fsdp": True}, False),
        ({"defer_embedding_wgrad_compute": True}, False),
        ({"transformer_impl": "transformer_engine", "defer_embedding_wgrad_compute": True}, True),
    ],
)
def test_megatrons_default_stands_without_apex(changes: dict, fused: bool, monkeypatch) -> None:
    """Unless it is switched off, or megatron-core would call other kernels for it."""
    filled = []
    monkeypatch.setattr(spec, "fill_weight_gradient_slot", lambda: filled.append(True) or True)
    asked = dict(transformer_impl="local", gradient_accumulation_fusion=True)
    others = dict(use_megatron_fsdp=False, defer_embedding_wgrad_compute=False)
    args = Namespace(**{**asked, **others, **changes})
    lines = spec._fuse_weight_gradients(args)
    assert args.gradient_accumulation_fusion == fused
    off = next((f"--{name.replace('_', '-')}" for name in changes if name in others), None)
    assert lines is None if fused or off is None else lines.startswith(off)
    assert bool(filled) == changes.get("gradient_accumulation_fusion", True)
