"""CAAT-Net: its gradient is that of the emulated function; its traffic is the shared channels'."""

import contextlib
import zlib
from types import SimpleNamespace

import pytest
import torch

from megatron.compression.config import CaatNetSettings, CompressionConfig, TensorParallelCompression
from megatron.compression.runtime import CompressionRuntime
from tests.distributed.caat_net_emulation import EmulatedCaatNet
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    batch,
    build_tiny_gpt,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

BATCH = 2
HEADS = 4
NEW_TOKENS = 5
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
QWEN_LIKE = dict(
    normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, add_qkv_bias=True, num_query_groups=2
)


def caat_runtime(fraction: float, **settings) -> CompressionRuntime:
    """A runtime of this sync fraction, without a codec unless ``settings`` choose one."""
    if settings:
        settings = {"tp_compression": "taco", "taco_min_message_mb": 0.0, **settings}
    return CompressionRuntime(
        CompressionConfig(
            tensor_parallel=TensorParallelCompression(**settings),
            caat_net=CaatNetSettings(caat_net_sync_fraction=fraction),
        )
    )


def _fill(model, rank: int) -> None:
    """Values without symmetry for every parameter: biases begin at zero and norms at one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + place)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))


def _loss_of(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's addend of a loss without communication: some function of its logits ``[b, s, v / W]``."""
    generator = torch.Generator().manual_seed(100 + rank)
    target = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    target = target.to(logits.device)
    return ((logits - target).square() * target.sigmoid()).sum() / logits.shape[0]


def gradient_worker(rank: int, world_size: int) -> dict:
    """``_gradients`` with half of the channels shared."""
    start_model_parallel(world_size)
    return _gradients(rank, world_size, 0.5)


def four_ranks_worker(rank: int, world_size: int) -> dict:
    """One stream a rank, then two streams and two data-parallel ranks."""
    from megatron.core import parallel_state, tensor_parallel

    start_model_parallel(world_size)
    four_streams = _gradients(rank, world_size, 0.25)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    return {"four streams": four_streams, "sharded": _gradients(rank, 2, 0.5, SHARDED, sharded=True)}


def _gradients(
    rank: int,
    streams: int,
    fraction: float,
    changes: dict | None = None,
    force: bool = False,
    sharded: bool = False,
) -> dict:
    """Forward and backward in fp64, gradients finalised as Megatron's loop does.

    Args:
        streams: tensor-parallel ranks; the others are data-parallel.
        fraction: the sync fraction.
        changes: of the model's config.
        force: run CAAT-Net's own code with all channels shared (which a fraction of 1 does not).
        sharded: as the distributed optimizer wants gradients, reduce-scattered behind the backward of the
            last of two micro-batches.

    Returns:
        Parameters and gradients by name on this rank (NaN outside its shard), the names of replicated
        ones, and its addend of the loss.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron.compression.tensor_parallel.caat_net_layers import bind_caat_net

    runtime, behind, loss = caat_runtime(fraction), [], 0.0
    model = build_tiny_gpt(rank, streams, runtime, torch.float64, **(changes or {}))
    if force:  # CAAT-Net's own code with nothing left private
        everything = SimpleNamespace(enabled=True, shared_channels=lambda channels: channels)
        bind_caat_net(model, everything, runtime.ledger)
    stream, copy = rank % streams, rank // streams
    _fill(model, stream)
    settings = dict(use_distributed_optimizer=True, overlap_grad_reduce=True) if sharded else {}
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)
    micro_batches = 2 if sharded else 1
    for micro_batch in range(micro_batches):
        inputs = batch(2 * copy + micro_batch, rank, BATCH)
        del inputs["labels"]
        last = micro_batch == micro_batches - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            addend = _loss_of(wrapped(**inputs), stream)
            with _watch_weight_gradients(behind):
                addend.backward()
        loss += float(addend)
    (model.config.finalize_model_grads_func or finalize_model_grads)([wrapped])
    if sharded:
        _leave_own_shard(wrapped)
    return {
        "parameters": {name: p.detach().cpu() for name, p in model.named_parameters()},
        "gradients": {name: p.main_grad.detach().cpu() for name, p in model.named_parameters()},
        "replicated": {
            name for name, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)
        },
        "loss": loss,
        "behind": behind,
    }


def _leave_own_shard(wrapped) -> None:
    """Make what another data-parallel rank's optimizer owns NaN."""
    for group in wrapped.bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            for rank, shard in enumerate(bucket.grad_data.chunk(ranks.size())):
                if rank != ranks.rank():
                    shard.fill_(torch.nan)


