"""torch's DDP over codecs, against DDP as it is: gradients, bytes, memories, settings, refusals."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
)
from megatron.compression.ddp import DdpCompression, attach
from megatron.compression.errors import CompressionConfigError
from tests.distributed.launch import UNKNOWN
from tests.distributed.odd_block import WIDTH, Block
from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_ddp import digest, same_everywhere
from tests.distributed.transport_audit import TransportAudit, total_of

DEVICE = "cpu"
"""Of the models; tests/gpu sets another one."""


class Model(nn.Module):
    """Two blocks and a head; ``spare`` is used where an input's first value is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 33)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        dtype = self.blocks[0].norm.weight.dtype
        x = x.to(dtype)
        for block in self.blocks:
            x = block(x)
        if use_spare:
            x = x + self.spare(x)
        return self.head(x.to(self.head.weight.dtype)).float()


def build(change: Callable[[nn.Module], None] | None = None, **options) -> DistributedDataParallel:
    """Return the model under DDP. Its one bucket becomes several after the first iteration."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    if change is not None:
        change(model)
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.15, **options})


def inputs(step: int, rank: int | None = None) -> torch.Tensor:
    """Return a batch of this rank, ``[16, width]``."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, WIDTH, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, step: int, **options) -> torch.Tensor:
    x = inputs(step)
    return (model(x, **options) - torch.tanh(x[:, :33])).square().mean()


def train(model: nn.Module, steps: int, optimizer=None, first: int = 0) -> list[float]:
    """Return this rank's losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of(model: nn.Module) -> torch.Tensor:
    """Return all gradients, fp32 ``[n]``; zeros where there is none."""
    parts = []
    for parameter in model.parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parts.append(gradient.detach().float().view(-1))
    return torch.cat(parts)


def distance(gradients: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradients - exact).norm() / exact.norm())


def quiet(line: str) -> None:
    """A log that nobody reads."""


def kinds(compression: DdpCompression) -> set[str]:
    """Why bytes of gradients were sent as they were."""
    totals = compression.run.ledger.totals()["dp.gradient"]
    return {kind for kind, pair in totals.items() if any(pair)}


def halves(model: nn.Module) -> None:
    """Blocks in bf16, a head in fp32: buckets of two types."""
    model.blocks.to(torch.bfloat16)
    model.spare.to(torch.bfloat16)


CASES = {
    "int8": ("int8", {}, {}, 0.02),
    "sdp4bit": ("sdp4bit", {}, {}, 0.02),
    "lossless": ("lossless", {}, {}, 1e-6),
    "gradient_as_bucket_view": ("int8", {"gradient_as_bucket_view": True}, {}, 0.02),
    "static_graph": ("int8", {"static_graph": True}, {}, 0.02),
    "several types": ("int8", {"change": halves}, {}, 0.02),
    "unused on two ranks": ("int8", {"find_unused_parameters": True}, {"use_spare": False}, 0.02),
}
"""Codec, DDP's settings, what ranks other than the first call the model with, and the tolerance."""


def run_case(name: str) -> dict:
    """Return what three backward passes of one case gave, beside DDP as it is."""
    reduce, options, call, _ = CASES[name]
    exact = build(**options)
    model = build(**options)
    lines: list[str] = []
    compression = attach(model, reduce, log=lines.append)
    if dist.get_rank() == 0:
        call = {}
    distances = []
    digests = []
    for step in range(3):
        for either in (exact, model):
            loss_of(either, step, **call).backward()
        # The second pass has other buckets than the first, where DDP makes them anew.
        distances.append(distance(gradients_of(model), gradients_of(exact)))
        digests.append(digest(gradients_of(model)))
        exact.zero_grad()
        model.zero_grad(set_to_none=step == 1)
    summary = compression.summary()
    compression.close()
    return {
        "distances": distances,
        "digests": digests,
        "kinds": kinds(compression),
        "lines": lines,
        "summary": summary,
    }


def cases_worker(rank: int, ranks: int) -> dict[str, dict]:
    return {name: run_case(name) for name in CASES}


