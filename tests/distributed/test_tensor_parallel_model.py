"""A whole model under tensor parallelism: replicas, and a ledger that matches the transport."""

import hashlib
import itertools
from collections import Counter

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


def audit_worker(rank: int, world_size: int) -> dict[tuple, tuple]:
    """By case: what the transport was given in two iterations, and what the ledger says."""
    start_model_parallel(world_size)
    results = {}
    for sequence_parallel, name, trained in itertools.product((False, True), CASES, (True, False)):
        run = run_with(**CASES[name])
        model = build_tiny_gpt(rank, world_size, run, torch.bfloat16, sequence_parallel=sequence_parallel)
        if not trained:
            frozen = model.embedding, model.decoder.layers[0], model.decoder.layers[1].mlp.linear_fc1
            for module in frozen:
                module.requires_grad_(False)
        with TransportAudit(world_size) as audit:
            for run.step in range(2):
                model(**batch(run.step, rank, BATCH)).float().mean().backward()
        got = {name for name, p in model.named_parameters() if p.grad is not None}
        assert got == {name for name, p in model.named_parameters() if p.requires_grad}
        results[sequence_parallel, name, trained] = audit.sent, run.ledger.rows()
    return results


CASES = {
    "compressed": {},
    "off": {"codec": "none"},
    "small": {"min_mb": 1.0},
    "warmup": {"start_iteration": 1},
    "a layer": {"layers": "1"},
}
MESSAGE = SEQUENCE * BATCH * HIDDEN * 2  # the whole sequence in bf16
# Messages of one size over all ranks. With sequence parallelism a layer gathers before qkv and fc1 and
# scatters after the projection and fc2; the backward does the opposite and gathers the inputs of qkv and fc1
# again. The embedding reduces (learned positions are added before the split) and its backward gathers; the
# output layer gathers, and its backward gathers again and scatters.
MESSAGES = {
    (False, "tp.forward"): {"all_reduce": 2 * LAYERS + 1},
    (False, "tp.backward"): {"all_reduce": 2 * LAYERS + 1},
    (True, "tp.forward"): {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS, "all_reduce": 1},
    (True, "tp.backward"): {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 2 * LAYERS + 1},
}
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (W-1)/W


@pytest.fixture(scope="module")
def audited() -> list[dict]:
    """By rank."""
    return spawn(audit_worker, 2)


def test_ledger_matches_the_transport(audited: list[dict]) -> None:
    """What the ledger says is what c10d was given: compressed or not, trained or frozen in part."""
    for results in audited:
        for case, (sent, rows) in results.items():
            assert total_of(rows) == sent, case


@pytest.mark.parametrize("channel", ["tp.forward", "tp.backward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_are_the_hand_count(audited: list[dict], sequence_parallel: bool, channel: str) -> None:
    """Uncompressed for one reason, or all payload of 8.5 bits; of a warm-up iteration each."""
    wanted = {
        operation: 2 * count * FACTORS[operation] * MESSAGE // 2
        for operation, count in MESSAGES[sequence_parallel, channel].items()
    }
    for results in audited:
        for name in ("compressed", "off", "small", "warmup"):
            rows = [row for row in results[sequence_parallel, name, True][1] if row["traffic"] == channel]
            kinds = {"warmup", "compressed"} if name == "warmup" else {name}
            assert {row["kind"] for row in rows} == kinds
            for kind in kinds:
                stands_for: Counter[str] = Counter()
                for row in rows:
                    if row["kind"] == kind and row["plain_bytes"]:
                        stands_for[row["operation"].removeprefix("instead_of_")] += row["plain_bytes"]
                share = 2 if len(kinds) == 2 else 1
                assert stands_for == {operation: size // share for operation, size in wanted.items()}
            if name == "compressed":
                assert sum(row["sent_bytes"] for row in rows) * 16 == sum(wanted.values()) * 8.5


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
