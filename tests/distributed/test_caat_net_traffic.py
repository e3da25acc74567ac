"""CAAT-Net sends the shared channels' bytes and no others; replicas agree."""

import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.report.figures import log_line
from megatron.compression.report.reporter import _by_name, _totals
from tests.distributed.caat_net_emulation import fill_parameters
from tests.distributed.spawn import spawned
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
FP8, INT8 = "taco", "int8:scales=single"
TRAFFIC_CASES = [(1.0, "none"), (0.5, "none"), (0.25, "none"), (0.5, FP8), (0.5, INT8)]


def traffic_worker(rank: int, world_size: int) -> list[dict]:
    """``train_twice`` for each case."""
    start_model_parallel(world_size)
    return [train_twice(rank, world_size, *case) for case in TRAFFIC_CASES]


def train_twice(rank: int, world_size: int, fraction: float, codec: str) -> dict:
    """Two bf16 training iterations, with the bytes that c10d was given.

    Returns:
        Bytes by operation, the ledger's rows, losses, and what the rank holds: replicated parameters, the
        stream's channels behind the last layer.
    """
    from megatron.compression.caat_net.hooks import sum_rank_local_gradients

    run = run_with(codec, sync_fraction=fraction, transport="collective")  # which the audit sees
    model = build_tiny_gpt(rank, world_size, run, torch.bfloat16)
    streams: list[torch.Tensor] = []
    model.decoder.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with TransportAudit(world_size) as audit:
        for _ in range(2):
            loss = model(**batch(0, rank)).float().mean()
            loss.backward()
            sum_rank_local_gradients([model], model.pg_collection.tp, run.ledger)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    shared = int(HIDDEN * fraction)
    last = streams[-1].detach().float().cpu()
    return {
        "audit": audit.sent,
        "rows": run.ledger.rows(),
        "line": log_line(1, None, _by_name(_totals(run.ledger))[0]),
        "losses": losses,
        "replicated": {
            name: p.detach().float().cpu()
            for name, p in model.named_parameters()
            if not getattr(p, "tensor_model_parallel", False)
        },
        "shared": last[..., :shared],
        "private": last[..., shared:],
    }


def check_traffic(by_rank: list[list[dict]]) -> None:
    """The hand count of the bytes, that c10d was given just these, what the log line compares them with, and
    what ranks have in common."""
    iterations, world_size = 2, len(by_rank)
    full = iterations * SEQUENCE * BATCH * HIDDEN * 2 * 2 * (world_size - 1) // world_size  # an all-reduce
    embeddings = full  # each way: their output forward, the gradient of the streams' copies backward
    layers = 2 * LAYERS * full

    def encoded(fraction: float, spec: str) -> int:
        """Bytes of a compressed all-reduce: all-to-all and all-gather of W padded pieces."""
        config = parse_codec(spec).config
        values = config.chunk_numel(int(SEQUENCE * BATCH * HIDDEN * fraction), world_size)
        return 2 * (world_size - 1) * config.wire_bytes(values)

    for case, *ranks in zip(TRAFFIC_CASES, *by_rank, strict=True):
        fraction, codec = case
        expected = fraction * layers + embeddings  # a layer's two messages and the embeddings', each way
        if codec != "none":
            expected = iterations * (2 * LAYERS * encoded(fraction, codec) + encoded(1.0, codec))
        for result in ranks:
            assert total_of(result["rows"]) == result["audit"], case
            for channel in ("tp.forward", "tp.backward"):
                rows = [row for row in result["rows"] if row["traffic"] == channel]
                assert sum(row["sent_bytes"] for row in rows) == expected, (case, channel)
                plain = sum(row["plain_bytes"] for row in rows)
                assert plain == layers + embeddings, "of all channels, as ordinary tensor parallelism sends"
            assert ("tensor-parallel ratio" in result["line"]) == (case != (1.0, "none"))
            assert result["losses"][1] < result["losses"][0]
        first, *others = ranks
        for other in others:
            assert first["losses"] == other["losses"]
            for name, value in first["replicated"].items():
                assert torch.equal(value, other["replicated"][name]), (case, name)
            assert torch.equal(first["shared"], other["shared"])
            assert first["private"].numel() == 0 or not torch.equal(first["private"], other["private"])


def two_ranks_worker(rank: int, world_size: int) -> dict:
    """Everything that two ranks do here, in one process each."""
    return {"traffic": traffic_worker(rank, world_size), "evaluation": _evaluate(rank, world_size)}


two_ranks = spawned(two_ranks_worker, 2)


def test_traffic_and_replicas(two_ranks) -> None:
    """See ``check_traffic``."""
    check_traffic([rank["traffic"] for rank in two_ranks])


def _evaluate(rank: int, world_size: int) -> list[torch.Tensor]:
    """Losses without a codec, with one, and with one that --validate-uncompressed leaves out."""
    losses = []
    for codec, leave_out in (("none", False), (FP8, False), (FP8, True)):
        run = run_with(codec, sync_fraction=0.5, validate_uncompressed=leave_out)
        run.ledger.evaluating = True
        model = build_tiny_gpt(rank, world_size, run)
        fill_parameters(model, rank)
        losses.append(model(**batch(0, rank, 1)).detach())
    return losses


def test_uncompressed_validation_is_the_same_model(two_ranks) -> None:
    """The codec alone is left out: private channels stay private."""
    for rank in two_ranks:
        without, coded, left_out = rank["evaluation"]
        assert torch.equal(without, left_out) and not torch.equal(without, coded)