cases = spawned(cases_worker, 3)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_ddp(name: str, cases: list[dict]) -> None:
    """After each backward pass, in both layouts of buckets: near DDP's own, and the same bits on all
    ranks."""
    results = [result[name] for result in cases]
    assert max(results[0]["distances"]) < CASES[name][3]
    assert all(result["digests"] == results[0]["digests"] for result in results)
    assert results[0]["kinds"] == {"compressed"}
    # Two of attach(), and none of the check of the first step's bytes.
    assert len(results[0]["lines"]) == 2, results[0]["lines"]
    assert results[0]["summary"].startswith("sent dp.gradient ")


def bytes_worker(rank: int, ranks: int) -> None:
    model = build(find_unused_parameters=True)
    compression = attach(model, "int8", start_iteration=1, log=quiet)
    with TransportAudit() as audit:
        losses = train(model, 3)
    assert kinds(compression) == {"warmup", "compressed"} and len(losses) == 3
    counted = total_of(compression.run.ledger.rows())
    # DDP reduces besides, once a pass, which of the parameters were used; the ledger's check sums
    # its result once.
    others = audit.sent.pop("all_reduce") - counted.pop("all_reduce")
    assert 0 <= others < 2000
    assert +counted == +audit.sent


def test_every_byte_is_in_the_ledger() -> None:
    """What torch.distributed was given, in an uncompressed iteration and in two compressed ones."""
    spawn(bytes_worker, 3)


def own_messages_worker(rank: int, ranks: int) -> None:
    model = build()
    lines: list[str] = []
    attach(model, "int8", log=lines.append)
    # A layer that sends something of its own in its forward pass.
    statistics = torch.zeros(5000, device=DEVICE)
    model.module.head.register_forward_pre_hook(lambda *_: dist.all_reduce(statistics))
    train(model, 1)
    assert len(lines) == 2
    train(model, 2)
    assert len(lines) == 3 and lines[-1].startswith("compression: data parallelism sent 20,000")
    assert UNKNOWN in lines[-1]


def test_what_the_ledger_does_not_know_is_named() -> None:
    """After the first iteration, once."""
    spawn(own_messages_worker, 2)


def uncompressed_worker(rank: int, ranks: int) -> None:
    exact = train(build(), 4)
    for reduce in ("none", "int8", None):
        model = build()
        compression = attach(model, reduce, start_iteration=3, log=quiet)
        assert train(model, 3) == exact[:3]
        assert kinds(compression) == {"off" if reduce != "int8" else "warmup"}
        compression.close()
        assert train(model, 1, first=3) == exact[3:]


def test_what_is_not_compressed_has_the_bits_of_ddp() -> None:
    """reduce="none", iterations before start_iteration, and a model after close()."""
    spawn(uncompressed_worker, 2)


def no_sync_worker(rank: int, ranks: int) -> None:
    gradients = []
    for reduce in (None, "int8"):
        model = build()
        compression = attach(model, reduce, log=quiet)
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, 0).backward()
            loss_of(model, 1).backward()
        gradients.append(gradients_of(model))
        assert compression.iteration == 2
    assert distance(gradients[1], gradients[0]) < 0.02
    assert same_everywhere(digest(gradients[1]))


def test_micro_batches_under_no_sync_are_sent_once() -> None:
    """The sum of both, and one iteration for both."""
    spawn(no_sync_worker, 2)


def remembered(compression: DdpCompression) -> torch.Tensor:
    """Return the memories of all ranks, summed by parameter, ``[n]``."""
    total = torch.cat([*compression.gradients.left_over().values()])
    dist.all_reduce(total)
    return total


def memory_worker(rank: int, ranks: int, reduce: str) -> None:
    exact, model = build(), build()
    compression = attach(model, reduce, log=quiet)
    kept = remembered(compression)
    for step in range(3):
        for either in (exact, model):
            either.zero_grad()
            loss_of(either, step).backward()
        # Nothing is lost: what was kept, and this iteration's, is sent or is kept.
        due = kept + ranks * gradients_of(exact)
        kept = remembered(compression)
        assert kept.norm() > 0.1 * due.norm()
        torch.testing.assert_close(ranks * gradients_of(model) + kept, due, rtol=1e-3, atol=1e-5)
    sizes = {len(sums.parameters) for sums in compression.gradients._sums.values()}
    assert max(sizes) < len(compression.gradients.parameters), "the one bucket is several now"
    assert same_everywhere(digest(gradients_of(model)))


