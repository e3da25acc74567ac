"""Blocks in turn: the order of a forward and a backward, and what is refused."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.communication import Work
from megatron.compression.errors import CompressionConfigError
from megatron.compression.flags import resolve
from megatron.compression.tensor_parallel import functions
from megatron.compression.tensor_parallel.config import halves_refusal
from megatron.compression.tensor_parallel.functions import (
    DeferredWeightGradient,
    column_parallel_linear,
    row_parallel_linear,
)
from megatron.compression.tensor_parallel.halves import (
    Block,
    BlockInput,
    BlockOutput,
    interleave,
)
from megatron.compression.tensor_parallel.halves_messages import ColumnStandIn, RowStandIn
from megatron.compression.torch_native import norm
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm
from taco_kernels import residual_norm
from tests.unit.megatron_args import parsed
from tests.unit.test_overlap import OneRankSite

HALVES = ("--tp-compression-overlap", "halves")
AGAIN = dict(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm", "mlp"])
WIDTH = 8


class _Linear(torch.nn.Module):
    """A tensor-parallel layer on one rank, by our functions."""

    def __init__(self, function, weight: torch.nn.Parameter, site: OneRankSite) -> None:
        super().__init__()
        self.weight = weight
        self.function = function
        self.site = site
        self.deferred = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        messages = self.site.pair("tp.forward", "tp.backward", x.nbytes)
        if self.function is column_parallel_linear:
            return column_parallel_linear(x, self.weight, None, messages, False, self.deferred)
        return row_parallel_linear(x, self.weight, messages, False, self.deferred)


class _Mlp(torch.nn.Module):
    """fc1, a nonlinearity and fc2 as one half runs them; ``log`` gets what happens when."""

    def __init__(self, name: str, log: list[str], weights: "_Weights") -> None:
        super().__init__()
        self.norm = weights.norm
        site = OneRankSite(log, name)
        self.first = _Linear(column_parallel_linear, weights.first, site)
        self.second = _Linear(row_parallel_linear, weights.second, site)
        self.first.deferred = self.second.deferred = DeferredWeightGradient(self.second)
        self.name = name
        self.log = log

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.log.append(f"{self.name} computes")
        inner = self.first(x)
        if inner.requires_grad and not torch._C._current_autograd_node():
            inner.register_hook(lambda grad: self.log.append(f"{self.name} back"))
        activated = inner.tanh()
        self.memory = {
            "input": StorageWeakRef(x.untyped_storage()),
            "activation": StorageWeakRef(activated.untyped_storage()),
        }
        return self.second(activated), None


class _Weights(torch.nn.Module):
    """Of a block, for both halves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = (
            torch.nn.Parameter(
                torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH
            )
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)


class _Ran(NamedTuple):
    """What a forward and a backward of two blocks have left."""

    forward: list[str]
    """What is logged in the forward."""
    backward: list[str]
    kept: set[str]
    """The tensors of the blocks that are there between both."""
    gradients: list[torch.Tensor]
    """Of the inputs and the weights."""


def _run(**recomputes: bool) -> _Ran:
    """Run two blocks of two halves; the arguments are fields of ``Block``."""
    log: list[str] = []
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(3, 1, WIDTH, generator=generator).double().requires_grad_() for _ in range(2)
    ]
    weights = [_Weights(seed) for seed in (1, 2)]
    mlps = [
        _Mlp(name + half, log, of_block)
        for name, of_block in zip(("A", "MM"), weights, strict=True)
        for half in "12"
    ]
    blocks = [Block(mlp, mlp.norm, mlp.first, mlp.second, **recomputes) for mlp in mlps]
    outputs = interleave(blocks, inputs)
    forward = list(log)
    log[:] = []
    kept = {name for mlp in mlps for name, memory in mlp.memory.items() if not memory.expired()}
    sum(output.square().sum() for output in outputs).backward()
    leaves = [*inputs, *(weight for of_block in weights for weight in of_block.parameters())]
    return _Ran(forward, log, kept, [leaf.grad for leaf in leaves])