@contextlib.contextmanager
def _watch_weight_gradients(behind: list[bool]):
    """Note for each weight gradient that was put off whether an exchange was under way when its turn came."""
    from megatron.compression.tensor_parallel.overlap import WeightGradient

    compute = WeightGradient.compute

    def watching(self, like):
        behind.append(self.exchange.work is not None and not self.exchange.work.work.done)
        return compute(self, like)

    WeightGradient.compute = watching
    try:
        yield
    finally:
        WeightGradient.compute = compute


def check_against_emulation(ranks: list[dict], fraction: float, changes: dict | None = None) -> None:
    """Each rank's loss and gradients from ``_gradients`` against autograd in this process."""
    changes = changes or {}
    emulation = _emulation(ranks, fraction, changes)
    addends = [_loss_of(x, r) for r, x in enumerate(emulation.logits(batch(0, 0, BATCH)["input_ids"]))]
    sum(addends).backward()
    for rank, result in enumerate(ranks):
        assert result["loss"] == pytest.approx(addends[rank].item(), rel=1e-12)
        _check_gradients(result["gradients"], emulation, rank)


def _emulation(ranks: list[dict], fraction: float, changes: dict) -> EmulatedCaatNet:
    return EmulatedCaatNet(
        [rank["parameters"] for rank in ranks],
        ranks[0]["replicated"],
        HEADS,
        changes.get("num_query_groups", HEADS),
        int(HIDDEN * fraction),
        changes.get("normalization", "LayerNorm"),
    )


def _check_gradients(gradients: dict, emulation: EmulatedCaatNet, rank: int) -> None:
    assert len(gradients) >= 3 + 8 * LAYERS
    for name, gradient in gradients.items():
        expected = emulation.parameter(rank, name).grad
        assert expected.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10, msg=f"{rank} {name}")


GRADIENT_CASES = [
    (0.5, {}, False),
    (0.3, {**QWEN_LIKE, **RECOMPUTE}, False),
    (1.0, {}, True),
    (1.0, {}, False),
]
SHARDED = dict(tied=True, recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])


