"""Gradient accumulation fusion by torch's GEMMs, of megatron-core's layers and ours, under DDP.

Four ranks, TP 2 x DP 2 (distributed optimizer, gradients reduced behind the backward) and
TP 2 x PP 2: each case is trained without fusion and with it.
"""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch

from tests.distributed.spawn import spawned
from tests.distributed.test_pipeline_schedules import ASYNC, Case, _batches, _build, _forward_step
from tests.distributed.tiny_gpt import FULL, batch, build_tiny_gpt, run_with

ITERATIONS = 2
MICRO_BATCHES = 2
LINEAR = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"}


@dataclass(frozen=True)
class Setup:
    """A training; int6 of bf16 weights unless it says otherwise."""

    codec: dict = field(default_factory=lambda: {"codec": "int6"})  # of ``run_with``
    changes: dict = field(default_factory=dict)  # of the ``TransformerConfig``, and ``tied``
    dtype: torch.dtype = torch.bfloat16
    fp32_gradients: bool = True
    fused: frozenset = frozenset(LINEAR)  # layers whose weights are to be fused
    frozen: str = ""  # parameters with this in their names are frozen


TIED = frozenset(LINEAR - {"output_layer"} | {"word_embeddings"})
SETUPS = {
    "uncompressed": Setup({"codec": "none"}),
    "fp32 weights": Setup(dtype=torch.float32),
    "sequence parallel": Setup(changes=dict(sequence_parallel=True)),
    "recomputed, one of two layers": Setup({"codec": "int6", "layers": "0"}, FULL),
    "tied": Setup(changes=dict(tied=True), fused=TIED),
    "frozen": Setup(frozen="fc2", fused=frozenset(LINEAR - {"linear_fc2"})),
    "recomputed": Setup({"codec": "none"}, FULL, torch.float32),
    "recomputed in halves": Setup({"codec": "none", "overlap": "halves"}, FULL, torch.float32),
    "MLP recomputed in halves": Setup(
        {"codec": "none", "overlap": "halves"},
        dict(recompute_granularity="selective", recompute_modules=["mlp"]),
        torch.float32,
    ),
    "bf16 gradients": Setup(fp32_gradients=False),
    "CAAT-Net": Setup(
        {"codec": "int6", "sync_fraction": 0.5},
        fused=frozenset(LINEAR - {"linear_proj", "linear_fc2"}),
    ),
}


NAMES = [*SETUPS, "virtual stages"]


