"""FSDP2 over codecs, against FSDP2 as it is: losses, bytes, overflows, checkpoints, and what is refused."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2 import Fsdp2Compression, attach
from tests.distributed.launch import UNKNOWN, go_back_to, pretrain, start, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.transport_audit import TransportAudit, total_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDTH = 64
DEVICE = "cpu"
"""Of the models; tests/gpu sets another one."""


class Block(nn.Module):
    """Its odd sizes do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 401), nn.GELU(), nn.Linear(401, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def build(policy=BF16, *, nested=False, device=None, mesh=None, **options) -> nn.Module:
    """Two blocks and a head under FSDP2; ``nested``: one block, whose MLP is wrapped as well."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),)) if mesh is None else mesh
    torch.manual_seed(0)
    with torch.device(device or DEVICE):
        model = nn.Sequential(*[Block() for _ in range(1 if nested else 2)], nn.Linear(WIDTH, 33))
    options = {"mesh": mesh, "mp_policy": policy, **options}
    for block in model[:-1]:
        if nested:
            fully_shard(block.mlp, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, steps: int, micro_batches=1, optimizer=None, first=0) -> list[float]:
    """Losses over all ranks. Only the last micro-batch's backward sends gradients."""
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3), []
    target = torch.randn(WIDTH, 33, generator=torch.Generator().manual_seed(7)) / 10
    for step in range(first, first + steps):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
            x = torch.randn(16, WIDTH, generator=generator)
            y = torch.tanh(x @ target).to(DEVICE)
            model.set_requires_gradient_sync(number == micro_batches - 1)
            loss = (model(x.to(DEVICE)).float() - y).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def check_bytes(given: Counter, compression: Fsdp2Compression) -> None:
    """The ledger has what c10d was given, but for the losses and what the check of the first step sums."""
    counted = total_of(compression.run.ledger.rows())
    assert 0 <= given["all_reduce"] - counted["all_reduce"] < 1000
    counted["all_reduce"] = given["all_reduce"]
    assert +counted == +given


def kinds(compression: Fsdp2Compression, traffic: str) -> set[str]:
    """Why bytes of a class were sent as they were."""
    return {kind for kind, pair in compression.run.ledger.totals()[traffic].items() if any(pair)}


def close(losses: list[float], exact: list[float], percent: float) -> bool:
    """Whether the last ones, on average, differ by at most so much."""
    one, other = (sum(values[-5:]) for values in (losses, exact))
    return abs(one / other - 1) < percent / 100


def learning_worker(rank: int, ranks: int) -> None:
    plain = train(build(nested=True), 24)
    model = build(nested=True)
    compression = attach(model, "lossless", None)
    assert len(compression.gathers) == 3
    assert train(model, 24) == plain
    # The head's 1105 values a rank may not fit their payload in a step (seen on a GPU).
    assert "compressed" in kinds(compression, "dp.weight") <= {"compressed", "overflow"}
    assert "ratio 1.2" in compression.summary()
    model = build(nested=True)
    compression = attach(model, "none", "int8")
    int8 = train(model, 24)
    assert int8 != plain and close(int8, plain, 0.1)
    assert kinds(compression, "dp.gradient") == {"compressed"}
    model, lines = build(), []
    attach(model, "none", "tagc:layers=attention", say=lines.append)
    train(model, 3)
    assert [one for one in lines if "compresses no gradients: its layers have other names" in one]
    models, lines = [build(), build()], []
    for one in models:
        attach(one, "lossless", "int8", start_iteration=1, say=lines.append)
    optimizer = torch.optim.SGD([p for one in models for p in one.parameters()])
    for _ in range(3):
        sum(one(torch.ones(1, WIDTH, device=DEVICE)).sum() for one in models).backward()
        optimizer.step()
    assert lines and UNKNOWN not in str(lines), "no audit takes one model's traffic for the other's"
    model, reference, lines = build(), build(), []
    attach(model, "lossless", "int8", say=lines.append)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH, device=DEVICE)).sum().backward()
        optimizer.step()
        reference(torch.ones(1, WIDTH, device=DEVICE))
    assert lines and UNKNOWN not in str(lines), "after a step others send until the next pass"
    meshes = init_device_mesh(DEVICE, (ranks, 1), mesh_dim_names=("other", "own"))
    assert "payloads of 0.000 MB" in attach(build(mesh=meshes["own"])).summary(), (
        "one rank sends nothing"
    )
    assert "payloads of 0.000 MB" not in attach(build(mesh=meshes)).summary(), (
        "but to replicas it does"
    )