def test_a_half_computes_behind_the_others_exchange(monkeypatch) -> None:
    """Between start and arrival of a sum or an input gradient the other half computes its block.

    The second exchange begins in the middle of that.
    """
    compute = functions.WeightGradient.compute
    noted: list[str] = []
    monkeypatch.setattr(
        functions.WeightGradient, "compute", lambda self: [noted.append("w"), compute(self)][1]
    )
    forward, backward, *_ = _run()
    assert ", ".join(forward).replace(" tp.forward", "") == (
        "A1 computes, A1 start, A2 computes, A1 halfway, A2 start, A1 arrived, MM1 computes, "
        "A2 halfway, "
        "MM1 start, A2 arrived, MM2 computes, MM1 halfway, MM2 start, MM1 arrived, MM2 "
        "halfway, MM2 arrived"
    )
    assert ", ".join(backward).replace(" tp.backward", "") == (
        "MM2 back, MM2 start, MM2 halfway, MM1 back, MM1 start, MM1 halfway, MM2 arrived, A2 "
        "back, A2 start, "
        "A2 halfway, MM1 arrived, A1 back, A1 start, A1 halfway, A2 arrived, A1 arrived"
    )
    assert len(noted) == 8, "two weights a block and half"


@pytest.mark.parametrize(
    ("recomputes", "kept"),
    [
        ({}, {"input", "activation"}),
        ({"recomputes_norm": True}, {"activation"}),
        ({"recomputes_module": True}, {"input"}),
        ({"recomputes_norm": True, "recomputes_module": True}, set()),
    ],
)
def test_what_is_recomputed_is_not_kept(recomputes: dict, kept: set[str]) -> None:
    """The memory is free between forward and backward, and no bit of a gradient changes."""
    expected = _run()
    actual = _run(**recomputes)
    assert actual.kept == kept
    assert actual.forward == expected.forward
    for gradient, complete in zip(actual.gradients, expected.gradients, strict=True):
        assert torch.equal(gradient, complete)
    # Sums are not sent again.
    sent = [line for line in actual.backward if "start" in line]
    assert sent == [line for line in expected.backward if "start" in line]