@pytest.mark.parametrize("reduce", ["tagc:sparsity=0.9", "examples.powersgd:PowerSGD:rank=4"])
def test_memories_follow_their_parameters(reduce: str) -> None:
    """DDP makes its buckets anew after the first iteration: sums and memories add up to all that the
    ranks had, before and after."""
    spawn(memory_worker, 2, reduce)


def checkpoint_worker(rank: int, ranks: int, folder: str) -> None:
    def begin() -> tuple:
        # Buckets that stay as they are, so that a resumed run can have the same bits.
        model = build(find_unused_parameters=True)
        compression = attach(model, "tagc:sparsity=0.9", log=quiet)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), compression

    def state(model, compression) -> dict:
        return {"model": model.module.state_dict(), "compression": compression}

    model, optimizer, compression = begin()
    train(model, 2, optimizer)
    dcp.save(state(model, compression), checkpoint_id=folder)
    expected = train(model, 2, optimizer, first=2)
    model, optimizer, compression = begin()
    loaded = state(model, compression)
    dcp.load(loaded, checkpoint_id=folder)
    model.module.load_state_dict(loaded["model"])
    assert remembered(compression).norm() > 0
    assert train(model, 2, optimizer, first=2) == expected
    saved = compression.state_dict()
    with pytest.raises(CompressionConfigError, match=r"^load_state_dict\(\): .*is of more ranks"):
        compression.load_state_dict({**saved, "rank2.head.weight": torch.zeros(1)})
    del saved[f"rank{rank}.head.bias"]
    with pytest.raises(CompressionConfigError, match=r"has no rank\d.head.bias"):
        compression.load_state_dict(saved)
    attach(build(), "int8", log=quiet).load_state_dict({})


def test_checkpoint(tmp_path: Path) -> None:
    """A run with a memory of gradients resumes to the same losses; another model's is refused."""
    spawn(checkpoint_worker, 2, str(tmp_path / "saved"))


def join_worker(rank: int, ranks: int) -> None:
    results = []
    for reduce in (None, "int8", "tagc:sparsity=0.9"):
        model = build(find_unused_parameters=True)
        attach(model, reduce, log=quiet)
        with model.join():
            train(model, 2 + 2 * rank)
        assert same_everywhere(digest(torch.cat([p.view(-1) for p in model.parameters()])))
        results.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    start = torch.cat([p.detach().view(-1) for p in build().parameters()])
    assert distance(results[1] - start, results[0] - start) < 0.02
    assert distance(results[2] - start, results[0] - start) < 0.7
    model = build()
    attach(model, "int8", log=quiet)
    with (
        pytest.raises(CompressionConfigError, match="divide_by_initial_world_size=False"),
        model.join(divide_by_initial_world_size=False),
    ):
        train(model, 1)


def test_join_of_uneven_inputs() -> None:
    """A rank that has joined sends zeros, as without compression; nobody waits (60 s). Another
    divisor is refused."""
    spawn(join_worker, 2, timeout=60)


def scaler_worker(rank: int, ranks: int) -> None:
    model = build()
    attach(model, "int8", log=quiet)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = gradients_of(model)
    for step in range(2):
        loss = scaler.scale(loss_of(model, step))
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        # An infinity of one rank has all of them skip the step, and halves the scale.
        assert scaler.get_scale() == (4.0, 2.0)[step]
        optimizer.zero_grad()
    assert before.norm() == 0


def test_a_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    spawn(scaler_worker, 2)


def scaled_memory_worker(rank: int, ranks: int) -> None:
    losses = []
    for scale in (None, 64.0):
        model = build()
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, growth_interval=1, enabled=scale is not None
        )
        attach(model, "tagc:sparsity=0.9", scaler=scaler, log=quiet)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()  # the scale doubles in each step
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    model = build()
    attach(model, "tagc", log=quiet)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(
        CompressionConfigError, match=r"^reduce tagc keeps .* give attach\(\) scaler="
    ):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_memory_does_not_depend_on_the_loss_scale() -> None:
    """With the scaler that attach() was given the losses have the bits of a run without one; a
    scaler that it was not given is refused at the first step."""
    spawn(scaled_memory_worker, 2)


