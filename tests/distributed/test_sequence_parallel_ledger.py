"""The ledger under sequence parallelism: nothing uncompressed, and the sites counted by hand."""

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
MESSAGE = SEQUENCE * BATCH * HIDDEN * 2  # the whole sequence in bf16
# Messages of one size over all ranks. With sequence parallelism a layer gathers before qkv and fc1 and
# scatters after the projection and fc2; the backward does the opposite and gathers the inputs of qkv and fc1
# again. The embedding reduces (learned positions are added before the split) and its backward gathers; the
# output layer gathers, and its backward gathers again and scatters.
SITES = {
    (False, "tp.forward"): {"all_reduce": 2 * LAYERS + 1},
    (False, "tp.backward"): {"all_reduce": 2 * LAYERS + 1},
    (True, "tp.forward"): {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS, "all_reduce": 1},
    (True, "tp.backward"): {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 2 * LAYERS + 1},
}
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (W-1)/W


def ledger_worker(rank: int, world_size: int, sequence_parallel: bool) -> list[tuple]:
    """What the transport was given and what the ledger says: uncompressed and compressed."""
    start_model_parallel(world_size)
    results = []
    for settings in ({"codec": "none"}, {}):
        run = run_with(**settings)
        model = build_tiny_gpt(rank, world_size, run, torch.bfloat16, sequence_parallel=sequence_parallel)
        with TransportAudit(world_size) as audit:
            model(**batch(0, rank, BATCH)).float().mean().backward()
        results.append((audit.sent, run.ledger.rows()))
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_activation_byte_is_uncompressed(sequence_parallel: bool) -> None:
    """Above the threshold, here 0, both channels are all payload; what they stand for is the hand count."""
    world_size = 2
    for results in spawn(ledger_worker, world_size, sequence_parallel):
        for audit, rows in results:
            assert total_of(rows) == audit
        plain, *compressed = (rows for _, rows in results)
        for channel in ("tp.forward", "tp.backward"):
            operations = SITES[sequence_parallel, channel]
            expected = {
                operation: count * FACTORS[operation] * MESSAGE * (world_size - 1) // world_size
                for operation, count in operations.items()
            }
            sent = [row for row in plain if row["traffic"] == channel]
            assert {row["kind"] for row in sent} == {"off"}
            assert {row["operation"]: row["sent_bytes"] for row in sent} == expected
            for rows in compressed:
                mine = [row for row in rows if row["traffic"] == channel]
                assert {row["kind"] for row in mine} == {"compressed"}
                stands_for = {
                    row["operation"].removeprefix("instead_of_"): row["plain_bytes"]
                    for row in mine
                    if row["plain_bytes"]
                }
                assert stands_for == expected
                assert sum(row["sent_bytes"] for row in mine) * 16 == sum(expected.values()) * 8.5
