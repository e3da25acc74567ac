"""The order of a backward: exchange under way, weight gradients behind it, then the rest."""

from types import SimpleNamespace

import pytest
import torch

from megatron.compression.communication import Work
from megatron.compression.tensor_parallel import functions
from megatron.compression.tensor_parallel.functions import (
    DeferredWeightGradient,
    column_parallel_linear,
    row_parallel_linear,
)


class OneRankMessage:
    """An all-reduce of one rank."""

    operation = "all_reduce"
    codec = None

    def __init__(self, site: "OneRankSite", traffic: str) -> None:
        self.site = site
        self.traffic = traffic

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        return self.site.all_reduce(x, self.traffic)


class OneRankPair:
    """The messages of a layer's call on one rank."""

    compressed = True

    def __init__(self, site: "OneRankSite") -> None:
        self.site = site

    def forward(self, operation: str) -> OneRankMessage:
        return OneRankMessage(self.site, "tp.forward")

    def backward(self, operation: str) -> OneRankMessage:
        return OneRankMessage(self.site, "tp.backward")


class OneRankSite:
    """A site whose collectives return their input, in one exchange or two, and write down when."""

    def __init__(self, log: list[str], name: str, exchanges: int = 2) -> None:
        self.log = log
        self.name = name
        self.exchanges = exchanges
        self.group = SimpleNamespace(size=lambda: 1)

    def message(self, traffic: str, operation: str, nbytes: int) -> OneRankMessage:
        return OneRankMessage(self, traffic)

    def pair(self, forward: str | None, backward: str | None, nbytes: int) -> "OneRankPair":
        return OneRankPair(self)

    def all_reduce(self, tensor: torch.Tensor, traffic: str) -> Work:
        self.log.append(f"{self.name} {traffic} start")

        def second() -> torch.Tensor:
            self.log.append(f"{self.name} {traffic} arrived")
            return tensor.clone()

        def first() -> Work:
            self.log.append(f"{self.name} {traffic} halfway")
            return Work(None, second)

        return Work(None, second if self.exchanges == 1 else first, self.exchanges)


def mlp_loss(x, first, second, log, deferred, exchanges: int = 2) -> torch.Tensor:
    """Loss of a two-layer block, through our layers."""
    fc1 = OneRankPair(OneRankSite(log, "fc1", exchanges))
    fc2 = OneRankPair(OneRankSite(log, "fc2", exchanges))
    inner = torch.nn.functional.gelu(column_parallel_linear(x, first, None, fc1, False, deferred))
    return row_parallel_linear(inner, second, fc2, False, deferred).square().sum()


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 2, 8), (12, 8), (8, 12)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def note_weight_gradients(log: list[str], monkeypatch) -> None:
    compute = functions.WeightGradient.compute

    def noted(self):
        log.append(f"weight gradient {tuple(self.weight.shape)}")
        return compute(self)

    monkeypatch.setattr(functions.WeightGradient, "compute", noted)


@pytest.mark.parametrize("exchanges", [1, 2])
def test_both_weight_gradients_run_behind_the_exchange(exchanges: int, monkeypatch) -> None:
    """And so they do each time that a graph is kept for another backward."""
    log: list[str] = []
    x, first, second = leaves()
    row = torch.nn.Module()
    row.weight = torch.nn.Parameter(second.detach().clone())
    note_weight_gradients(log, monkeypatch)
    loss = mlp_loss(x, first, row.weight, log, DeferredWeightGradient(row), exchanges)
    expected = [
        "fc1 tp.backward start",
        "weight gradient (12, 8)",
        "fc1 tp.backward halfway",
        "weight gradient (8, 12)",
        "fc1 tp.backward arrived",
    ]
    if exchanges == 1:
        expected.remove("fc1 tp.backward halfway")
    gradients = []
    for _ in range(2):
        log.clear()
        loss.backward(retain_graph=True)
        assert log == expected
        gradients.append([leaf.grad.clone() for leaf in (x, first, row.weight)])
    for first_pass, both_passes in zip(*gradients, strict=True):
        assert torch.equal(2 * first_pass, both_passes)


def test_frozen_weights_get_no_gradient_and_do_not_hold_up_the_input() -> None:
    x, first, second = leaves()
    first.requires_grad_(False)
    row = torch.nn.Module()
    row.weight = torch.nn.Parameter(second.detach().clone(), requires_grad=False)
    mlp_loss(x, first, row.weight, [], DeferredWeightGradient(row)).backward()
    assert x.grad is not None
    assert first.grad is None
    assert row.weight.grad is None


def test_an_input_without_gradient_has_no_sum() -> None:
    """Weights get their gradients; nobody would take the sum of the input's."""
    log: list[str] = []
    x, first, second = leaves()
    row = torch.nn.Module()
    row.weight = torch.nn.Parameter(second.detach().clone())
    mlp_loss(x.detach(), first, row.weight, log, DeferredWeightGradient(row)).backward()
    assert first.grad is not None
    assert row.weight.grad is not None
    assert not any("tp.backward" in line for line in log)


def test_second_derivatives_are_refused() -> None:
    """The collectives have none: an error, not a wrong number."""
    x, first, second = leaves()
    (gradient,) = torch.autograd.grad(mlp_loss(x, first, second, [], None), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