def test_losses() -> None:
    """24 steps: those of lossless gathers are equal to the last bit, nested modules too; int8 is near. Two
    models in one loop, of which both or one are compressed."""
    spawn(learning_worker, 2)


SETTINGS = {
    "kept between forward and backward": ({"reshard_after_forward": False}, "lossless", "sdp4bit"),
    "fp32": ({"policy": MixedPrecisionPolicy()}, "lossless", "int8"),
    "fp16 gradients": (
        {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float16)},
        "int8",
        "int8",
    ),
    "fp32 gradients": (
        {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "int8",
        "int6",
    ),
    "tagc": ({}, "none", "tagc"),
    "a compressor of one's own": ({}, "none", "examples.powersgd:PowerSGD:rank=8"),
}


def settings_worker(rank: int, ranks: int) -> None:
    for name, (options, gather, reduce) in SETTINGS.items():
        plain = train(build(**options), 2, micro_batches=2)
        model, lines = build(**options, device="meta" if name == "fp32" else None), []
        compression = attach(model, gather, reduce, say=lines.append)
        if name == "fp32":
            model.to_empty(device="cpu")
            model.load_state_dict(build(**options).state_dict())
        with TransportAudit() as audit:
            losses = train(model, 2, micro_batches=2)
        check_bytes(audit.sent, compression)
        assert close(losses, plain, 20 if compression.state_dict() else 1), (name, losses, plain)
        assert len(lines) == 2, lines  # and none of the first step's audit


def test_settings_of_fsdp() -> None:
    """Two micro-batches, of which one sends gradients: what c10d is given is in the ledger, and the loss is
    near that of FSDP as it is."""
    spawn(settings_worker, 3)


def overflow_worker(rank: int, ranks: int) -> None:
    def spread(model: nn.Module) -> nn.Module:
        """One shard of one module with exponents that do not fit."""
        weight = model[1].mlp[0].weight.to_local()
        if rank == 0:
            with torch.no_grad():
                weight *= 2.0 ** -(torch.arange(weight.numel(), device=DEVICE) % 50).view(
                    weight.shape
                )
        return model

    plain = train(spread(build()), 3)
    model = spread(build())
    compression = attach(model, "lossless", "none")
    assert train(model, 3) == plain
    assert kinds(compression, "dp.weight") == {"compressed", "overflow"}
    assert [one.fits for one in compression.gathers] == [True, True, False]
    assert "1 modules do not fit" in compression.summary()
    model = build()
    compression = attach(model, "lossless", "none")
    handle = model[0].unshard(async_op=True)
    handle.wait()
    train(model, 1)
    x, weight = torch.ones(1, WIDTH, device=DEVICE), model[1].mlp[0].weight
    model(x)
    weight.data.copy_(
        weight.data * 2.0 ** -(50 * torch.rand_like(weight))
    )  # torch counts no version
    model(x)
    compression.weights_changed()
    with pytest.raises(RuntimeError, match=r"weights of FSDPParamGroup\(fqn=1\) changed unnoticed"):
        model(x)
    model = build()
    compression = attach(model, "lossless", "none", start_iteration=1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):  # the model's own forward is never called
        model[1](x).sum().backward()
        optimizer.step()
    assert kinds(compression, "dp.weight") == {"warmup", "compressed"}
    model[1](x)
    model[1].reshard()
    with torch.no_grad():
        weight = model[1].mlp[0].weight
        weight *= 2.0 ** -(50 * torch.rand_like(weight))
    exact = weight.full_tensor().bfloat16()
    model[1].unshard()
    assert torch.equal(model[1].mlp[0].weight, exact)


