"""CAAT-Net: its gradient is that of the emulated function."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.caat_net_emulation import EmulatedCaatNet, fill_parameters
from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_gpt import (
    FULL,
    HIDDEN,
    LAYERS,
    batch,
    build_tiny_gpt,
    run_with,
    start_model_parallel,
)

HEADS = 4
INT8 = "int8:scales=single"
INT8_BOUND = 0.02  # of a gradient, relative
QWEN_LIKE = dict(
    **dict(normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, add_qkv_bias=True),
    **dict(num_query_groups=2, gated_linear_unit=True, activation_func=torch.nn.functional.silu),
)


def _loss_of(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's addend of a loss without communication: some function of its logits ``[b, s, v / W]``."""
    generator = torch.Generator().manual_seed(100 + rank)
    target = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    target = target.to(logits.device)
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

    run, loss = run_with(codec, sync_fraction=fraction), 0.0
    dtype = torch.float64 if codec == "none" else torch.float32
    model = build_tiny_gpt(rank, streams, run, dtype, **(changes or {}))
    if force:  # CAAT-Net's own code with nothing left private
        everything = SimpleNamespace(enabled=True, shared_channels=lambda channels: channels)
        hooks.attach(model, everything, run.ledger)
    stream, copy = rank % streams, rank // streams
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
        "replicated": {
            name for name, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)
        },
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


def check_against_emulation(ranks: list[dict], fraction: float, changes: dict | None = None) -> None:
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
    (0.3, {**QWEN_LIKE, **FULL}, False),
    (1.0, {}, True),
    (1.0, {}, False),
    (0.5, FULL, False, False, INT8),
]
SHARDED = dict(tied=True, recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])


def two_ranks_worker(rank: int, world_size: int) -> list[dict]:
    """Every case, in one process a rank: starting them takes longer."""
    start_model_parallel(world_size)
    return [gradients_of(rank, world_size, *case) for case in GRADIENT_CASES]


two_ranks = spawned(two_ranks_worker, 2)


def test_gradients_are_those_of_the_emulated_function(two_ranks) -> None:
    """Every parameter's gradient in fp64, replicated ones on all ranks, against autograd in one process.

    With all channels shared it is the ordinary model's, to rounding.
    """
    halves, qwen, forced, ordinary, _ = zip(*two_ranks, strict=True)
    check_against_emulation(halves, *GRADIENT_CASES[0][:2])
    check_against_emulation(qwen, *GRADIENT_CASES[1][:2])
    for partial, plain in zip(forced, ordinary, strict=True):
        assert partial["loss"] == pytest.approx(plain["loss"], rel=1e-12)
        for name, gradient in plain["gradients"].items():
            torch.testing.assert_close(partial["gradients"][name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_gradients_with_a_codec(two_ranks) -> None:
    """Eight bits and recomputation: every gradient to the codec's error."""
    check_with_codec([rank[-1] for rank in two_ranks], *GRADIENT_CASES[-1][:2])


def test_gradients_of_data_parallel_shards() -> None:
    """Tied embeddings, recomputation and two micro-batches on two data-parallel ranks: mean of the sums.

    Each rank has the gradients of its own shard, as the distributed optimizer wants them.
    """
    ranks = spawn(four_ranks_worker, 4)
    emulation, _ = _emulated(ranks[:2], 0.5, SHARDED, range(4), replicas=2)  # two micro-batches each
    for stream in range(2):
        of_copies = [ranks[stream]["gradients"], ranks[2 + stream]["gradients"]]
        joined = {}
        for name, first in of_copies[0].items():
            second = of_copies[1][name]
            assert torch.equal(first.isnan(), ~second.isnan()), "every value belongs to one of them"
            joined[name] = torch.where(first.isnan(), second, first)
        assert all(any(g.isnan().any() for g in copy.values()) for copy in of_copies)
        _check_gradients(joined, emulation, stream)
