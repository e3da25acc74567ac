"""Fewer query groups than tensor-parallel ranks: megatron-core gathers qkv in every layer, and so do we."""

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
GROUPS, HEADS = 2, 4
QKV = SEQUENCE * BATCH * (HIDDEN + 2 * GROUPS * HIDDEN // HEADS) * 4  # fp32, all ranks'


def few_groups_worker(rank: int, world_size: int, sequence_parallel: bool) -> dict:
    """Loss and gradients without compression, with an exact codec and with TACO; both ledgers and audits."""
    start_model_parallel(world_size)
    found = {}
    changes = dict(num_query_groups=GROUPS, qk_layernorm=True, sequence_parallel=sequence_parallel)
    for name, codec in (("off", "none"), ("exact", "identity"), ("taco", "taco:format=int8")):
        run = run_with(codec)
        model = build_tiny_gpt(rank, world_size, run, torch.float32, **changes)
        with TransportAudit(world_size) as audit:
            loss = model(**batch(0, rank, BATCH)).mean()
            loss.backward()
        rows = run.ledger.rows()
        # On GPUs payloads may travel through shared memory, which is no operation of torch.distributed.
        assert torch.cuda.is_available() or total_of(rows) == audit.sent, name
        gradients = {key: value.grad for key, value in model.named_parameters()}
        found[name] = float(loss.detach()), gradients, rows
    for key, exact in found["off"][1].items():
        torch.testing.assert_close(found["exact"][1][key], exact, rtol=1e-4, atol=1e-6, msg=key)
    return {name: (loss, rows) for name, (loss, _, rows) in found.items()}


def check_few_groups(sequence_parallel: bool, **options) -> None:
    """At TP 4 and two groups, over the backend that ``options`` name: nothing goes uncompressed."""
    world_size = 4
    for found in spawn(few_groups_worker, world_size, sequence_parallel, **options):
        (plain_loss, plain), (exact_loss, _), (taco_loss, taco) = found.values()
        assert exact_loss == pytest.approx(plain_loss, rel=1e-6)
        assert taco_loss == pytest.approx(plain_loss, rel=0.01) and taco_loss != plain_loss
        for channel, operation in (("tp.forward", "all_gather"), ("tp.backward", "reduce_scatter")):
            mine = [row for row in taco if row["traffic"] == channel]
            assert {row["kind"] for row in mine} == {"compressed"}
            if not sequence_parallel:  # else the linear layers gather and scatter as well
                (row,) = (r for r in plain if (r["traffic"], r["operation"]) == (channel, operation))
                (instead,) = (r for r in mine if r["operation"] == f"instead_of_{operation}")
                expected = LAYERS * QKV * (world_size - 1) // world_size
                assert row["sent_bytes"] == instead["plain_bytes"] == expected


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gather_of_shared_groups_is_compressed(sequence_parallel: bool) -> None:
    """What is sent is what the ledger says, and none of it uncompressed."""
    check_few_groups(sequence_parallel)
