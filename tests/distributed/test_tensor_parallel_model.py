"""A whole model under tensor parallelism: replicas, and a ledger that matches the transport."""

import itertools
from collections import Counter

import pytest
import torch

from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_ddp import digest
from tests.distributed.tiny_gpt import (
    FULL,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    batch,
    build_tiny_gpt,
    replicated,
    run_with,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

BATCH = 2
ITERATIONS = 50
BY_SITE = "int6;fc2=int5/int6;@1=int8;qkv@0=none"


def replica_worker(rank: int, world_size: int, iterations: int) -> tuple[list[str], float, float]:
    """Train and hash everything that tensor-parallel ranks must hold in common.

    Returns:
        Hashes (residual stream after each layer, replicated parameters), first and last loss.
    """
    start_model_parallel(world_size)
    run = run_with()
    model = build_tiny_gpt(rank, world_size, run, torch.bfloat16)
    hashes: list[str] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, output: hashes.append(digest(output[0])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    in_common = replicated(model).values()
    assert len(in_common) >= 4 * LAYERS, "norms and row-parallel biases are replicated"
    losses = []
    for iteration in range(iterations):
        run.step = iteration
        loss = model(**batch(iteration % 4, rank, BATCH)).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        hashes.extend(digest(parameter) for parameter in in_common)
    return hashes, losses[0], losses[-1]


def test_replicas_stay_identical() -> None:
    """Residual stream and replicated parameters agree bit for bit over 50 iterations in bf16."""
    (hashes, first, last), (second_hashes, _, _) = spawn(replica_worker, 2, ITERATIONS)
    assert len(hashes) > ITERATIONS * LAYERS
    assert last < first - 0.5, "it must really have trained"
    assert second_hashes == hashes


def recompute_worker(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Hashes of the MLPs' outputs in two forwards, and in their recomputation."""
    start_model_parallel(world_size)
    model = build_tiny_gpt(rank, world_size, run_with(BY_SITE), torch.float32, **FULL)
    hashes: list[str] = []
    for layer in model.decoder.layers:
        layer.mlp.register_forward_hook(
            lambda module, args, output: hashes.append(digest(output[0]))
        )
    losses = [model(**batch(step, rank, BATCH)).mean() for step in range(2)]
    forward = list(hashes)
    hashes.clear()
    for loss in losses:
        loss.backward()
    return forward, hashes


def test_recomputed_forwards_have_the_bits_of_the_first() -> None:
    """Of two micro-batches in flight, whose layers are recomputed from the last to the first."""
    for forward, recomputed in spawn(recompute_worker, 2):
        assert len(set(forward)) == 2 * LAYERS
        assert recomputed == forward[:LAYERS][::-1] + forward[LAYERS:][::-1]


def unmet_parts_worker(rank: int, world_size: int, settings: dict) -> set[str]:
    """The parts of these settings that name nothing which the tiny model sends, by their flags."""
    from megatron.compression.names import FLAG_NAMES
    from megatron.compression.tensor_parallel.config import TensorParallelConfig
    from megatron.compression.tensor_parallel.hooks import unmet_parts

    start_model_parallel(world_size)
    model = build_tiny_gpt(rank, world_size, run_with(BY_SITE), torch.float32)
    parts = unmet_parts([model], TensorParallelConfig(**settings))
    return {FLAG_NAMES.resolve(part) for part in parts}


def test_parts_of_settings_that_meet_sites() -> None:
    assert spawn(unmet_parts_worker, 2, {"compression": BY_SITE}) == [set(), set()]


def test_parts_of_settings_that_meet_no_site() -> None:
    """Without sequence parallelism fc1 sends nothing forward, the projection nothing backward."""
    settings = {
        "compression": "int8;fc1=int4;fc2@embedding=int4",
        "backward": "int8;proj@0=int4",
        "layers": "embedding,0",
    }
    unmet = {
        "--tp-compression fc1=int4",
        "--tp-compression fc2@embedding=int4",
        "--tp-compression BACKWARD proj@0=int4",
    }
    assert spawn(unmet_parts_worker, 2, settings) == [unmet, unmet]


def recomputed_mlp_worker(rank: int, world_size: int) -> None:
    start_model_parallel(world_size)
    gradients = []
    for changes in ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}):
        model = build_tiny_gpt(rank, world_size, run_with(), torch.float32, **changes)
        model(**batch(0, rank, 1)).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputed_mlp(ranks: int) -> None:
    """``--recompute-modules mlp`` has the gradients without it, bit for bit, on one rank too."""
    spawn(recomputed_mlp_worker, ranks, timeout=60)


def audit_worker(rank: int, world_size: int) -> dict[tuple, list[dict]]:
    """Return by case the ledger's rows of two iterations, which are the transport's bytes."""
    start_model_parallel(world_size)
    results = {}
    for sequence_parallel, name, trained in itertools.product((False, True), CASES, (True, False)):
        run = run_with(**CASES[name])
        model = build_tiny_gpt(
            rank, world_size, run, torch.bfloat16, sequence_parallel=sequence_parallel
        )
        if not trained:
            frozen = (
                model.embedding,
                model.decoder.layers[0],
                model.decoder.layers[1].mlp.linear_fc1,
            )
            for module in frozen:
                module.requires_grad_(False)
        with TransportAudit(world_size) as audit:
            for run.step in range(2):
                model(**batch(run.step, rank, BATCH)).float().mean().backward()
        got = {name for name, p in model.named_parameters() if p.grad is not None}
        assert got == {name for name, p in model.named_parameters() if p.requires_grad}
        rows = results[sequence_parallel, name, trained] = run.ledger.rows()
        assert total_of(rows) == audit.sent, (sequence_parallel, name, trained)
    return results


CASES = {
    "compressed": {"codec": "taco:outliers=off"},
    "off": {"codec": "none"},
    "small": {"min_mb": 1.0},
    "warmup": {"start_iteration": 1},
    "a layer": {"layers": "1"},
}
MESSAGE = SEQUENCE * BATCH * HIDDEN * 2  # the whole sequence in bf16
# Messages of one size over all ranks. With sequence parallelism a layer gathers before qkv and fc1
# and scatters after the projection and fc2; the backward does the opposite and gathers the inputs
# of qkv and fc1 again. The embedding reduces (learned positions are added before the split) and its
# backward gathers; the output layer gathers, and its backward gathers again and scatters.
MESSAGES = {
    (False, "tp.forward"): {"all_reduce": 2 * LAYERS + 1},
    (False, "tp.backward"): {"all_reduce": 2 * LAYERS + 1},
    (True, "tp.forward"): {
        "all_gather": 2 * LAYERS + 1,
        "reduce_scatter": 2 * LAYERS,
        "all_reduce": 1,
    },
    (True, "tp.backward"): {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 2 * LAYERS + 1},
}
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (W-1)/W


audited = spawned(audit_worker, 2)


def hand_count(sequence_parallel: bool, channel: str, iterations: int) -> dict[str, int]:
    """Return the uncompressed bytes that a rank of two sends, by operation."""
    expected = {}
    for operation, count in MESSAGES[sequence_parallel, channel].items():
        expected[operation] = iterations * count * FACTORS[operation] * MESSAGE // 2
    return expected


def uncompressed_bytes(rows: list[dict], channel: str) -> dict[str, dict[str, int]]:
    """Return {kind: {operation: bytes}}; a compressed operation is the one that it stands for."""
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        if row["traffic"] == channel:
            operations = kinds.setdefault(row["kind"], Counter())
            if row["plain_bytes"]:
                operation = row["operation"].removeprefix("instead_of_")
                operations[operation] += row["plain_bytes"]
    return kinds


@pytest.mark.parametrize("name", ["compressed", "off", "small"])
@pytest.mark.parametrize("channel", ["tp.forward", "tp.backward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_are_the_hand_count(
    audited: list[dict], sequence_parallel: bool, channel: str, name: str
) -> None:
    """All of them are compressed, or uncompressed for one reason."""
    expected = hand_count(sequence_parallel, channel, iterations=2)
    for results in audited:
        kinds = uncompressed_bytes(results[sequence_parallel, name, True], channel)
        assert kinds == {name: expected}


@pytest.mark.parametrize("channel", ["tp.forward", "tp.backward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_of_a_warm_up_are_the_hand_count(
    audited: list[dict], sequence_parallel: bool, channel: str
) -> None:
    """The first iteration is uncompressed, the second compressed."""
    expected = hand_count(sequence_parallel, channel, iterations=1)
    for results in audited:
        kinds = uncompressed_bytes(results[sequence_parallel, "warmup", True], channel)
        assert kinds == {"warmup": expected, "compressed": expected}


@pytest.mark.parametrize("channel", ["tp.forward", "tp.backward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_payloads_have_eight_and_a_half_bits(
    audited: list[dict], sequence_parallel: bool, channel: str
) -> None:
    uncompressed = sum(hand_count(sequence_parallel, channel, iterations=2).values())
    for results in audited:
        rows = results[sequence_parallel, "compressed", True]
        sent = sum(row["sent_bytes"] for row in rows if row["traffic"] == channel)
        assert sent * 16 == uncompressed * 8.5  # of bf16


GROUPS = 2
HEADS = 4
QKV = SEQUENCE * BATCH * (HIDDEN + 2 * GROUPS * HIDDEN // HEADS) * 4  # fp32, all ranks'


def few_groups_worker(rank: int, world_size: int, sequence_parallel: bool) -> dict:
    """Run without compression, with an exact codec, whose gradients are equal, and with TACO.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        sequence_parallel: of the model.

    Returns:
        {codec: (loss, ledger)}, which has what c10d was given.
    """
    start_model_parallel(world_size)
    actual = {}
    changes = dict(num_query_groups=GROUPS, qk_layernorm=True, sequence_parallel=sequence_parallel)
    for name, codec in (("off", "none"), ("exact", "identity"), ("taco", "taco:format=int8")):
        run = run_with(codec)
        model = build_tiny_gpt(rank, world_size, run, torch.float32, **changes)
        with TransportAudit(world_size) as audit:
            loss = model(**batch(0, rank, BATCH)).mean()
            loss.backward()
        rows = run.ledger.rows()
        # On GPUs payloads may travel through shared memory, past torch.distributed.
        assert torch.cuda.is_available() or total_of(rows) == audit.sent, name
        gradients = {key: value.grad for key, value in model.named_parameters()}
        actual[name] = float(loss.detach()), gradients, rows
    for key, exact in actual["off"][1].items():
        torch.testing.assert_close(actual["exact"][1][key], exact, rtol=1e-4, atol=1e-6, msg=key)
    return {name: (loss, rows) for name, (loss, _, rows) in actual.items()}


def check_few_groups(sequence_parallel: bool, **options) -> None:
    """Assert that nothing goes uncompressed at TP 4 with two query groups.

    Args:
        sequence_parallel: of the model.
        options: of ``spawn``: the backend.
    """
    for rank in spawn(few_groups_worker, 4, sequence_parallel, **options):
        uncompressed_loss, uncompressed_rows = rank["off"]
        exact_loss, _ = rank["exact"]
        taco_loss, taco_rows = rank["taco"]
        assert exact_loss == pytest.approx(uncompressed_loss, rel=1e-6)
        assert taco_loss == pytest.approx(uncompressed_loss, rel=0.01)
        assert taco_loss != uncompressed_loss, "nothing was compressed"
        for channel in ("tp.forward", "tp.backward"):
            kinds = {row["kind"] for row in taco_rows if row["traffic"] == channel}
            assert kinds == {"compressed"}
        if not sequence_parallel:  # else the linear layers gather and scatter as well
            check_gathers_of_qkv(uncompressed_rows, taco_rows)


def check_gathers_of_qkv(uncompressed_rows: list[dict], taco_rows: list[dict]) -> None:
    """Assert that each layer gathers qkv forward and scatters it backward, over 4 ranks."""
    expected = LAYERS * QKV * 3 // 4
    for channel, operation in (("tp.forward", "all_gather"), ("tp.backward", "reduce_scatter")):
        (row,) = rows_of(uncompressed_rows, channel, operation)
        (instead,) = rows_of(taco_rows, channel, f"instead_of_{operation}")
        assert row["sent_bytes"] == expected
        assert instead["plain_bytes"] == expected


def rows_of(rows: list[dict], channel: str, operation: str) -> list[dict]:
    """Return the rows of an operation of a traffic class."""
    matches = [row for row in rows if row["traffic"] == channel]
    return [row for row in matches if row["operation"] == operation]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gather_of_shared_groups_is_compressed(sequence_parallel: bool) -> None:
    """The ledger has all that is sent, and none of it is uncompressed."""
    check_few_groups(sequence_parallel)