def test_overflow() -> None:
    """A shard that does not fit goes uncompressed on all ranks, with the same losses; a change that nothing
    tells of is no silent one. Steps and changes are seen where only parts of the model are called."""
    spawn(overflow_worker, 2)


def replicas_worker(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicas", "shards"))
    plain, model = train(build(mesh=mesh), 3), build(mesh=mesh)
    compression = attach(model, "lossless", "int8")
    with TransportAudit() as audit:
        losses = train(model, 3)
    check_bytes(audit.sent, compression)
    assert kinds(compression, "dp.weight") == {"compressed"} and close(losses, plain, 0.5)
    gradients, inputs = [], torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(rank))
    inputs = inputs.to(DEVICE)
    for reduce in (None, "int8"):
        model = build(mesh=mesh)
        for one in (model[0], model[1], model):
            one.set_gradient_divide_factor(3)
            one.set_force_sum_reduction_for_comms(
                reduce is None
            )  # else NCCL's, which multiplies before
        if reduce:
            attach(model, None, reduce)
        for last in (False, True):  # sums over shards each time, over replicas once
            model.set_requires_all_reduce(last)
            model(inputs[last]).square().mean().backward()
        gradients.append(model[0].mlp[0].weight.grad.to_local())
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()
    stage, stages = mesh.get_local_rank("replicas"), mesh.get_group("replicas")
    others = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    model = nn.Sequential(build(mesh=mesh["shards"]))
    if stage == 1:
        other = DeviceMesh.from_group(others[1], DEVICE)
        model.append(fully_shard(nn.Linear(33, 33, device=DEVICE), mesh=other, mp_policy=BF16))
    attach(model)  # one stage has two meshes
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):  # the second stage begins when the first is through
        if stage == 1:
            dist.recv(inputs[0], group_src=0, group=stages)
        loss = model(inputs[0]).sum()
        if stage == 0:
            dist.send(inputs[0], group_dst=1, group=stages)
        loss.backward()
        optimizer.step()


def test_replicas() -> None:
    """HSDP on two times two ranks, and two pipeline stages of two ranks."""
    spawn(replicas_worker, 4)


def checkpoint_worker(rank: int, ranks: int, folder: str) -> None:
    def begin(**state) -> tuple:
        model = build()
        compression = attach(model, "none", "tagc:sparsity=0.9")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, compression

    def state(model, optimizer, compression) -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "compression": compression}

    model, optimizer, compression = begin()
    train(model, 3, optimizer=optimizer)
    dcp.save(state(model, optimizer, compression), checkpoint_id=folder)
    expected = train(model, 3, optimizer=optimizer, first=3)
    model, optimizer, compression = begin()
    loaded = state(model, optimizer, compression)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert train(model, 3, optimizer=optimizer, first=3) == expected


def test_checkpoint(tmp_path: Path) -> None:
    """A run with a memory of gradients resumes to the same losses."""
    spawn(checkpoint_worker, 2, str(tmp_path / "saved"))


def refusal_worker(rank: int, ranks: int) -> None:
    fp16 = MixedPrecisionPolicy(param_dtype=torch.float16)
    for options, given, message in (
        ({"offload_policy": CPUOffloadPolicy()}, {}, "2.weight is offloaded to CPU; drop CPUOff"),
        ({"policy": fp16}, {}, "gathers neither bf16 nor fp32, which lossless shortens"),
        ({"policy": fp16}, {"gather": "none", "reduce": "tagc"}, "has fp16 gradients, whose scale"),
        ({}, {"gather": "tagc"}, "^gather tagc: .*; give it to reduce"),
        ({}, {"reduce": "lossless"}, "^reduce lossless: under FSDP2 the host would wait"),
        ({}, {"gather": "tah-quant"}, "^gather tah-quant needs tokens and channels"),
        ({}, {"start_iteration": -1}, "^start_iteration -1 must be"),
        ({}, {"reduce": "sdp4bit:outer=int8"}, "drop outer="),
        (None, {}, r"call fully_shard\(\) before it"),
    ):
        model = nn.Linear(2, 2) if options is None else build(**options)
        with pytest.raises(CompressionConfigError, match=message):
            attach(model, **given)
    with pytest.raises(CompressionConfigError, match="weight is replicated; use fully_shard"):
        attach(replicate(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (ranks,))))
    model = build()
    model[0].mlp[0] = nn.Linear(WIDTH, 401)  # FSDP keeps the old one
    attach(model, "none", "int8")
    with pytest.raises(CompressionConfigError, match="is attached already"):
        attach(model)
    model = build()
    attach(model, "none", "tagc")
    model[0].mlp[0].weight.requires_grad_(False)
    model(torch.ones(1, WIDTH)).sum().backward()  # fewer parameters, in every pass
    model[0].mlp[0].weight.requires_grad_(True)
    with pytest.raises(
        CompressionConfigError, match="it needs the same in each, so choose a codec"
    ):
        model(torch.ones(1, WIDTH)).sum().backward()