def setup_of(name: str) -> Setup:
    """Return the setup of a case; virtual stages are in fp32."""
    return SETUPS.get(name, Setup(dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_only_the_layers_that_should_are_fused(results, name: str) -> None:
    for rank in results:
        unfused_layers, _, _ = rank[name][False]
        fused_layers, _, _ = rank[name][True]
        assert not unfused_layers
        assert fused_layers <= setup_of(name).fused
        if name != "virtual stages":  # of which a rank has some
            assert fused_layers == setup_of(name).fused


@pytest.mark.parametrize("name", NAMES)
def test_fused_gradients_are_the_unfused_ones(results, name: str) -> None:
    """In bf16, fusion leaves out one rounding a micro-batch."""
    setup = setup_of(name)
    if setup.dtype == torch.float32:
        tolerance = 2e-6  # another order of sums
    elif setup.fp32_gradients:
        tolerance = 2**-7
    else:
        tolerance = 2**-6
    for rank in results:
        _, unfused, _ = rank[name][False]
        _, fused, _ = rank[name][True]
        assert unfused
        assert unfused.keys() == fused.keys()
        for parameter, gradient in unfused.items():
            difference = (fused[parameter] - gradient).abs().max()
            assert float(difference / gradient.abs().max()) <= tolerance, parameter


@pytest.mark.parametrize("name", NAMES)
def test_fused_losses_are_the_unfused_ones(results, name: str) -> None:
    tolerance = 1e-4 if setup_of(name).dtype == torch.float32 else 2e-3
    for rank in results:
        _, _, unfused = rank[name][False]
        _, _, fused = rank[name][True]
        assert fused == pytest.approx(unfused, rel=tolerance)


def test_halves_are_added_before_ranks_sum_them(results) -> None:
    """DDP's hook runs once for both halves of a micro-batch, be they recomputed."""
    for rank in results:
        _, complete, _ = rank["recomputed"][True]
        for name in ("recomputed in halves", "MLP recomputed in halves"):
            _, halves, _ = rank[name][True]
            for parameter, gradient in complete.items():
                difference = (halves[parameter] - gradient).abs().max()
                assert difference <= 2e-6 * gradient.abs().max(), (name, parameter)


def worker(rank: int, world_size: int) -> dict:
    """All cases."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron.compression.tensor_parallel.weight_gradient import fill_weight_gradient_slot

    fill_weight_gradient_slot()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    results = {
        name: {fusion: _train(rank, setup, fusion) for fusion in (False, True)}
        for name, setup in SETUPS.items()
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 2, virtual_pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    results["virtual stages"] = {fusion: _pipeline(rank, fusion) for fusion in (False, True)}
    return results


def _train(rank: int, setup: Setup, fusion: bool) -> tuple:
    """Two iterations; the gradients are the first one's."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    changes = dict(setup.changes, gradient_accumulation_fusion=fusion)
    run = run_with(**setup.codec)
    model = build_tiny_gpt(rank, 2, run, setup.dtype, **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not setup.frozen or setup.frozen not in name)
    wrapped = _wrapped(model, setup.fp32_gradients)
    settings = dict(params_dtype=setup.dtype, bf16=setup.dtype == torch.bfloat16, lr=2e-3)
    settings |= dict(use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), [wrapped])
    copy = parallel_state.get_data_parallel_rank()
    losses = []
    first = None
    for iteration in range(ITERATIONS):
        run.step = iteration
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            inputs = batch(4 * iteration + 2 * number + copy, rank)
            with contextlib.nullcontext() if number == MICRO_BATCHES - 1 else wrapped.no_sync():
                loss = wrapped(**inputs).float().mean()
                loss.backward()
            losses.append(float(loss.detach()))
        (model.config.finalize_model_grads_func or finalize_model_grads)([wrapped])
        first = first or (_fused(model), _gradients(model))
        optimizer.step()
    return *first, losses


def _pipeline(rank: int, fusion: bool) -> tuple:
    """Two chunks on each of two stages, four micro-batches: interleaved 1F1B."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.compression.tensor_parallel import hooks

    changes = dict(ASYNC, gradient_accumulation_fusion=fusion)
    chunks = _build(rank, Case("", 2, tensor=2, virtual=2, changes=changes))
    run = run_with("int6")
    losses = []
    hooks.TensorParallel(run.config, run).attach(chunks)
    wrapped = [_wrapped(chunk, True) for chunk in chunks]
    sizes = dict(num_microbatches=4, seq_length=32, micro_batch_size=2, forward_only=False)
    data = [_batches(rank) for _ in chunks]
    step = _forward_step(losses, 1.0)
    get_forward_backward_func()(forward_step_func=step, data_iterator=data, model=wrapped, **sizes)
    model = torch.nn.ModuleList(chunks)
    return _fused(model), _gradients(model), losses


def _wrapped(model: torch.nn.Module, fp32_gradients: bool):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    on = dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"), True
    )
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32_gradients, bucket_size=20_000, **on
    )
    return DistributedDataParallel(model.config, settings, model)


def _fused(model: torch.nn.Module) -> set[str]:
    """Layers whose weights' gradients came into main_grad without DDP's hook."""
    names = (
        name for name, p in model.named_parameters() if getattr(p, "grad_added_to_main_grad", False)
    )
    return {name.split(".")[-2] for name in names}


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: parameter.main_grad.float().cpu().clone() for name, parameter in trained}


results = spawned(worker, 4)
"""By rank: {case: {fusion: (fused layers, {parameter: main_grad}, losses)}}."""