class _SumSite:
    """A site of two ranks whose sums write down where they go."""

    group = SimpleNamespace(size=lambda: 2)

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec
        self.sums: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def message(self, traffic: str, operation: str, nbytes: int) -> SimpleNamespace:
        def start(x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
            self.sums.append((x, out))
            return Work.completed(x)

        return SimpleNamespace(codec=self.codec, operation=operation, site=self, start=start)


@pytest.mark.parametrize(
    ("codec", "operation", "is_in_place"),
    [(None, "all_reduce", True), ("int8", "all_reduce", False), (None, "reduce_scatter", False)],
)
def test_an_uncompressed_sum_is_in_place(
    codec: str | None, operation: str, is_in_place: bool
) -> None:
    """In both directions, so that no copy of the addend is made."""
    site = _SumSite(codec and parse_codec(codec))
    x = torch.ones(4, 1, WIDTH)
    RowStandIn(site).pair("tp.forward", None, x.nbytes).forward(operation).start(x)
    ColumnStandIn(site).pair(None, "tp.backward", x.nbytes).backward(operation).start(x)
    assert len(site.sums) == 2
    for addend, out in site.sums:
        assert addend is x
        assert out is (x if is_in_place else None)


def _norm(kind: type = TorchLayerNorm, width: int = WIDTH) -> torch.nn.Module:
    """Return a norm of layers of ``--transformer-impl local``."""
    settings = dict.fromkeys(
        (
            "memory_efficient_layer_norm",
            "fused_residual_rmsnorm",
            "layernorm_zero_centered_gamma",
            "sequence_parallel",
        ),
        False,
    )
    return kind(SimpleNamespace(**settings), width)


def _computed(module: torch.nn.Module, codec: str | None) -> BlockInput:
    """Return a computed input of a block behind a sum that a codec encodes."""
    site = _SumSite(codec and parse_codec(codec))
    residual = torch.ones(4, 1, WIDTH).requires_grad_()
    product = torch.arange(4.0 * WIDTH).view(4, 1, WIDTH).sqrt()
    row = RowStandIn(site)
    row.pair("tp.forward", None, product.nbytes).forward("all_reduce").start(product)
    output = BlockOutput(row, product.clone().requires_grad_(), None, lambda total: None)
    layer = SimpleNamespace(site=site)
    entered = BlockInput(residual, Block(torch.nn.Identity(), module, layer, layer), output)
    entered.compute()
    torch.testing.assert_close(entered.y, module(residual + product))
    return entered


@pytest.mark.parametrize("kind", [TorchLayerNorm, TorchRMSNorm])
@pytest.mark.parametrize(
    ("codec", "one_pass"), [(None, False), ("lossless", False), ("int8", True)]
)
def test_add_and_norm_are_one_pass_behind_a_sum_that_is_rounded(
    kind: type, codec: str | None, one_pass: bool
) -> None:
    """Lossless training has the bits of an uncompressed one, whose norm is torch's."""
    entered = _computed(_norm(kind), codec)
    assert (entered.backward.normed is not None) == one_pass
    assert (entered.backward.norm is None) == one_pass


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_norm_with_hooks_is_called(register: str) -> None:
    """As with --overlap-param-gather, whose hooks wait for the norm's weight."""
    module = _norm()
    called = []
    getattr(module, register)(lambda *_: called.append(register))
    entered = _computed(module, "int8")
    assert entered.backward.normed is None
    # The second call is the comparison's.
    assert called == [register] * 2


def test_a_norm_that_no_kernel_holds_is_called(monkeypatch) -> None:
    """Of long rows, and of any on an AMD GPU."""
    longest = residual_norm.LONGEST_ROW
    assert _norm(width=longest).adds_in_one_pass
    assert not _norm(width=longest + 1).adds_in_one_pass
    monkeypatch.setattr(norm, "AMD", True)
    assert not _norm().adds_in_one_pass


@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        ({"micro_batch_size": 1}, "--micro-batch-size 1 has no two halves; give 2 or more"),
        (
            {"transformer_impl": "transformer_engine"},
            "--transformer-impl local: a layer of transformer_engine computes",
        ),
        ({"num_experts": 8}, "--num-experts balances"),
        ({"multi_latent_attention": True}, "--multi-latent-attention has"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations"),
        ({"mlp_chunks_for_training": 2}, "--mlp-chunks-for-training 2 calls the MLP"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers moves"),
        ({"cuda_graph_impl": "local"}, "past the graphs of --cuda-graph-impl local"),
    ],
)
def test_refusals(megatron: dict, reason: str) -> None:
    """One line with the reason and the flags."""
    with pytest.raises(CompressionConfigError, match=reason) as error:
        resolve(parsed(*HALVES, **megatron))
    assert "\n" not in str(error.value) and HALVES[-1] in str(error.value)
    # The same line without an exception, for whoever looks for the fastest schedule.
    assert str(halves_refusal(parsed(*HALVES, **megatron))) == str(error.value)


def test_halves_of_a_caat_net_are_refused() -> None:
    reason = r"--caat-net-sync-fraction 0\.5 has layers that"
    with pytest.raises(CompressionConfigError, match=reason):
        resolve(parsed(*HALVES, "--caat-net-sync-fraction", "0.5"))


def test_what_passes() -> None:
    """Halves need no codec; the log names them; dropout and recomputed modules are covered."""
    config = resolve(parsed(*HALVES, **AGAIN, attention_dropout=0.1, context_parallel_size=2))
    assert config.tensor_parallel.halves and not config.enabled
    assert halves_refusal(parsed(*HALVES, **AGAIN)) is None
    assert "uncompressed" in config.describe(parsed())[0]
    idle = resolve(parsed(*HALVES, tensor_model_parallel_size=1))
    assert "no effect here" in idle.describe(parsed(tensor_model_parallel_size=1))[0]