def test_refusals() -> None:
    spawn(refusal_worker, 2)


MEGATRON = (
    "--use-torch-fsdp2",
    "--untie-embeddings-and-output-weights",
    "--no-gradient-accumulation-fusion",
)
"""With Megatron's own conditions for it."""
OWN_STREAMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""What Megatron asks for with FSDP2, which communicates on streams of its own."""


def test_megatron() -> None:
    """--use-torch-fsdp2: the same losses over lossless gathers, and every byte counted."""
    flags = tiny_flags(*MEGATRON, "--bf16")
    plain = pretrain(*flags, env=OWN_STREAMS)
    compressed = pretrain(*flags, "--dp-compression", "none", "lossless", env=OWN_STREAMS)
    assert compressed.losses == plain.losses and len(plain.losses) == 4
    for run in (plain, compressed):
        assert UNKNOWN not in run.output
    assert "weights lossless, gradients uncompressed" in compressed.output
    assert "data-parallel ratio: 1.2" in compressed.output


RESUMED = {
    "Adam, bf16": "--bf16 --dp-compression int8 lossless",
    "Adam, fp32, uncompressed": "",
    "SGD": "--bf16 --optimizer sgd --dp-compression int8 int8",
    "Adam, torch_dcp": "--bf16 --ckpt-format torch_dcp --dp-compression int8 lossless",
    "SGD, torch_dcp": "--bf16 --optimizer sgd --ckpt-format torch_dcp",
}


@pytest.mark.parametrize("words", RESUMED.values(), ids=RESUMED)
def test_megatron_resumes(words: str, tmp_path: Path) -> None:
    """A run under --use-torch-fsdp2 that is resumed ends in the bits of the uninterrupted one."""
    check_resumed(tmp_path, *MEGATRON, *words.split())


@pytest.mark.parametrize("words", ["--bf16", "", "--bf16 --optimizer sgd"])
def test_megatron_resumes_without_shards(words: str, tmp_path: Path) -> None:
    """So does one under Megatron's DDP without the distributed optimizer."""
    check_resumed(tmp_path, "--no-gradient-accumulation-fusion", *words.split())


def check_resumed(folder: Path, *words: str) -> None:
    """Four iterations saved after the second, and the last two once more from there: equal to the last bit."""
    flags = tiny_flags(*words)
    saving = ("--save", str(folder), "--save-interval", "2")
    whole = pretrain(*flags, *saving, env=OWN_STREAMS)
    go_back_to(2, folder)
    resumed = pretrain(*flags, "--load", str(folder), env=OWN_STREAMS)
    assert sorted(resumed.losses) == [3, 4]
    assert resumed.losses == {iteration: whole.losses[iteration] for iteration in (3, 4)}
    assert resumed.parameters == whole.parameters


def test_example(tmp_path: Path) -> None:
    """examples/fsdp2.py saves compressed, and resumes uncompressed from there."""
    for more in ((), ("--gather", "none", "--reduce", "none")):
        words = "--steps", "2", "--checkpoint", str(tmp_path), *more
        run = start("examples/fsdp2.py", *words, processes=2).finish(120)
        assert run.returncode == 0, run.output[-3000:]
    assert run.output.count("ratio 1.00") == 2 and "step 4" in run.output
