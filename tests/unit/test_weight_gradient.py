"""Gradient accumulation fusion without apex: weight gradients are added to main_grad by torch's GEMMs."""

from argparse import Namespace

import pytest
import torch

from megatron import host

host.install()


from megatron.compression.tensor_parallel.functions import (  # noqa: E402
    DeferredWeightGradient,
    column_parallel_linear,
    row_parallel_linear,
)
from megatron.compression.torch_native import spec  # noqa: E402
from megatron.compression.torch_native.weight_gradient import (  # noqa: E402
    dropped_gradient,
)
from tests.unit.one_rank import DEVICE, config, one_rank  # noqa: E402, F401  (a fixture for every test here)
from tests.unit.test_overlap import OneRankSite  # noqa: E402


def as_ddp_has_it(weight: torch.Tensor, dtype=torch.float32) -> torch.nn.Parameter:
    """A parameter with a gradient in main_grad, from another micro-batch."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.ones_like(parameter, dtype=dtype)
    parameter.grad_added_to_main_grad = False
    return parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("exchanges", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_layers_add_to_main_grad(dtype: torch.dtype, exchanges: int, shared: bool) -> None:
    """Two backwards of one graph add the gradient twice, each to what there was; the hook drops the rest."""
    x = torch.randn(6, 2, 8).to(dtype).requires_grad_()
    first, second = torch.randn(12, 8).to(dtype), torch.randn(8, 12).to(dtype)
    main = torch.float64 if dtype == torch.float64 else torch.float32
    added: list[list[torch.Tensor]] = []
    for fusion in (False, True):
        row = torch.nn.Module()
        column_weight, row.weight = as_ddp_has_it(first, main), as_ddp_has_it(second, main)
        row.gradient_accumulation_fusion = fusion
        deferred = DeferredWeightGradient(row) if shared else None
        fc1, fc2 = OneRankSite([], "fc1", exchanges), OneRankSite([], "fc2", exchanges)
        inner = column_parallel_linear(x, column_weight, None, fc1, False, deferred, fusion=fusion)
        out = row_parallel_linear(inner, row.weight, fc2, False, deferred, fusion=fusion)
        loss = out.float().square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        weights = column_weight, row.weight
        assert all(weight.grad_added_to_main_grad == fusion for weight in weights)
        assert all(weight.grad.dtype == dtype for weight in weights), "the hook refuses None"
        added.append([w.main_grad - 1 if fusion else w.grad.to(main) for w in weights])
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6
    for unfused, fused in zip(*added, strict=True):
        scale = float(unfused.abs().max())
        torch.testing.assert_close(fused / scale, unfused / scale, rtol=tolerance, atol=tolerance)


def test_weights_without_main_grad_keep_their_gradient() -> None:
    """A model that DDP does not wrap trains as ever."""
    x, weight = torch.randn(6, 2, 8), torch.nn.Parameter(torch.randn(12, 8))
    column_parallel_linear(x, weight, None, OneRankSite([], "fc1"), False, fusion=True).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(12, 8))


def test_dropped_gradients_follow_the_protocol() -> None:
    """Zero where an embedding adds its own gradient to it; none where no DDP asks for one."""
    weight = as_ddp_has_it(torch.randn(4, 3).bfloat16())
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
    said = spec._fuse_weight_gradients(args)
    assert args.gradient_accumulation_fusion == fused
    off = next((f"--{name.replace('_', '-')}" for name in changes if name in others), None)
    assert said is None if fused or off is None else said.startswith(off)
    assert bool(filled) == changes.get("gradient_accumulation_fusion", True)
