"""CAAT-Net: its gradient is the emulated function's; it sends the shared channels' bytes and no others."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.compression.caat_net.layers import _sum_over_ranks
from megatron.compression.codecs import parse_codec
from megatron.compression.communication import CommSite
from megatron.compression.report.figures import log_line
from megatron.compression.report.reporter import _by_name, _totals
from tests.distributed.caat_net_emulation import EmulatedCaatNet, fill_parameters
from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_gpt import (
    FULL,
    HIDDEN,
    LAYERS,
    QWEN,
    SEQUENCE,
    batch,
    build_tiny_gpt,
    replicated,
    run_with,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

HEADS = 4
BATCH = 2
INT8 = "int8:scales=single"
INT8_BOUND = 0.02  # of a gradient, relative


def _loss_of(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's addend of a loss without communication: some function of its logits ``[b, s, v / W]``."""
    generator = torch.Generator().manual_seed(100 + rank)
    target = torch.randn(logits.shape, generator=generator, dtype=logits.dtype).to(logits.device)
    return ((logits - target).square() * target.sigmoid()).sum() / logits.shape[0]


def gradient_worker(rank: int, world_size: int) -> dict:
    """``gradients_of`` with half of the channels shared."""
    start_model_parallel(world_size)
    return gradients_of(rank, world_size, 0.5)


def four_ranks_worker(rank: int, world_size: int) -> dict:
    """Two streams and two data-parallel ranks."""
    start_model_parallel(2)
    return gradients_of(rank, 2, 0.5, SHARDED, sharded=True)


def gradients_of(
    rank: int,
    streams: int,
    fraction: float,
    changes: dict | None = None,
    force: bool = False,
    sharded: bool = False,
    codec: str = "none",
) -> dict:
    """Forward and backward in fp64 (with a codec fp32), gradients finalised as Megatron's loop does.

    Args:
        streams: tensor-parallel ranks; the others are data-parallel.
        fraction: the sync fraction.
        changes: of the model's config.
        force: run CAAT-Net's own code with all channels shared (which a fraction of 1 does not).
        sharded: as the distributed optimizer wants gradients, reduce-scattered behind the backward of the
            last of two micro-batches.
        codec: its spec; none sends as it is.

    Returns:
        Parameters and gradients by name on this rank (NaN outside its shard), the names of replicated
        ones, its addend of the loss and the ledger's rows.
    """
    from megatron.core import distributed

    from megatron.compression.caat_net import hooks

    run = run_with(codec, sync_fraction=fraction)
    loss = 0.0
    dtype = torch.float64 if codec == "none" else torch.float32
    model = build_tiny_gpt(rank, streams, run, dtype, **(changes or {}))
    if force:  # CAAT-Net's own code with nothing left private
        everything = SimpleNamespace(enabled=True, shared_channels=lambda channels: channels)
        hooks.attach(model, everything, run.ledger)
    stream = rank % streams
    copy = rank // streams
    fill_parameters(model, stream)
    settings = dict(use_distributed_optimizer=True, overlap_grad_reduce=True) if sharded else {}
    ddp = distributed.DistributedDataParallelConfig(**settings)
    wrapped = distributed.DistributedDataParallel(model.config, ddp, model)
    micro_batches = 2 if sharded else 1
    for micro_batch in range(micro_batches):
        inputs = batch(2 * copy + micro_batch, rank)
        del inputs["labels"]
        last = micro_batch == micro_batches - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            addend = _loss_of(wrapped(**inputs), stream)
            addend.backward()
        loss += float(addend)
    (model.config.finalize_model_grads_func or distributed.finalize_model_grads)([wrapped])
    if sharded:
        _leave_own_shard(wrapped)
    return {
        "parameters": {name: p.detach().cpu() for name, p in model.named_parameters()},
        "gradients": {name: p.main_grad.detach().cpu() for name, p in model.named_parameters()},
        "replicated": set(replicated(model)),
        "loss": loss,
        "rows": run.ledger.rows(),
    }


def _leave_own_shard(wrapped) -> None:
    """Make what another data-parallel rank's optimizer owns NaN."""
    for group in wrapped.bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            for rank, shard in enumerate(bucket.grad_data.chunk(ranks.size())):
                if rank != ranks.rank():
                    shard.fill_(torch.nan)


def check_against_emulation(
    ranks: list[dict], fraction: float, changes: dict | None = None
) -> None:
    """Each rank's loss and gradients from ``gradients_of`` against autograd in this process."""
    emulation, addends = _emulated(ranks, fraction, changes or {})
    for rank, result in enumerate(ranks):
        assert result["loss"] == pytest.approx(addends[rank].item(), rel=1e-12)
        _check_gradients(result["gradients"], emulation, rank)


