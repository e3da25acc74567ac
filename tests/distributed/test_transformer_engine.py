"""Transformer Engine's layers with compressed collectives, on stand-ins of its layers (tests/gpu has TE)."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import run_with, start_model_parallel

STAND_IN = Path(__file__).parent / "stand_in"
HIDDEN, WIDE, TOKENS, BLOCKS = 64, 256, 32, 3


class Block(torch.nn.Module):
    """A residual block of the two layers that Megatron's attention and MLP are made of."""

    def __init__(self, group, **settings) -> None:
        super().__init__()
        from transformer_engine.pytorch import LayerNormLinear, Linear

        ranks = group.size()
        self.linear_fc1 = LayerNormLinear(HIDDEN, WIDE // ranks, group, "column", **settings)
        self.linear_fc2 = Linear(WIDE // ranks, HIDDEN, group, "row", **settings)

    def forward(self, x):
        return x + self.linear_fc2(torch.nn.functional.gelu(self.linear_fc1(x)))[0]


class Model(torch.nn.Module):
    """Some blocks, the same on every run of a rank."""

    def __init__(self, rank: int, group, **settings) -> None:
        super().__init__()
        torch.manual_seed(5 + rank)
        self.config = None
        self.blocks = torch.nn.ModuleList(Block(group, **settings) for _ in range(BLOCKS))
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(model: Model, rank: int, sequence_parallel: bool, recompute: bool = False) -> dict:
    """Two micro-batches: the output, the input's gradient, the weights' gradients."""
    result = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        x = (x.chunk(2)[rank] if sequence_parallel else x).clone().requires_grad_()
        out = (
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
            if recompute
            else model(x)
        )
        out.sin().sum().backward()
        result |= {f"output {step}": out.detach(), f"gradient {step}": x.grad}
    for name, parameter in model.named_parameters():
        fused = model.blocks[0].linear_fc1.fuse_wgrad_accumulation
        result[name] = parameter.main_grad if fused else parameter.grad
    return result


@contextlib.contextmanager
def stand_in():
    """The stand-in as ``transformer_engine``, behind megatron-core's own look for it; the ranks' group."""
    start_model_parallel(2)
    from megatron.core import parallel_state

    sys.path.insert(0, str(STAND_IN))
    sys.modules.pop("transformer_engine", None)  # an installed one is hidden where there is no CUDA
    try:
        yield parallel_state.get_tensor_model_parallel_group()
    finally:
        sys.path.remove(str(STAND_IN))


@pytest.mark.parametrize(
    "config", [{}, {"delay_wgrad_compute": True}, {"cuda_graph_impl": "transformer_engine"}]
)
def test_who_defers_weight_gradients(config: dict) -> None:
    """The layer's own store stays where Megatron's schedule or a graph computes what it has deferred."""
    from megatron.compression.transformer_engine.hooks import TransformerEngineLayers

    layers, module, own = TransformerEngineLayers(run_with("int8")), torch.nn.Module(), object()
    vars(module).update(
        tp_group=None, parallel_mode="row", sequence_parallel=False, wgrad_store=own
    )
    vars(module).update(
        fuse_wgrad_accumulation=True, use_bias=False, config=SimpleNamespace(**config)
    )
    layers.attach(module, "decoder.layers.0.mlp.linear_fc2", 0)
    assert (module.wgrad_store is own) == bool(config)


def layers_worker(
    rank: int, world_size: int, sequence_parallel: bool, fuse: bool, recompute: bool
) -> None:
    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks

        def run(codec: str | None, **settings) -> tuple[dict, object]:
            model = Model(rank, group, sequence_parallel=sequence_parallel, fuse=fuse)
            state = None
            if codec is not None:
                state = run_with(codec, **settings)
                hooks.TensorParallel(state.config, state).attach([model])
            return trained(model, rank, sequence_parallel, recompute), state

        plain, _ = run(None)
        counted, counts = run("none")
        identity, _ = run("identity")
        taco, sent = run("taco")
        for name, value in plain.items():
            assert torch.equal(counted[name], value), f"{name}: counting changes nothing"
            torch.testing.assert_close(identity[name], value, rtol=1e-5, atol=1e-5, msg=name)
            error = float((taco[name] - value).norm() / value.norm())
            assert 1e-4 < error < 0.2, (name, error)
        check_ledger(counts.ledger, sent.ledger, sequence_parallel, recompute)
        only, _ = run("taco", layers="embedding")
        assert all(torch.equal(only[name], value) for name, value in plain.items())


def check_ledger(counts, sent, sequence_parallel: bool, recompute: bool) -> None:
    """Each message of a run without codec is compressed in a run with one, and as large as it should be."""
    whole = TOKENS * HIDDEN * 4
    messages = 2 * BLOCKS  # micro-batches times blocks
    forwards = messages * (2 if recompute else 1)
    operations = {key[3]: 0 for key in counts.tallies}
    for (phase, traffic, kind, operation, _), tally in counts.tallies.items():
        assert (phase, kind) == ("train", "off")
        operations[operation] += tally.sent
        per_block = tally.calls / (forwards if traffic == "tp.forward" else messages)
        expected = {
            "all_reduce": 1,
            "reduce_scatter": 1,
            "all_gather": 1 if traffic == "tp.forward" else 2,
        }
        assert per_block == expected[operation], (traffic, operation, tally)
        assert tally.sent == tally.calls * whole * (1 if operation == "all_reduce" else 0.5)
    assert set(operations) == (
        {"all_gather", "reduce_scatter"} if sequence_parallel else {"all_reduce"}
    )
    for traffic in ("tp.forward", "tp.backward"):
        kinds = sent.totals()[traffic]
        assert {kind for kind, (bytes_, _) in kinds.items() if bytes_} == {"compressed"}
        assert kinds["compressed"][1] == sum(
            plain for _, plain in counts.totals()[traffic].values()
        )
        assert kinds["compressed"][0] < 0.3 * kinds["compressed"][1]  # fp32 in fp8


@pytest.mark.parametrize(
    "sequence_parallel, fuse, recompute",
    [(False, True, False), (True, False, False), (True, True, True)],
)
def test_layers(sequence_parallel: bool, fuse: bool, recompute: bool) -> None:
    """Identity codec: the layers' own results. TACO: near them, and every message compressed and counted."""
    spawn(layers_worker, 2, sequence_parallel, fuse, recompute)


def fp8_worker(rank: int, world_size: int) -> None:
    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks

        results = []
        for codec in (None, "identity", "int8"):
            model = Model(rank, group, sequence_parallel=True, fuse=True, fp8=True)
            state = run_with(codec or "none")
            if codec is not None:
                hooks.TensorParallel(state.config, state).attach([model])
            results.append(trained(model, rank, True))
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        magnitudes = torch.full((12,), float(rank))
        FP8GlobalStateManager.reduce_tensor_across_group_op_max(magnitudes, group)
        assert magnitudes.eq(1).all() and state.ledger.totals()["tp.other"]["exact"] == (48, 48)
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5, msg=name)
        kinds = state.ledger.totals()
        gathers = (
            TOKENS * HIDDEN // 2 * 2 * BLOCKS
        )  # bytes that a rank sends in all gathers of one kind
        assert kinds["tp.forward"]["fp8"] == (gathers, gathers)
        assert kinds["tp.backward"]["fp8"] == (2 * gathers, 2 * gathers)
        for traffic in ("tp.forward", "tp.backward"):
            assert {kind for kind, (sent, _) in kinds[traffic].items() if sent} == {
                "compressed",
                "fp8",
            }
            assert kinds[traffic]["compressed"][1] == 4 * gathers  # the reduce-scatters, in fp32


def test_gathers_in_fp8_pass() -> None:
    """What TE gathers in its own fp8 passes as it is, counted by name; reduce-scatters are compressed."""
    spawn(fp8_worker, 2)


def late_worker(rank: int, world_size: int) -> None:
    with stand_in() as group:
        from megatron.compression.transformer_engine.hooks import TransformerEngineLayers

        for sequence_parallel in (False, True):
            model = Model(rank, group, sequence_parallel=sequence_parallel, fuse=True)
            engine = TransformerEngineLayers(run_with("identity"))
            engine.follow_engine()
            order = []
            launch = engine.weight_gradients.compute_one
            engine.weight_gradients.compute_one = partial(noting_launch, launch, order)
            for path, module in model.named_modules():
                if getattr(module, "parallel_mode", None):
                    engine.attach(module, path, None)
                    module.site.message = noting(module.site.message, order)
            trained(model, rank, sequence_parallel)
            assert not engine.weight_gradients, "nothing may wait behind a backward pass"
            order = order[: len(order) // 2]  # of one micro-batch
            if sequence_parallel:
                block = ["all_gather", "late", "all_gather", "reduce_scatter", "late"]
                expected = [*block[:1], *block[2:], *block * (BLOCKS - 1), "late"]
            else:
                expected = ["all_reduce", "late"] * BLOCKS
            assert [one for one in order if not one.endswith("forward")] == expected, order


def noting_launch(launch, order: list) -> None:
    order.append("late")
    launch()


def noting(message, order: list):
    """A site's ``message``, which notes what is about to start."""

    def wrapper(traffic: str, operation: str, nbytes: int):
        order.append(operation if traffic == "tp.backward" else f"{operation} forward")
        return message(traffic, operation, nbytes)

    return wrapper


def test_weight_gradients_run_behind_exchanges() -> None:
    """One is computed behind each exchange of the backward pass, and none is left at its end."""
    spawn(late_worker, 2)


def refusals_worker(rank: int, world_size: int) -> None:
    with stand_in() as group:
        from megatron.compression.errors import CompressionConfigError
        from megatron.compression.tensor_parallel import hooks
        from megatron.compression.transformer_engine.hooks import gathered_bytes

        for name, value, flag in (
            ("symmetric_ar_type", "two_shot", "--symmetric-ar-type"),
            ("ub_overlap_ag_fprop", True, "--tp-comm-overlap"),
        ):
            model = Model(rank, group)
            setattr(model.blocks[1].linear_fc2, name, value)
            state = run_with("taco")
            with pytest.raises(CompressionConfigError, match=f"blocks.1.linear_fc2: {flag}"):
                hooks.TensorParallel(state.config, state).attach([model])
            state = run_with("none")
            hooks.TensorParallel(state.config, state).attach(
                [model]
            )  # not counted; the audit says so
            assert len(list(hooks.sites_of(model))) == 2 * BLOCKS - 1
        with pytest.raises(TypeError, match="a gathered object of Transformer Engine is not known"):
            gathered_bytes(object())


def test_what_goes_past_is_refused() -> None:
    """Userbuffers and symmetric memory of TE, with the flag and the reason."""
    spawn(refusals_worker, 2)
