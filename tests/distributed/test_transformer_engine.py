"""Transformer Engine's layers with compressed collectives, on stand-ins of its layers.

tests/gpu has the same with Transformer Engine itself.
"""

import contextlib
import functools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import run_with, start_model_parallel

STAND_IN = Path(__file__).parent / "stand_in"
HIDDEN = 64
WIDE = 256
TOKENS = 32
BLOCKS = 3
MICRO_BATCHES = 2


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
    """Run two micro-batches forward and backward.

    Args:
        model: this rank's part.
        rank: this rank of two.
        sequence_parallel: the rank's input is its half of the tokens.
        recompute: activations are recomputed in the backward pass.

    Returns:
        Each output, each input's gradient and each weight's gradient by name.
    """
    result = {}
    for step in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        if sequence_parallel:
            x = x.chunk(2)[rank]
        x = x.clone().requires_grad_()
        if recompute:
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        else:
            out = model(x)
        out.sin().sum().backward()
        result[f"output {step}"] = out.detach()
        result[f"gradient {step}"] = x.grad
    is_fused = model.blocks[0].linear_fc1.fuse_wgrad_accumulation
    for name, parameter in model.named_parameters():
        result[name] = parameter.main_grad if is_fused else parameter.grad
    return result


@contextlib.contextmanager
def stand_in():
    """Let the stand-in be ``transformer_engine``, and yield the ranks' group.

    megatron-core has been imported before and goes without it.
    """
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
def test_layers_store_stays_where_megatron_defers_weight_gradients(config: dict) -> None:
    """Megatron's schedule or a graph computes what the layer's own store has deferred."""
    from megatron.compression.transformer_engine.hooks import TransformerEngineLayers

    layers = TransformerEngineLayers(run_with("int8"))
    module = torch.nn.Module()
    layers_store = object()
    vars(module).update(
        tp_group=None,
        parallel_mode="row",
        sequence_parallel=False,
        wgrad_store=layers_store,
        fuse_wgrad_accumulation=True,
        use_bias=False,
        config=SimpleNamespace(**config),
    )
    layers.attach(module, "decoder.layers.0.mlp.linear_fc2", 0)
    assert (module.wgrad_store is layers_store) == bool(config)


@dataclass(frozen=True)
class Layers:
    """How the layers run."""

    sequence_parallel: bool
    fuse: bool
    """The weights' gradients are added to ``main_grad``."""
    recompute: bool


SETTINGS = {
    "fused": Layers(sequence_parallel=False, fuse=True, recompute=False),
    "sequence parallel": Layers(sequence_parallel=True, fuse=False, recompute=False),
    "recomputed": Layers(sequence_parallel=True, fuse=True, recompute=True),
}


def layers_worker(rank: int, world_size: int, layers: Layers) -> dict:
    """Train without hooks, with each codec, and with a codec for other layers.

    Returns:
        {codec: results of ``trained``}, and the ledgers of "none" and "taco".
    """
    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks

        def run(codec: str | None, **settings) -> tuple[dict, object]:
            model = Model(rank, group, sequence_parallel=layers.sequence_parallel, fuse=layers.fuse)
            state = None
            if codec is not None:
                state = run_with(codec, **settings)
                hooks.TensorParallel(state.config, state).attach([model])
            return trained(model, rank, layers.sequence_parallel, layers.recompute), state

        without_hooks, _ = run(None)
        counted, counting_run = run("none")
        identity, _ = run("identity")
        taco, taco_run = run("taco")
        embedding_alone, _ = run("taco", layers="embedding")
        return {
            "without hooks": without_hooks,
            "none": counted,
            "identity": identity,
            "taco": taco,
            "embedding alone": embedding_alone,
            "messages": counting_run.ledger.tallies,
            "totals": counting_run.ledger.totals(),
            "taco totals": taco_run.ledger.totals(),
        }


