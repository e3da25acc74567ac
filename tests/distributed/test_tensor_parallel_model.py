"""A whole model under tensor parallelism: replicas, and a ledger that matches the transport."""

import hashlib

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    HIDDEN,
    LAYERS,
    SEQUENCE,
    batch,
    build_tiny_gpt,
    run_with,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

BATCH = 2
ITERATIONS = 50
BY_SITE = "int6;fc2=int5/int6;@1=int8;qkv@0=none"


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()


def replica_worker(
    rank: int, world_size: int, iterations: int, settings: dict | None = None
) -> tuple[list[str], float, float]:
    """Train and hash everything that tensor-parallel ranks must hold in common.

    Returns:
        Hashes (residual stream after each layer, replicated parameters) in order, first and last loss.
    """
    start_model_parallel(world_size)
    run = run_with(**(settings or {}))
    model = build_tiny_gpt(rank, world_size, run, torch.bfloat16)
    hashes: list[str] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, output: hashes.append(_digest(output[0])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replicated = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    assert len(replicated) >= 4 * LAYERS, "norms and row-parallel biases are replicated"
    losses = []
    for iteration in range(iterations):
        run.step = iteration
        loss = model(**batch(iteration % 4, rank, BATCH)).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        hashes.extend(_digest(parameter) for parameter in replicated)
    return hashes, losses[0], losses[-1]


def test_replicas_stay_identical() -> None:
    """50 iterations of bf16 training: residual stream and replicated parameters agree bit for bit."""
    (hashes, first, last), *others = spawn(replica_worker, 2, ITERATIONS)
    assert len(hashes) > ITERATIONS * LAYERS
    assert last < first - 0.5, "it must really have trained"
    for other, _, _ in others:
        assert other == hashes


def recompute_worker(rank: int, world_size: int) -> tuple[list[str], list[str], list[set[str]]]:
    """Hashes of every layer's MLP output: two micro-batches forward, then as recomputed in two backwards; and
    what parts of settings by site meet no site of the model."""
    from megatron.compression.tensor_parallel.config import TensorParallelConfig
    from megatron.compression.tensor_parallel.hooks import unmet_parts

    start_model_parallel(world_size)
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    model = build_tiny_gpt(rank, world_size, run_with(BY_SITE), torch.float32, **full)
    hashes: list[str] = []
    for layer in model.decoder.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: hashes.append(_digest(output[0])))
    losses = [model(**batch(step, rank, BATCH)).mean() for step in range(2)]
    forward, hashes[:] = list(hashes), []
    for loss in losses:
        loss.backward()
    configs = (
        TensorParallelConfig(compression=BY_SITE),
        TensorParallelConfig(
            compression="int8;fc1=int4;fc2@embedding=int4",
            backward="int8;proj@0=int4",
            layers="embedding,0",
        ),
    )
    return forward, hashes, [unmet_parts([model], config) for config in configs]


@pytest.fixture(scope="module")
def ran() -> list[tuple]:
    """By rank."""
    return spawn(recompute_worker, 2)


def test_parts_of_settings_that_no_message_goes_by(ran: list[tuple]) -> None:
    """Without sequence parallelism fc1 sends nothing forward, and the projection nothing backward."""
    idle = {f"--tp-compression {part}" for part in ("fc1=int4", "fc2@embedding=int4", "BACKWARD proj@0=int4")}
    assert [unmet for *_, unmet in ran] == [[set(), idle]] * 2


def test_recomputation_rounds_as_the_forward_did(ran: list[tuple]) -> None:
    """Two micro-batches in flight: each recomputed forward has the bits of its own first time."""
    for forward, recomputed, _ in ran:
        assert len(set(forward)) == 2 * LAYERS
        first, second = forward[:LAYERS], forward[LAYERS:]
        assert recomputed == first[::-1] + second[::-1]


def _audit_worker(rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    start_model_parallel(world_size)
    results = []
    for settings in cases:
        run = run_with(**settings)
        model = build_tiny_gpt(rank, world_size, run, torch.bfloat16)
        with TransportAudit(world_size) as audit:
            model(**batch(0, rank, BATCH)).float().mean().backward()
            run.step += 1
            model(**batch(1, rank, BATCH)).float().mean().backward()
        results.append({"audit": audit.sent, "rows": run.ledger.rows()})
    return results


def _sum(rows: list[dict], key: str, **match) -> int:
    return sum(row[key] for row in rows if all(row[name] == value for name, value in match.items()))


def test_ledger_matches_the_transport() -> None:
    """What the ledger says is what c10d was given, compressed or not; and it is the sites' hand count."""
    world_size = 2
    cases = [
        {},
        {"codec": "none"},
        {"min_mb": 1.0},
        {"start_iteration": 1},
    ]
    message = SEQUENCE * BATCH * HIDDEN * 2
    sites = 2 * LAYERS + 1  # forward: embedding, projection and fc2; backward: qkv, fc1 and the output layer
    for results in spawn(_audit_worker, world_size, cases):
        for result in results:
            assert total_of(result["rows"]) == result["audit"]
            for channel in ("tp.forward", "tp.backward"):
                plain = _sum(result["rows"], "plain_bytes", traffic=channel)
                assert plain == 2 * sites * message * 2 * (world_size - 1) // world_size
        compressed, off, small, warmup = (
            [row for row in r["rows"] if row["traffic"] != "tp.other"] for r in results
        )
        assert {row["kind"] for row in compressed} == {"compressed"}
        assert {row["kind"] for row in off} == {"off"}
        assert {row["kind"] for row in small} == {"small"}
        plain = [_sum(warmup, "plain_bytes", kind=kind) for kind in ("warmup", "compressed")]
        assert plain[0] == plain[1] > 0, "one iteration each"
        sent = _sum(compressed, "sent_bytes", traffic="tp.forward")
        assert sent * 16 == _sum(compressed, "plain_bytes", traffic="tp.forward") * 8.5, "8.5 bits a value"


def frozen_worker(rank: int, world_size: int, sequence_parallel: bool) -> list[tuple]:
    """What was sent and counted with an embedding and a first layer that do not train: each setting once."""
    start_model_parallel(world_size)
    results = []
    for settings in ({"codec": "none"}, {}, {"layers": "1"}):
        run = run_with(**settings)
        model = build_tiny_gpt(rank, world_size, run, torch.float32, sequence_parallel=sequence_parallel)
        frozen = (model.embedding, model.decoder.layers[0], model.decoder.layers[1].mlp.linear_fc1)
        for module in frozen:
            module.requires_grad_(False)
        with TransportAudit(world_size) as audit:
            model(**batch(0, rank, BATCH)).mean().backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
        results.append((audit.sent, total_of(run.ledger.rows())))
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_layers_send_what_is_counted(sequence_parallel: bool) -> None:
    """Nothing is counted for backwards that never come."""
    for results in spawn(frozen_worker, 2, sequence_parallel):
        for sent, counted in results:
            assert sent == counted


def recomputed_mlp_worker(rank: int, world_size: int) -> None:
    """The gradients with a recomputed MLP, biases and all, are those without, bit for bit."""
    start_model_parallel(world_size)
    gradients = []
    for changes in ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}):
        model = build_tiny_gpt(rank, world_size, run_with(), torch.float32, **changes)
        model(**batch(0, rank, 1)).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_recomputed_mlp() -> None:
    """``--recompute-modules mlp``, whose backward ran in a circle for ever, on one rank as well."""
    for ranks in (1, 2):
        spawn(recomputed_mlp_worker, ranks, timeout=60)