def check_with_codec(ranks: list[dict], fraction: float, changes: dict | None = None) -> None:
    """As ``check_against_emulation``, to the codec's error; replicas agree and nothing went uncompressed."""
    emulation, _ = _emulated(ranks, fraction, changes or {})
    for rank, result in enumerate(ranks):
        for name, gradient in result["gradients"].items():
            expected = emulation.parameter(rank, name).grad
            error = (gradient - expected).norm() / expected.norm()
            assert 1e-4 < error < INT8_BOUND, (rank, name, error)
        for name in result["replicated"]:
            assert torch.equal(result["gradients"][name], ranks[0]["gradients"][name]), name
        rows = [row for row in result["rows"] if row["traffic"] in ("tp.forward", "tp.backward")]
        assert rows and {row["kind"] for row in rows} == {"compressed"}


def _emulated(ranks: list[dict], fraction: float, changes: dict, steps=(0,), replicas: int = 1):
    """The emulation behind the backward of these batches, and its ranks' addends of the last one's loss."""
    emulation = EmulatedCaatNet(
        [rank["parameters"] for rank in ranks],
        ranks[0]["replicated"],
        changes.get("num_attention_heads", HEADS),
        changes.get("num_query_groups", changes.get("num_attention_heads", HEADS)),
        int(HIDDEN * fraction),
        changes.get("normalization", "LayerNorm"),
        changes.get("gated_linear_unit", False),
    )
    for step in steps:
        logits = emulation.logits(batch(step, 0)["input_ids"].cpu())
        addends = [_loss_of(x, r) for r, x in enumerate(logits)]
        (sum(addends) / replicas).backward()
    return emulation, addends


def _check_gradients(gradients: dict, emulation: EmulatedCaatNet, rank: int) -> None:
    assert len(gradients) >= 3 + 8 * LAYERS
    for name, gradient in gradients.items():
        expected = emulation.parameter(rank, name).grad
        assert expected.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10, msg=f"{rank} {name}")


GRADIENT_CASES = [
    (0.5, {}, False),
    (0.3, {**QWEN, **FULL, "add_qkv_bias": True}, False),
    (1.0, {}, True),
    (1.0, {}, False),
    (0.5, FULL, False, False, INT8),
]
SHARDED = dict(tied=True, recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])


def two_ranks_worker(rank: int, world_size: int) -> dict:
    """Every case, in one process a rank: starting them takes longer."""
    start_model_parallel(world_size)
    gradients = [gradients_of(rank, world_size, *case) for case in GRADIENT_CASES]
    traffic = [train_twice(rank, world_size, *case) for case in TRAFFIC_CASES]
    return {"gradients": gradients, "traffic": traffic, "evaluation": _evaluate(rank, world_size)}


two_ranks = spawned(two_ranks_worker, 2)


def test_gradients_are_those_of_the_emulated_function(two_ranks) -> None:
    """Every parameter's gradient in fp64, replicated ones on all ranks, against autograd in one process.

    With all channels shared it is the ordinary model's, to rounding.
    """
    halves, qwen, forced, ordinary, _ = zip(*(rank["gradients"] for rank in two_ranks), strict=True)
    check_against_emulation(halves, *GRADIENT_CASES[0][:2])
    check_against_emulation(qwen, *GRADIENT_CASES[1][:2])
    for partial, plain in zip(forced, ordinary, strict=True):
        assert partial["loss"] == pytest.approx(plain["loss"], rel=1e-12)
        for name, gradient in plain["gradients"].items():
            torch.testing.assert_close(
                partial["gradients"][name], gradient, rtol=1e-10, atol=1e-10, msg=name
            )


def test_gradients_with_a_codec(two_ranks) -> None:
    """Eight bits and recomputation: every gradient to the codec's error."""
    check_with_codec([rank["gradients"][-1] for rank in two_ranks], *GRADIENT_CASES[-1][:2])


def test_gradients_of_data_parallel_shards() -> None:
    """Tied embeddings, recomputation and two micro-batches on two data-parallel ranks: mean of the sums.

    Each rank has the gradients of its own shard, as the distributed optimizer wants them.
    """
    ranks = spawn(four_ranks_worker, 4)
    emulation, _ = _emulated(
        ranks[:2], 0.5, SHARDED, range(4), replicas=2
    )  # two micro-batches each
    for stream in range(2):
        of_copies = [ranks[stream]["gradients"], ranks[2 + stream]["gradients"]]
        joined = {}
        for name, first in of_copies[0].items():
            second = of_copies[1][name]
            assert torch.equal(first.isnan(), ~second.isnan()), "every value belongs to one of them"
            joined[name] = torch.where(first.isnan(), second, first)
        assert all(any(g.isnan().any() for g in copy.values()) for copy in of_copies)
        _check_gradients(joined, emulation, stream)


