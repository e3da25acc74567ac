"""Transformer Engine's own layers with compressed collectives, TP 2."""

import importlib.util
import itertools
from functools import partial

import pytest
import torch

from megatron.compression.torch_native.weight_gradient import fill_weight_gradient_slot
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.gpu.devices import DEVICES

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(DEVICES < 2, reason="needs 2 CUDA devices"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine: scripts/setup.sh --with-transformer-engine",
    ),
]

STEPS = 3


def build(rank: int, state, fuse: bool, **changes):
    """The tiny GPT of TE's layers, whose GEMMs may add to an fp32 main_grad."""
    model = build_tiny_gpt(
        rank,
        2,
        state,
        torch.bfloat16,
        transformer_impl="transformer_engine",
        hidden_size=256,
        gradient_accumulation_fusion=fuse,
        **changes,
    )
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return model


def trained(rank: int, codec: str | None, fuse: bool, **changes) -> tuple[list[float], dict, object]:
    """A few iterations of plain gradient descent: losses, last gradients, and the run's state."""
    state = run_with(codec or "none")
    model = build(rank, state, fuse, attach=codec is not None, **changes)
    parameters = dict(model.named_parameters())
    losses = []
    for step in range(STEPS):
        for parameter in parameters.values():
            parameter.grad, parameter.grad_added_to_main_grad = None, False
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
    settings = itertools.product(
        ({}, {"fp8": "hybrid", "fp8_recipe": "delayed"}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        (False, True),
        (False, True),
    )
    return {
        f"{fp8.get('fp8_recipe', 'bf16')} sequence_parallel={parallel} fuse={fuse}": checked(
            rank, fuse, {"sequence_parallel": parallel, **fp8}
        )
        for fp8, parallel, fuse in settings
    }


def checked(rank: int, fuse: bool, changes: dict) -> dict:
    """One setting: without our hooks twice, with them and no loss, with int8; what is counted."""
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
            traffic: {kind: sent for kind, (sent, _) in kinds.items() if sent}
            for traffic, kinds in state.ledger.totals().items()
        },
        "unknown": not_in_the_ledger(rank, fuse, changes),
    }


def not_in_the_ledger(rank: int, fuse: bool, changes: dict) -> list[str]:
    """What c10d is given in one iteration beyond what the ledger counts, and what it is given in all."""
    from megatron.core import parallel_state

    from megatron.compression.communication.audit import BackendAudit

    state = run_with("int8")
    group = parallel_state.get_tensor_model_parallel_group()
    model = build(rank, state, fuse, **changes)
    with BackendAudit(state.ledger, lambda: {"tensor parallel": [group]}) as audit:
        model(**batch(0, rank)).float().mean().backward()
    given = {f"{operation} {payload}": sent for (_, operation, payload), sent in audit.given.items()}
    return [f"{line}; given: {given}, counted: {state.ledger.rows()}" for line in audit.finish()]


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))


def test_layers() -> None:
    """Identity codec: TE's own losses and gradients. int8: near, and nothing is sent that is not counted."""
    for result in spawn(engine_worker, 2, backend="nccl", timeout=500):
        for name, found in result.items():
            print(name, found)
            losses, _, same, compressed = found["losses"]
            assert found["identity"] <= max(2 * found["noise"], 2e-2), name  # an fp32 sum rounds once
            assert same == pytest.approx(losses, abs=5e-3), name
            assert compressed == pytest.approx(losses, abs=5e-2), name
            gathers_fp8 = "bf16" not in name and "sequence_parallel=True" in name
            allowed = {"compressed", "fp8"} if gathers_fp8 else {"compressed"}
            for traffic in ("tp.forward", "tp.backward"):
                assert set(found["kinds"][traffic]) == allowed, name
            assert found["unknown"] == [], name