@functools.cache
def layers_results(name: str) -> list[dict]:
    """Return the results of ``layers_worker`` by rank."""
    return spawn(layers_worker, 2, SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_counting_changes_no_bit(name: str) -> None:
    for rank in layers_results(name):
        for tensor, value in rank["without hooks"].items():
            assert torch.equal(rank["none"][tensor], value), tensor


@pytest.mark.parametrize("name", SETTINGS)
def test_codec_for_other_layers_changes_no_bit(name: str) -> None:
    for rank in layers_results(name):
        for tensor, value in rank["without hooks"].items():
            assert torch.equal(rank["embedding alone"][tensor], value), tensor


@pytest.mark.parametrize("name", SETTINGS)
def test_identity_codec_computes_what_the_layers_do(name: str) -> None:
    """Only the order of sums differs."""
    for rank in layers_results(name):
        for tensor, value in rank["without hooks"].items():
            torch.testing.assert_close(
                rank["identity"][tensor], value, rtol=1e-5, atol=1e-5, msg=tensor
            )


@pytest.mark.parametrize("name", SETTINGS)
def test_taco_computes_nearly_what_the_layers_do(name: str) -> None:
    for rank in layers_results(name):
        for tensor, value in rank["without hooks"].items():
            error = float((rank["taco"][tensor] - value).norm() / value.norm())
            assert 1e-4 < error < 0.2, (tensor, error)


@pytest.mark.parametrize("name", SETTINGS)
def test_uncompressed_messages_are_as_many_and_as_large_as_they_should(name: str) -> None:
    layers = SETTINGS[name]
    tensor_bytes = TOKENS * HIDDEN * 4
    # The backward pass gathers a row-parallel layer's gradient and a column-parallel layer's input.
    calls_per_block = {
        ("tp.forward", "all_reduce"): 1,
        ("tp.backward", "all_reduce"): 1,
        ("tp.forward", "reduce_scatter"): 1,
        ("tp.backward", "reduce_scatter"): 1,
        ("tp.forward", "all_gather"): 1,
        ("tp.backward", "all_gather"): 2,
    }
    # Bytes that a rank of two sends, as a share of the whole tensor.
    share = {"all_reduce": 1, "reduce_scatter": 0.5, "all_gather": 0.5}
    for rank in layers_results(name):
        operations = set()
        for (phase, traffic, kind, operation, _), tally in rank["messages"].items():
            passes = MICRO_BATCHES
            if traffic == "tp.forward" and layers.recompute:
                passes = 2 * MICRO_BATCHES
            assert (phase, kind) == ("train", "off")
            assert tally.calls == passes * BLOCKS * calls_per_block[traffic, operation]
            assert tally.sent == tally.calls * tensor_bytes * share[operation]
            operations.add(operation)
        if layers.sequence_parallel:
            assert operations == {"all_gather", "reduce_scatter"}
        else:
            assert operations == {"all_reduce"}


@pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward"])
@pytest.mark.parametrize("name", SETTINGS)
def test_taco_compresses_every_message(name: str, traffic: str) -> None:
    for rank in layers_results(name):
        kinds = rank["taco totals"][traffic]
        assert {kind for kind, (sent, _) in kinds.items() if sent} == {"compressed"}
        sent, uncompressed = kinds["compressed"]
        assert sent < 0.3 * uncompressed  # fp32 in fp8
        assert uncompressed == sum(total for _, total in rank["totals"][traffic].values())


def fp8_worker(rank: int, world_size: int) -> dict:
    """Train layers in fp8 without a codec, through the identity codec and through int8.

    Returns:
        {codec: results of ``trained``}, the ledger's totals of int8, and reduced magnitudes.
    """
    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks

        results = {}
        for codec in ("none", "identity", "int8"):
            model = Model(rank, group, sequence_parallel=True, fuse=True, fp8=True)
            state = run_with(codec)
            if codec != "none":
                hooks.TensorParallel(state.config, state).attach([model])
            results[codec] = trained(model, rank, True)
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        magnitudes = torch.full((12,), float(rank))
        FP8GlobalStateManager.reduce_tensor_across_group_op_max(magnitudes, group)
        results["magnitudes"] = magnitudes
        results["int8 totals"] = state.ledger.totals()
        return results


@functools.cache
def fp8_results() -> list[dict]:
    """Return the results of ``fp8_worker`` by rank."""
    return spawn(fp8_worker, 2)


# Bytes that a rank sends in all gathers of one kind: half of the tokens, a byte a value.
FP8_GATHERS = TOKENS * HIDDEN // 2 * MICRO_BATCHES * BLOCKS


def test_magnitudes_of_fp8_are_reduced_and_counted() -> None:
    for rank in fp8_results():
        assert rank["magnitudes"].eq(1).all()
        assert rank["int8 totals"]["tp.other"]["exact"] == (48, 48)  # 12 fp32 values


def test_identity_codec_computes_what_fp8_layers_do() -> None:
    for rank in fp8_results():
        for tensor, value in rank["none"].items():
            torch.testing.assert_close(
                rank["identity"][tensor], value, rtol=1e-5, atol=1e-5, msg=tensor
            )


@pytest.mark.parametrize(("traffic", "gathers"), [("tp.forward", 1), ("tp.backward", 2)])
def test_gathers_in_fp8_pass_as_they_are(traffic: str, gathers: int) -> None:
    sent = gathers * FP8_GATHERS
    for rank in fp8_results():
        assert rank["int8 totals"][traffic]["fp8"] == (sent, sent)


@pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward"])
def test_reduce_scatters_beside_fp8_are_compressed(traffic: str) -> None:
    for rank in fp8_results():
        kinds = rank["int8 totals"][traffic]
        assert {kind for kind, (sent, _) in kinds.items() if sent} == {"compressed", "fp8"}
        _, uncompressed = kinds["compressed"]
        assert uncompressed == 4 * FP8_GATHERS  # they are in fp32


def order_worker(rank: int, world_size: int) -> dict[bool, list[str]]:
    """Return the order of exchanges and weight gradients, by use of sequence parallelism."""
    orders = {}
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
            backward = [event for event in order if not event.endswith("forward")]
            orders[sequence_parallel] = backward[: len(backward) // MICRO_BATCHES]
    return orders


def noting_launch(launch, order: list) -> None:
    order.append("weight gradient")
    launch()


def noting(message, order: list):
    """Wrap a site's ``message`` to note the operation that is about to start."""

    def wrapper(traffic: str, operation: str, nbytes: int):
        order.append(operation if traffic == "tp.backward" else f"{operation} forward")
        return message(traffic, operation, nbytes)

    return wrapper


@functools.cache
def orders() -> list[dict[bool, list[str]]]:
    """Return the results of ``order_worker`` by rank."""
    return spawn(order_worker, 2)


def test_weight_gradients_run_behind_all_reduces() -> None:
    """One weight gradient is computed behind each exchange of the backward pass."""
    for rank in orders():
        assert rank[False] == ["all_reduce", "weight gradient"] * BLOCKS


def test_weight_gradients_run_behind_exchanges_of_sequence_parallelism() -> None:
    for rank in orders():
        expected = ["all_gather"]  # of the last block, whose gradients come first: none waits yet
        expected += ["all_gather", "reduce_scatter", "weight gradient"]
        for _ in range(BLOCKS - 1):
            expected += ["all_gather", "weight gradient", "all_gather"]
            expected += ["reduce_scatter", "weight gradient"]
        expected.append("weight gradient")  # what is left at the end of the pass
        assert rank[True] == expected


REFUSED = {
    "symmetric_ar_type": ("two_shot", "--symmetric-ar-type"),
    "ub_overlap_ag_fprop": (True, "--tp-comm-overlap"),
}
"""Settings of a layer with which TE communicates past its functions: value, Megatron's flag."""


def refusals_worker(rank: int, world_size: int) -> dict[str, dict]:
    """Attach to models with one layer of each setting.

    Returns:
        By setting: the error's text with a codec, and the number of sites without one.
    """
    results = {}
    with stand_in() as group:
        from megatron.compression.errors import CompressionConfigError
        from megatron.compression.tensor_parallel import hooks

        for name, (value, _) in REFUSED.items():
            model = Model(rank, group)
            setattr(model.blocks[1].linear_fc2, name, value)
            state = run_with("taco")
            with pytest.raises(CompressionConfigError) as refused:
                hooks.TensorParallel(state.config, state).attach([model])
            state = run_with("none")
            hooks.TensorParallel(state.config, state).attach([model])
            sites = len(list(hooks.sites_of(model)))
            results[name] = {"error": str(refused.value), "sites": sites}
    return results


@functools.cache
def refusals() -> list[dict[str, dict]]:
    """Return the results of ``refusals_worker`` by rank."""
    return spawn(refusals_worker, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_codec_refuses_a_layer_that_communicates_past_it(name: str) -> None:
    _, flag = REFUSED[name]
    for rank in refusals():
        assert f"blocks.1.linear_fc2: {flag}" in rank[name]["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_without_codec_such_a_layer_is_not_counted(name: str) -> None:
    """The audit of the first iteration names its bytes."""
    for rank in refusals():
        assert rank[name]["sites"] == 2 * BLOCKS - 1


def test_unknown_gathered_object_is_refused() -> None:
    from megatron.compression.transformer_engine.hooks import gathered_bytes

    with pytest.raises(TypeError, match="a gathered object of Transformer Engine is not known"):
        gathered_bytes(object())
