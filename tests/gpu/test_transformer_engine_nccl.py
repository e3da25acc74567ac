"""Transformer Engine's layers with compressed collectives: layers, checkpoints, dimensions."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.compression.tensor_parallel.weight_gradient import fill_weight_gradient_slot
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.gpu.devices import needs, needs_transformer_engine
from tests.gpu.training import losses, train

pytestmark = [pytest.mark.multigpu, needs(2), needs_transformer_engine]

STEPS = 3
ENGINE = """--transformer-impl transformer_engine --bf16 --hidden-size 256
    --use-distributed-optimizer --no-create-attention-mask-in-dataloader"""
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


def build(rank: int, state, fuse: bool, **changes):
    """Build the tiny GPT of TE's layers.

    Args:
        rank: this rank.
        state: the run.
        fuse: GEMMs add weight gradients to an fp32 main_grad.
        changes: of the model's config.
    """
    changes |= dict(
        transformer_impl="transformer_engine", hidden_size=256, gradient_accumulation_fusion=fuse
    )
    model = build_tiny_gpt(rank, 2, state, torch.bfloat16, **changes)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return model


def trained(
    rank: int, codec: str | None, fuse: bool, **changes
) -> tuple[list[float], dict, object]:
    """Train a few iterations of gradient descent without an optimizer.

    Args:
        rank: this rank.
        codec: None leaves out our hooks.
        fuse: see ``build``.
        changes: of the model's config.

    Returns:
        Losses, last gradients, and the run.
    """
    state = run_with(codec or "none")
    model = build(rank, state, fuse, attach=codec is not None, **changes)
    parameters = dict(model.named_parameters())
    losses = []
    for step in range(STEPS):
        for parameter in parameters.values():
            parameter.grad = None
            parameter.grad_added_to_main_grad = False
            parameter.main_grad.zero_()
        loss = model(**batch(step, rank)).float().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in parameters.values():
                late = parameter.grad_added_to_main_grad
                gradient = parameter.main_grad if late else parameter.grad.float()
                parameter.main_grad = gradient
                parameter.sub_((0.5 * gradient).to(parameter.dtype))
    return losses, {name: p.main_grad.clone() for name, p in parameters.items()}, state


def engine_worker(rank: int, world_size: int) -> dict:
    start_model_parallel(world_size)
    fill_weight_gradient_slot()
    results = {}
    recipes = ("bf16", "delayed", "tensorwise")
    for recipe, parallel, fuse in itertools.product(recipes, (False, True), (False, True)):
        fp8 = {} if recipe == "bf16" else {"fp8": "hybrid", "fp8_recipe": recipe}
        changes = {"sequence_parallel": parallel, **fp8}
        results[f"{recipe} sequence_parallel={parallel} fuse={fuse}"] = checked(rank, fuse, changes)
    return results


def checked(rank: int, fuse: bool, changes: dict) -> dict:
    """Train one setting without our hooks twice, with the identity codec and with int8.

    Args:
        rank: this rank.
        fuse: see ``build``.
        changes: of the model's config.

    Returns:
        Losses, differences of gradients, kinds in the ledger, and what it does not know.
    """
    hooked = build(rank, run_with("int8"), fuse, **changes)
    bare = build(rank, run_with("none"), fuse, attach=False, **changes)
    hooked.load_state_dict(bare.state_dict())  # strict: checkpoints do not know about compression
    bare.load_state_dict(hooked.state_dict())
    run = partial(trained, rank, fuse=fuse, **changes)
    losses, gradients, _ = run(None)
    again, again_gradients, _ = run(None)
    noise = max(difference(again_gradients[name], value) for name, value in gradients.items())
    same, same_gradients, _ = run("identity")
    identity = max(difference(same_gradients[name], value) for name, value in gradients.items())
    compressed, _, state = run("int8")
    return {
        "losses": (losses, again, same, compressed),
        "noise": noise,
        "identity": identity,
        "kinds": {
            traffic: {kind for kind, (sent, _) in kinds.items() if sent}
            for traffic, kinds in state.ledger.totals().items()
        },
        "unknown": not_in_the_ledger(rank, fuse, changes),
    }


def not_in_the_ledger(rank: int, fuse: bool, changes: dict) -> list[str]:
    """Return what c10d is given in one iteration beyond what the ledger counts.

    Args:
        rank: this rank.
        fuse: see ``build``.
        changes: of the model's config.
    """
    from megatron.core import parallel_state

    from megatron.compression.communication.audit import BackendAudit

    state = run_with("int8")
    group = parallel_state.get_tensor_model_parallel_group()
    model = build(rank, state, fuse, **changes)
    with BackendAudit(state.ledger, lambda: {"tensor parallel": [group]}) as audit:
        model(**batch(0, rank)).float().mean().backward()
    sent = {}
    for (_, operation, payload), sent_bytes in audit.given.items():
        sent[f"{operation} {payload}"] = sent_bytes
    return [f"{line}; given: {sent}, counted: {state.ledger.rows()}" for line in audit.finish()]


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative L2 error."""
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))