MAGNITUDES = torch.tensor([1.0, 30.0, 0.1]).view(-1, 1)
ADDENDS = (MAGNITUDES * torch.randn(3, 512, generator=torch.Generator().manual_seed(0))).bfloat16()
"""Gradients of three streams ``[3, n]``, whose sum depends on where it is rounded."""


def bf16_sum_worker(rank: int, world_size: int) -> torch.Tensor:
    """The sum of the streams' bf16 gradients without a codec."""
    site = CommSite("proj", dist.group.WORLD, run_with("none"), fused=False)
    return _sum_over_ranks(ADDENDS[rank].clone(), site, "tp.backward").wait()


def test_gradients_of_bf16_are_summed_in_fp32_and_rounded_once() -> None:
    first, second, third = ADDENDS
    expected = (first.float() + second.float() + third.float()).bfloat16()
    assert not torch.equal(expected, first + second + third)
    for total in spawn(bf16_sum_worker, 3):
        assert torch.equal(total, expected)


FP8 = "taco:outliers=off"
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
    model.decoder.layers[-1].register_forward_hook(
        lambda module, args, output: streams.append(output[0])
    )
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
        "replicated": {name: p.detach().float().cpu() for name, p in replicated(model).items()},
        "shared": last[..., :shared],
        "private": last[..., shared:],
    }


def check_traffic(by_rank: list[list[dict]]) -> None:
    """The hand count of the bytes, that c10d was given just these, what the log line compares them with, and
    what ranks have in common."""
    iterations = 2
    world_size = len(by_rank)
    full = (
        iterations * SEQUENCE * BATCH * HIDDEN * 2 * 2 * (world_size - 1) // world_size
    )  # an all-reduce
    embeddings = (
        full  # each way: their output forward, the gradient of the streams' copies backward
    )
    layers = 2 * LAYERS * full

    def encoded(fraction: float, spec: str) -> int:
        """Bytes of a compressed all-reduce: all-to-all and all-gather of W padded pieces."""
        config = parse_codec(spec).config
        values = config.chunk_numel(int(SEQUENCE * BATCH * HIDDEN * fraction), world_size)
        return 2 * (world_size - 1) * config.wire_bytes(values)

    for case, *ranks in zip(TRAFFIC_CASES, *by_rank, strict=True):
        fraction, codec = case
        expected = (
            fraction * layers + embeddings
        )  # a layer's two messages and the embeddings', each way
        if codec != "none":
            expected = iterations * (2 * LAYERS * encoded(fraction, codec) + encoded(1.0, codec))
        for result in ranks:
            assert total_of(result["rows"]) == result["audit"], case
            for channel in ("tp.forward", "tp.backward"):
                rows = [row for row in result["rows"] if row["traffic"] == channel]
                assert sum(row["sent_bytes"] for row in rows) == expected, (case, channel)
                plain = sum(row["plain_bytes"] for row in rows)
                assert plain == layers + embeddings, (
                    "of all channels, as ordinary tensor parallelism sends"
                )
            assert ("tensor-parallel ratio" in result["line"]) == (case != (1.0, "none"))
            assert result["losses"][1] < result["losses"][0]
        first, *others = ranks
        for other in others:
            assert first["losses"] == other["losses"]
            for name, value in first["replicated"].items():
                assert torch.equal(value, other["replicated"][name]), (case, name)
            assert torch.equal(first["shared"], other["shared"])
            assert first["private"].numel() == 0 or not torch.equal(
                first["private"], other["private"]
            )


def test_traffic_and_replicas(two_ranks) -> None:
    """See ``check_traffic``."""
    check_traffic([rank["traffic"] for rank in two_ranks])


def _evaluate(rank: int, world_size: int) -> list[torch.Tensor]:
    """Losses without a codec, with one, and with one that --validate-uncompressed leaves out."""
    losses = []
    for codec, leave_out in (("none", False), (FP8, False), (FP8, True)):
        run = run_with(codec, sync_fraction=0.5, validate_uncompressed=leave_out)
        run.ledger.phase = "eval"
        model = build_tiny_gpt(rank, world_size, run)
        fill_parameters(model, rank)
        losses.append(model(**batch(0, rank, 1)).detach())
    return losses


def test_uncompressed_validation_is_the_same_model(two_ranks) -> None:
    """The codec alone is left out: private channels stay private."""
    for rank in two_ranks:
        without, coded, left_out = rank["evaluation"]
        assert torch.equal(without, left_out) and not torch.equal(without, coded)