def two_ranks_worker(rank: int, world_size: int) -> dict:
    """Everything that two ranks do here, in one process each: starting them takes longer."""
    start_model_parallel(world_size)
    return {
        "gradients": [_gradients(rank, world_size, *case) for case in GRADIENT_CASES],
        "traffic": [_train(rank, world_size, *case) for case in TRAFFIC_CASES],
        "generation": _generate(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """Each rank's results."""
    return spawn(two_ranks_worker, 2)


def test_gradients_are_those_of_the_emulated_function(two_ranks) -> None:
    """Every parameter's gradient in fp64, replicated ones on all ranks, against autograd in one process.

    With all channels shared it is the ordinary model's, to rounding.
    """
    halves, qwen, forced, ordinary = zip(*(rank["gradients"] for rank in two_ranks), strict=True)
    check_against_emulation(halves, *GRADIENT_CASES[0][:2])
    check_against_emulation(qwen, *GRADIENT_CASES[1][:2])
    # Behind an exchange: fc1's weight gradients, and qkv's but the first; with recomputation fc1's alone.
    assert [rank["behind"] for rank in halves] == [[True] * (2 * LAYERS - 1)] * 2
    assert [rank["behind"] for rank in qwen] == [[True] * LAYERS] * 2
    for partial, plain in zip(forced, ordinary, strict=True):
        assert partial["loss"] == pytest.approx(plain["loss"], rel=1e-12)
        for name, gradient in plain["gradients"].items():
            torch.testing.assert_close(partial["gradients"][name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict]:
    """Each rank's results."""
    return spawn(four_ranks_worker, 4)


def test_gradients_of_four_streams(four_ranks) -> None:
    """The same at W = 4, where a quarter of the channels is shared."""
    check_against_emulation([rank["four streams"] for rank in four_ranks], 0.25)


def test_gradients_of_data_parallel_shards(four_ranks) -> None:
    """Tied embeddings, recomputation and two micro-batches on two data-parallel ranks: mean of the sums.

    Each rank has the gradients of its own shard, as the distributed optimizer wants them.
    """
    ranks = [rank["sharded"] for rank in four_ranks]
    emulation = _emulation(ranks[:2], 0.5, SHARDED)
    for step in range(4):  # two data-parallel ranks, two micro-batches each
        tokens = batch(step, 0, BATCH)["input_ids"]
        addends = [_loss_of(x, r) for r, x in enumerate(emulation.logits(tokens))]
        (sum(addends) / 2).backward()
    for stream in range(2):
        of_copies = [ranks[stream]["gradients"], ranks[2 + stream]["gradients"]]
        joined = {}
        for name, first in of_copies[0].items():
            second = of_copies[1][name]
            assert torch.equal(first.isnan(), ~second.isnan()), "every value belongs to one of them"
            joined[name] = torch.where(first.isnan(), second, first)
        assert all(any(g.isnan().any() for g in copy.values()) for copy in of_copies)
        _check_gradients(joined, emulation, stream)


FP8 = {"taco_format": "fp8-e4m3", "taco_scales": "dual"}
INT8 = {"taco_format": "int8", "taco_scales": "single"}
TRAFFIC_CASES = [(1.0, {}), (0.5, {}), (0.25, {}), (0.5, FP8), (0.5, INT8)]


def traffic_worker(rank: int, world_size: int) -> list[dict]:
    """``_train`` for each case."""
    start_model_parallel(world_size)
    return [_train(rank, world_size, *case) for case in TRAFFIC_CASES]


def _train(rank: int, world_size: int, fraction: float, settings: dict) -> dict:
    """Two bf16 training iterations, with the bytes that c10d was given.

    Returns:
        Bytes by operation, the ledger's rows, losses, and what the rank holds: replicated parameters, the
        stream's channels behind the last layer.
    """
    from megatron.compression.tensor_parallel.caat_net_gradients import sum_rank_local_gradients

    runtime = caat_runtime(fraction, **settings)
    model = build_tiny_gpt(rank, world_size, runtime, torch.bfloat16)
    streams: list[torch.Tensor] = []
    model.decoder.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with TransportAudit(world_size) as audit:
        for _ in range(2):
            loss = model(**batch(0, rank, BATCH)).float().mean()
            loss.backward()
            sum_rank_local_gradients([model], model.pg_collection.tp, runtime.ledger)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    shared = int(HIDDEN * fraction)
    last = streams[-1].detach().float().cpu()
    return {
        "audit": audit.sent,
        "rows": runtime.ledger.rows(),
        "losses": losses,
        "replicated": {
            name: p.detach().float().cpu()
            for name, p in model.named_parameters()
            if not getattr(p, "tensor_model_parallel", False)
        },
        "shared": last[..., :shared],
        "private": last[..., shared:],
    }


def _sent(rows: list[dict], *channels: str) -> int:
    return sum(row["sent_bytes"] for row in rows if row["channel"] in channels)


def check_traffic(by_rank: list[list[dict]]) -> None:
    """The hand count of the bytes, that c10d was given just these, and what ranks still have in common."""
    iterations, world_size, cases = 2, len(by_rank), TRAFFIC_CASES
    results = list(zip(*by_rank, strict=True))
    full = iterations * SEQUENCE * BATCH * HIDDEN * 2 * 2 * (world_size - 1) // world_size  # an all-reduce
    embeddings = full  # each way: their output forward, the gradient of the streams' copies backward
    layers = 2 * LAYERS * full
    expected = {  # bits a value: fp8 with two fp32 scales a group of 128, int8 with one of bf16
        0: layers + embeddings,
        1: 0.5 * layers + embeddings,
        2: 0.25 * layers + embeddings,
        3: (0.5 * layers + embeddings) * 8.5 / 16,
        4: (0.5 * layers + embeddings) * 8.125 / 16,
    }
    for case, ranks in enumerate(results):
        for result in ranks:
            assert total_of(result["rows"]) == result["audit"], cases[case]
            for channel in ("tp.forward", "tp.backward"):
                assert _sent(result["rows"], channel) == expected[case], (cases[case], channel)
            assert result["losses"][1] < result["losses"][0]
        first, *others = ranks
        for other in others:
            assert first["losses"] == other["losses"]
            for name, value in first["replicated"].items():
                assert torch.equal(value, other["replicated"][name]), (cases[case], name)
            assert torch.equal(first["shared"], other["shared"])
            assert first["private"].numel() == 0 or not torch.equal(first["private"], other["private"])


def test_traffic_and_replicas(two_ranks) -> None:
    """See ``check_traffic``."""
    check_traffic([rank["traffic"] for rank in two_ranks])


def _generate(rank: int, world_size: int) -> dict:
    """Greedy tokens twice, and each step's logits beside those of a training forward of the whole text."""
    from megatron.compression.generation import generate_greedily, next_token_logits

    runtime = caat_runtime(0.5)
    runtime.ledger.evaluating = True
    model = build_tiny_gpt(rank, world_size, runtime)
    _fill(model, rank)
    group, prompt = model.pg_collection.tp, [3, 1, 4]
    with TransportAudit(world_size) as audit:
        tokens = generate_greedily(model, prompt, NEW_TOKENS, VOCABULARY, group, runtime.ledger)
    rows = runtime.ledger.rows()
    again = generate_greedily(model, prompt, NEW_TOKENS, VOCABULARY, group, runtime.ledger)
    text = torch.tensor([prompt + tokens])
    steps = torch.stack(
        [next_token_logits(model, text[:, :length], group, runtime.ledger)[0] for length in range(3, 8)]
    )
    model.train()
    positions = torch.arange(text.shape[1])[None]
    losses = model(text[:, :-1], positions[:, :-1], None, labels=text[:, 1:].contiguous())[0]
    return {
        "tokens": tokens,
        "again": again,
        "losses": losses.detach(),
        "losses_of_steps": torch.nn.functional.cross_entropy(steps, text[0, 3:8], reduction="none"),
        "greedy": steps.argmax(-1).tolist(),
        "audit": audit.sent,
        "rows": rows,
    }


def test_generation(two_ranks) -> None:
    """Same text twice and on all ranks; logits as in training; its traffic counted and the hand count."""
    first, second = (rank["generation"] for rank in two_ranks)
    assert first["tokens"] == first["again"] == second["tokens"] == first["greedy"]
    assert len(set(first["tokens"])) > 1
    torch.testing.assert_close(first["losses_of_steps"], first["losses"][2:], rtol=1e-5, atol=1e-5)
    assert total_of(first["rows"]) == first["audit"]
    assert {row["phase"] for row in first["rows"]} == {"eval"}
    forwards = sum(range(3, 3 + NEW_TOKENS))  # tokens that went through the layers
    values = forwards * HIDDEN * (1 + 2 * LAYERS * 0.5)  # the embedding in whole, the layers' outputs by half
    assert _sent(first["rows"], "tp.forward") == 4 * values  # fp32, 2 (W - 1) / W = 1
    assert _sent(first["rows"], "tp.other") == NEW_TOKENS * VOCABULARY * 4 // 2