def test_layers() -> None:
    """Losses and gradients are TE's own with the identity codec, and near with int8.

    Nothing is sent that is not counted.
    """
    for result in spawn(engine_worker, 2, backend="nccl", timeout=500):
        for name, setting in result.items():
            print(name, setting)
            losses, _, same, compressed = setting["losses"]
            # An fp32 sum rounds once.
            assert setting["identity"] <= max(2 * setting["noise"], 2e-2), name
            assert same == pytest.approx(losses, abs=5e-3), name
            assert compressed == pytest.approx(losses, abs=5e-2), name
            gathers_fp8 = "bf16" not in name and "sequence_parallel=True" in name
            allowed = {"compressed", "fp8"} if gathers_fp8 else {"compressed"}
            for traffic in ("tp.forward", "tp.backward"):
                assert setting["kinds"][traffic] == allowed, name
            assert setting["unknown"] == [], name


def run(flags: str, report: Path) -> dict:
    """Return the report of a run on two ranks."""
    return train(*ENGINE.split(), *flags.split(), processes=2, report=report)


def test_checkpoints_know_nothing_of_compression(tmp_path: Path) -> None:
    """A run goes on that is saved without --taco, loaded with it, saved again, loaded without."""
    folder = tmp_path / "checkpoints"
    saved = f"--save {folder} --load {folder} --save-interval 4 --exit-interval 4"
    flags = f"{TENSOR} --train-iters 12 {saved}"
    by_iteration = {}
    for part, codec in enumerate(("", "--taco --compression-min-mb 0", "")):
        report = run(f"{flags} {codec}", tmp_path / str(part))
        sent = report["summary"]["bytes_per_iteration"]["tp.forward"]
        assert (sent["sent"] < 0.7 * sent["uncompressed"]) == bool(codec)
        by_iteration |= losses(report)
    assert sorted(by_iteration) == list(range(1, 13))
    exact = losses(run(f"{TENSOR} --train-iters 12", tmp_path / "whole"))
    for iteration in range(1, 5):
        assert by_iteration[iteration] == pytest.approx(exact[iteration], rel=1e-3)
    assert by_iteration == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "channel"),
    [
        ("--overlap-grad-reduce --overlap-param-gather --dp-compression sdp4bit", "dp.gradient"),
        ("--pipeline-model-parallel-size 2 --pp-compression tah-quant", "pp.forward"),
    ],
)
def test_other_dimensions(flags: str, channel: str, tmp_path: Path) -> None:
    """Gradients and pipeline messages of TE's layers go compressed as those of ours do."""
    report = run(flags, tmp_path)
    pair = report["summary"]["bytes_per_iteration"][channel]
    assert 0 < pair["sent"] < 0.6 * pair["uncompressed"]
    by_iteration = losses(report)
    assert sorted(by_iteration) == [1, 2, 3, 4]
    assert by_iteration[4] < by_iteration[1]
