"""Halves of blocks in turn on CUDA devices over NCCL: losses, gradients, equal bits each time.

Gradients are added to main_grad by their GEMMs, under Megatron's DDP; exchanges are under way
meanwhile, so a wait that is missing would show in the bits.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawned
from tests.distributed.test_weight_gradients import FULL, _gradients, _wrapped
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.gpu.devices import needs

pytestmark = [pytest.mark.multigpu, needs(2)]

MODEL = dict(
    num_layers=4, hidden_size=1024, num_attention_heads=16, gradient_accumulation_fusion=True
)
SEQUENCES = 256  # of 32 tokens: messages of 16 MiB
REPEATED = 3
CASES = {
    "uncompressed": ({"codec": "none"}, {}),
    "int6, sequence parallel": (
        {"codec": "int6", "transport": "collective"},
        dict(sequence_parallel=True),
    ),
    "int6, recomputed": ({"codec": "int6", "transport": "collective"}, FULL),
    "outliers, dropout": ({"codec": "int6:outliers=on"}, dict(hidden_dropout=0.1)),
    "int6, MLP and norms recomputed": (
        {"codec": "int6", "transport": "collective"},
        dict(recompute_granularity="selective", recompute_modules=["layernorm", "mlp"]),
    ),
    "one kernel": ({"codec": "int6", "transport": "auto"}, {}),
}
"""Settings of ``run_with``, and of the model."""


class Step(NamedTuple):
    """Losses of two micro-batches, and their gradients in main_grad."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def _step(rank: int, world_size: int, settings: dict, changes: dict) -> Step:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnBackend

    run = run_with(**settings)
    # Fused attention differs each time.
    changes = {**MODEL, "attention_backend": AttnBackend.unfused, **changes}
    model = build_tiny_gpt(rank, world_size, run, torch.bfloat16, **changes)
    wrapped = _wrapped(model, fp32_gradients=True)
    wrapped.zero_grad_buffer()
    tensor_parallel.model_parallel_cuda_manual_seed(77, force_reset_rng=True)
    losses = []
    with wrapped.no_sync():
        for number in range(2):
            loss = wrapped(**batch(number, rank, SEQUENCES)).float().mean()
            loss.backward()
            losses.append(float(loss.detach()))
    for parameter in model.parameters():  # as Megatron does
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.main_grad)
    return Step(losses, _gradients(model))


def worker(rank: int, world_size: int) -> dict[str, tuple[Step, list[Step]]]:
    """Return by case the step without halves, and steps with halves, repeated."""
    start_model_parallel(world_size)
    from megatron.compression.tensor_parallel.weight_gradient import fill_weight_gradient_slot

    fill_weight_gradient_slot()
    # Only then has the embedding's gradient the same bits each time. Memory that is not written is
    # NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = {}
    for name, (settings, changes) in CASES.items():
        # megatron-core recomputes norms with Transformer Engine alone.
        without = {} if "recompute_modules" in changes else changes
        serial = _step(rank, world_size, settings, without)
        halved = settings | {"overlap": "halves"}
        halves = [_step(rank, world_size, halved, changes) for _ in range(REPEATED)]
        results[name] = serial, halves
    return results


results = spawned(worker, 2, backend="nccl")


@pytest.mark.parametrize("case", CASES)
def test_halves_compute_what_the_whole_does(results: list[dict], case: str) -> None:
    """They do to the rounding of bf16 sums and of codes."""
    is_lossy = "uncompressed" not in case
    for rank in results:
        serial, (halves, *_) = rank[case]
        assert halves.losses == pytest.approx(serial.losses, rel=4e-3 if is_lossy else 1e-3)
        for name, gradient in serial.gradients.items():
            difference = (halves.gradients[name] - gradient).norm() / gradient.norm()
            assert 0 <= float(difference) < (0.15 if is_lossy else 0.03), f"{name} {difference}"


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_equal_losses(results: list[dict], case: str) -> None:
    _, (expected, *_) = results[0][case]
    for rank in results:
        _, (halves, *_) = rank[case]
        assert halves.losses == expected.losses


@pytest.mark.parametrize("case", CASES)
def test_repeated_steps_have_equal_bits(results: list[dict], case: str) -> None:
    for rank in results:
        _, (first, *repeated) = rank[case]
        for step in repeated:
            assert step.losses == first.losses
            for name, gradient in first.gradients.items():
                assert torch.equal(step.gradients[name], gradient), name