def two_models_worker(rank: int, ranks: int) -> None:
    models = [build(), build()]
    lines: list[str] = []
    compressions = []
    for model, reduce in zip(models, ("int8", "sdp4bit"), strict=True):
        compressions.append(attach(model, reduce, start_iteration=1, log=lines.append))
    for step in range(3):
        for model in models:
            model.zero_grad()
        # One backward pass for both.
        (loss_of(models[0], step) + loss_of(models[1], step)).backward()
    totals = [compression.run.ledger.totals()["dp.gradient"] for compression in compressions]
    assert totals[0]["warmup"] == totals[1]["warmup"]
    assert totals[0]["compressed"] != totals[1]["compressed"]
    assert UNKNOWN not in str(lines)
    for model in models:
        assert same_everywhere(digest(gradients_of(model)))


def test_two_models_in_one_process() -> None:
    """Each has its own codec and ledger; no check of one's bytes takes the other's for missing."""
    spawn(two_models_worker, 2)


def nodes_worker(rank: int, ranks: int) -> str:
    os.environ["MEGATRON_COMPRESSION_NODE_SIZE"] = "2"
    exact, model = build(find_unused_parameters=True), build(find_unused_parameters=True)
    lines: list[str] = []
    attach(model, "sdp4bit", log=lines.append)
    for step in range(2):
        for either in (exact, model):
            either.zero_grad()
            loss_of(either, step).backward()
        assert distance(gradients_of(model), gradients_of(exact)) < 0.2
    assert same_everywhere(digest(gradients_of(model)))
    return lines[0]


@pytest.mark.thorough
def test_nodes_of_two_ranks() -> None:
    """Two hops and three exchanges a bucket, before DDP's own reduction of what was used."""
    assert "2 nodes of 2 ranks" in spawn(nodes_worker, 4)[0]


def unmatched_layers_worker(rank: int, ranks: int) -> None:
    model = build()
    lines: list[str] = []
    attach(model, "tagc:layers=attention", log=lines.append)
    train(model, 2)
    assert "compresses no gradients: its layers have other names" in lines[-1]


def test_a_compressor_that_names_no_layer_of_the_model_says_so() -> None:
    spawn(unmatched_layers_worker, 2)


class SlowMemory(GradientSync):
    """Remembers, and does not say of which parameters."""

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket = bucket

    def start(self, gradients: torch.Tensor | None = None) -> Work:
        return Work.completed()

    def state(self) -> dict[str, torch.Tensor]:
        return {"memory": torch.zeros(1)}


@dataclass(frozen=True)
class Forgetful(GradientCompressor):
    has_memory = True

    def build(self, bucket: GradientBucket) -> GradientSync:
        return SlowMemory(bucket)


def refusals_worker(rank: int, ranks: int) -> None:
    def sparse(model: nn.Module) -> None:
        model.table = nn.Embedding(8, WIDTH, sparse=True)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))["data"]
    for change, options, reduce, message in (
        (sparse, {}, "int8", r"^attach\(\): table has sparse gradients; drop sparse=True$"),
        (nn.Module.half, {}, "tagc", "has fp16 gradients, too coarse"),
        (nn.Module.half, {}, "lossless", "has fp16 gradients, and lossless shortens bf16 and fp32"),
        (None, {"device_mesh": mesh}, "int8", "device_mesh is part of a larger mesh"),
        (None, {"skip_all_reduce_unused_params": True}, "int8", "skip_all_reduce_unused_params"),
    ):
        with pytest.raises(CompressionConfigError, match=message):
            attach(build(change, **options), reduce, log=quiet)
    model = build()
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(CompressionConfigError, match="has a communication hook, allreduce_hook"):
        attach(model, log=quiet)
    model = build()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(CompressionConfigError, match="drop _register_builtin_comm_hook"):
        attach(model, log=quiet)
    model = build()
    attach(model, log=quiet)
    with pytest.raises(CompressionConfigError, match=r"is attached already; attach\(\) once"):
        attach(model, log=quiet)
    model = build()
    attach(model, "tests.distributed.test_ddp:Forgetful", log=quiet)
    with pytest.raises(CompressionConfigError, match=r"write left_over\(\) of SlowMemory"):
        loss_of(model, 0).backward()


def test_what_is_not_covered_is_refused() -> None:
    """Each in one line, with what to do."""
    spawn(refusals_worker, 2)
