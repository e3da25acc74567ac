"""TAGC over real process groups: conservation to the bit, bytes, non-finite gradients, training."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.compression.communication.audit import BackendAudit
from taco_kernels.count_sketch import SketchConfig, SketchLayout
from tests.distributed.launch import go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, digest, same_everywhere, start, train

LAYERS = frozenset({"mlp", "embedding"})
SHAPES = [  # in the order of a bucket; 60 values of padding at the end
    ("decoder.layers.0.mlp.linear_fc1.weight", (256, 64)),
    ("decoder.layers.0.mlp.linear_fc1.bias", (256,)),
    ("decoder.layers.0.self_attention.linear_qkv.weight", (192, 64)),
    ("decoder.layers.0.mlp.linear_fc2.weight", (64, 256)),
    ("embedding.word_embeddings.weight", (500, 64)),
]


DEVICE = "cpu"
"""Where gradients are; tests on GPUs change it."""


def sketch_of(cell_bits: int = 16) -> SketchConfig:
    """Room for a fifth of the values in their union."""
    return SketchConfig(ratio=3.85, cell_bits=cell_bits)


def make_sync(
    sharded: bool,
    dtype: torch.dtype,
    cell_bits: int = 16,
    node_size: int | None = None,
    wire: str = "sketch",
    topology=None,
    scale: float = 1.0,
):
    """Make a sync over a made-up bucket, by default over torch.distributed.

    The packed wire has a fifth of each rank's values.
    """
    from megatron.compression.communication import Ledger, Transports
    from megatron.compression.communication.topology import find_topology
    from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan
    from megatron.compression.tagc import parts, sync

    parts.SMALLEST = 8192
    spans = []
    start = 0
    for name, shape in SHAPES:
        parameter = torch.nn.Parameter(torch.zeros(shape))
        spans.append(ParameterSpan(name, parameter, start, start + parameter.numel()))
        start += parameter.numel()
    flat = torch.zeros(-(-(start + 60) // 12) * 12, dtype=dtype, device=DEVICE)
    transports = Transports("collective", communicators=2 if node_size else 1)
    topology = topology or find_topology(dist.group.WORLD, node_size, transports)
    bucket = GradientBucket(flat, tuple(spans), scale, sharded, topology, Ledger())
    part = partial(parts.BitmapPart, keep=0.2, bits=cell_bits)
    if wire == "sketch":
        part = partial(parts.SketchPart, keep=0.2, config=sketch_of(cell_bits))
    return sync.TagcGradientSync(bucket, LAYERS, part)


def fill(sync, step: int, rank: int) -> torch.Tensor:
    """Fill in gradients, half of them equal on all ranks, and return them in fp32."""
    flat = sync.bucket.gradients
    total = torch.zeros(flat.numel())
    for key in (step, 1000 + 10 * step + rank):
        g = torch.Generator().manual_seed(key)
        values = (
            torch.randn(flat.numel(), generator=g) * torch.randn(flat.numel(), generator=g).exp()
        )
        total += 0.5 * values
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    for span in sync.bucket.spans:
        inside[span.start : span.end] = True
    flat.copy_(total.masked_fill_(~inside, 0.0))
    return flat.float().clone()


def remembered(sync) -> torch.Tensor:
    """A copy of the memory, fp32, where it lies in the bucket."""
    from megatron.compression.tagc.sync import scattered

    flat = torch.zeros(sync.bucket.numel, device=DEVICE)
    for part in sync.parts:
        for owner, row in zip(part.owners, part.memory, strict=True):
            scattered(row, flat, sync.shares[owner].compressed)
    return flat


def total_of(x: torch.Tensor) -> torch.Tensor:
    """float64 sum over ranks."""
    total = x.double()
    dist.all_reduce(total)
    return total


def compressed_mask(sync) -> torch.Tensor:
    """Return the mask of the values that go through sketches."""
    mask = torch.zeros(sync.bucket.numel, dtype=torch.bool, device=DEVICE)
    for share in sync.shares:
        for begin, end in share.compressed:
            mask[begin:end] = True
    return mask


SCALE = 0.25
"""Of sums: a power of two, so that scaling rounds nothing."""


def sum_worker(rank: int, world_size: int, node_size: int | None = None) -> None:
    """Nothing is lost, sums are scaled once, and replicas agree."""
    cases = (
        (True, torch.bfloat16, 16, "sketch"),
        (False, torch.float32, 16, "sketch"),
        (True, torch.bfloat16, 16, "packed"),
        (False, torch.float32, 16, "packed"),
        (True, torch.float32, 32, "sketch"),
        (False, torch.bfloat16, 32, "sketch"),
    )
    for sharded, dtype, cell_bits, wire in cases[: 4 if world_size > 2 else None]:
        sync = make_sync(sharded, dtype, cell_bits, node_size, wire, scale=SCALE)
        flat = sync.bucket.gradients
        mask = compressed_mask(sync)
        shard = torch.zeros(flat.numel(), dtype=torch.bool, device=DEVICE)
        size = flat.numel() // world_size
        shard[rank * size : (rank + 1) * size] = True
        mine = shard if sharded else torch.ones_like(shard)
        for step in range(2):
            before = remembered(sync)
            gradients = fill(sync, step, rank)
            sync.start().wait()
            after = remembered(sync)
            # Nothing is lost: the sum that arrived is that of gradients and memories before, less
            # the memories after. Memories are in units of the sum before scaling.
            expected = total_of(gradients) + total_of(before) - total_of(after)
            arrived = flat.double() / SCALE
            ulp = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-22
            bound = total_of(gradients.abs()) * ulp + expected.abs() * ulp + 1e-6
            assert bool(((arrived - expected).abs() <= bound)[mine].all())
            _check_memory(after, mask)
            sent_share = (flat != 0)[mine & mask].float().mean()
            union = 0.2 if wire == "sketch" else 1 - 0.8**world_size
            assert 0.5 * union < sent_share < union, sent_share
            assert sharded or same_everywhere(digest(flat))
        if wire == "packed" and node_size:
            _check_sent_between_nodes(sync, steps=2)


def _check_memory(memory: torch.Tensor, mask: torch.Tensor) -> None:
    """Assert that only values that go through sketches are remembered."""
    assert not memory[~mask].any()
    assert bool(memory[mask].any())


def _check_sent_between_nodes(sync, steps: int) -> None:
    """A node's values travel once, as their union: less than each rank's own would."""
    topology = sync.bucket.topology
    expected = 0
    for owner, part in sync.part_of.items():
        sizes = {of: layout.wire_bytes for of, layout in part.layouts.items()}
        assert sizes[topology.local] < 0.9 * topology.local * sizes[1]
        if owner % topology.local == topology.index and owner != topology.rank:
            expected += sizes[topology.local]
    sent = sum(
        row["sent_bytes"]
        for row in sync.bucket.ledger.rows()
        if (row["kind"], row["operation"], row["link"]) == ("compressed", "all_to_all", "inter")
    )
    assert sent == steps * expected


def bytes_worker(rank: int, world_size: int) -> dict[str, int]:
    from megatron.compression.tagc.parts import numel_of

    sync = make_sync(True, torch.float32)
    fill(sync, 0, rank)
    with BackendAudit(sync.bucket.ledger, lambda: {"data parallel": [dist.group.WORLD]}) as audit:
        sync.start().wait()
    assert audit.finish() == [], "the ledger has what the backend was given"
    kinds = {"compressed": 0, "excluded": 0}
    for row in sync.bucket.ledger.rows():
        if row["operation"] == "all_to_all":
            kinds[row["kind"]] += row["sent_bytes"]
    wires = sum(
        SketchLayout(sketch_of(), share.compressed_numel).wire_bytes
        for owner, share in enumerate(sync.shares)
        if owner != rank and share.compressed
    )
    assert kinds["compressed"] == wires
    exact = sum(
        4 * numel_of(share.exact) for owner, share in enumerate(sync.shares) if owner != rank
    )
    assert 0 <= kinds["excluded"] - exact < 64 * world_size
    return {
        "wires": wires,
        "values": sum(share.compressed_numel for o, share in enumerate(sync.shares) if o != rank),
    }


def _non_finite_worker(
    rank: int, world_size: int, sharded: bool, wire: str, node_size=None
) -> None:
    sync = make_sync(sharded, torch.float32, node_size=node_size, wire=wire)
    fill(sync, 0, rank)
    sync.start().wait()
    before = remembered(sync)
    fill(sync, 1, rank)
    if rank == 1:
        sync.bucket.gradients[100] = float("inf")
    sync.start().wait()
    seen = torch.tensor([float(not sync.bucket.gradients[:64].isfinite().all())], device=DEVICE)
    seen += float(not sync.bucket.gradients[64:128].isfinite().all())
    dist.all_reduce(seen)
    assert seen.item() > 0, "a non-finite gradient shows in the result"
    after = remembered(sync)
    part = slice(*sync.shares[0].compressed[0])
    assert after.isfinite().all()
    if wire == "sketch" or rank == 1:  # packed, the others do not know when they send
        assert torch.equal(after[part], before[part])
    fill(sync, 2, rank)
    sync.start().wait()
    mine = sync.bucket.shard if sharded else sync.bucket.gradients
    assert mine.isfinite().all()


@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), (3, None), (4, 2)])
def test_nothing_is_lost_and_replicas_agree(world_size: int, node_size: int | None) -> None:
    """Sums and memories make up the gradients, over one hop and over two."""
    spawn(sum_worker, world_size, node_size)


@pytest.mark.parametrize("wire", ["sketch", "packed"])
@pytest.mark.parametrize("sharded", [True, False])
def test_an_infinity_shows_and_poisons_nothing(sharded: bool, wire: str) -> None:
    """On two ranks: it is in the sum, and not in the memory."""
    spawn(_non_finite_worker, 2, sharded, wire)


@pytest.mark.parametrize(("sharded", "wire"), [(True, "packed"), (False, "sketch")])
def test_an_infinity_on_two_nodes(sharded: bool, wire: str) -> None:
    """The same over two hops."""
    spawn(_non_finite_worker, 4, sharded, wire, 2)


def test_bits_that_travel() -> None:
    """The ledger counts what is sent: 16 / 3.85 + 1 bits a value."""
    for sizes in spawn(bytes_worker, 2):
        assert 5.0 < 8 * sizes["wires"] / sizes["values"] < 5.6


SKETCHES = Setup(settings={"compression": "tagc:wire=sketch"}, bucket_size=50_000)
TRAININGS = {
    "sketches": SKETCHES,
    "sketches, plain DDP, bf16 gradients": replace(
        SKETCHES, distributed_optimizer=False, micro_batches=2, fp32_gradients=False
    ),
    "packed": replace(SKETCHES, settings={"compression": "tagc"}),
}


def training_worker(rank: int, world_size: int, name: str, iterations: int = 16) -> list[float]:
    from megatron.compression.tagc import parts

    parts.SMALLEST = 2048
    start(rank)
    training, losses = train(rank, TRAININGS[name], iterations)
    assert same_everywhere(training.digest())
    assert training.kinds() == {"compressed", "excluded"}
    audit = BackendAudit(training.run.ledger, lambda: {"data parallel": [dist.group.WORLD]})
    with audit:
        training.step()
        training.settle()
    assert audit.finish() == [], "what is left out travels in payloads, and is counted"
    return losses


@pytest.mark.parametrize("name", TRAININGS)
def test_training_learns_and_weights_agree(name: str) -> None:
    """Losses fall, replicas hold the same bits, and the ledger knows all that was sent."""
    for losses in spawn(training_worker, 2, name, 24 if name == "sketches" else 16):
        assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def _run(ranks: int, *flags: str, micro_batch: str = "2"):
    flags = ("--bf16", "--use-distributed-optimizer", "--dp-compression", "tagc:layers=all", *flags)
    changes = {"train_iters": "6", "micro_batch_size": micro_batch, "hidden_size": "128"}
    return pretrain(*tiny_flags(*flags, **changes), ranks=ranks)


OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")


class TestResume:
    """Six iterations on two ranks, and resumes from the fourth."""

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        """The folder of the checkpoints."""
        return tmp_path_factory.mktemp("tagc") / "checkpoints"

    @pytest.fixture(scope="class")
    def uninterrupted(self, saved: Path):
        run = _run(2, *OVERLAPS, "--save", str(saved), "--save-interval", "4")
        go_back_to(4, saved)
        return run

    def test_log_has_the_share_and_the_warm_up(self, uninterrupted) -> None:
        """The warm-up is a fifth of the run."""
        line = "each rank leaves out 0.8 of its gradients of attention and embedding"
        assert line in uninterrupted.output
        assert "gradients go uncompressed up to iteration 1" in uninterrupted.output

    def test_same_ranks_resume_to_the_same_bits(self, uninterrupted, saved: Path) -> None:
        resumed = _run(2, *OVERLAPS, "--load", str(saved))
        assert "every rank restored its memory" in resumed.output
        assert resumed.parameters == uninterrupted.parameters
        assert resumed.parameters[0] == resumed.parameters[1], "replicas differ"

    def test_more_ranks_resume_without_the_memory(self, uninterrupted, saved: Path) -> None:
        wider = _run(4, *OVERLAPS, "--load", str(saved), micro_batch="1")
        line = "made with other ranks, nodes, buckets or parameters: the memory of tagc"
        assert line in wider.output
        for parameters in wider.parameters:
            assert parameters == wider.parameters[0], "replicas differ"
        assert abs(wider.losses[6] - uninterrupted.losses[6]) < 0.1
