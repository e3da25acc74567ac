"""FSDP2 over codecs, against FSDP2 as it is: losses, bytes, overflows, copies, checkpoints, refusals."""

import os
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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2 import Fsdp2Compression, attach
from tests.distributed.launch import UNKNOWN, go_back_to, pretrain, start, tiny_flags
from tests.distributed.odd_block import WIDTH, Block
from tests.distributed.spawn import spawn
from tests.distributed.transport_audit import TransportAudit, total_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
DEVICE = "cpu"
"""Of the models; tests/gpu sets another one."""


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
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
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
    return abs(sum(losses[-5:]) / sum(exact[-5:]) - 1) < percent / 100


def quiet(line: str) -> None:
    """A log that nobody reads."""


def ones() -> torch.Tensor:
    """An input of one row."""
    return torch.ones(1, WIDTH, device=DEVICE)


def spread_exponents(weight: torch.Tensor) -> None:
    """Give values exponents that do not fit a lossless payload, in place."""
    exponents = torch.arange(weight.numel(), device=DEVICE) % 50
    with torch.no_grad():
        weight *= 2.0 ** -exponents.view(weight.shape)


def lossless_worker(rank: int, ranks: int) -> None:
    plain = train(build(nested=True), 24)
    model = build(nested=True)
    compression = attach(model, "lossless", None)
    assert len(compression.gathers) == 3
    assert train(model, 24) == plain
    # The head's 1105 values a rank may not fit their payload in a step (seen on a GPU).
    assert "compressed" in kinds(compression, "dp.weight") <= {"compressed", "overflow"}
    # Of weights alone: torch 2.15 reduces these gradients in fp32, earlier ones in bf16.
    sent, uncompressed = compression.run.ledger.totals()["dp.weight"]["compressed"]
    assert 0.7 < sent / uncompressed < 0.73


def test_lossless_gathers_keep_the_losses() -> None:
    """24 steps to the last bit, nested modules too."""
    spawn(lossless_worker, 2)


def int8_worker(rank: int, ranks: int) -> None:
    plain = train(build(nested=True), 24)
    model = build(nested=True)
    compression = attach(model, "none", "int8")
    int8 = train(model, 24)
    assert int8 != plain and close(int8, plain, 0.1)
    assert kinds(compression, "dp.gradient") == {"compressed"}


def test_int8_gradients_keep_near_the_losses() -> None:
    """Within 0.1 % over 24 steps, and not equal."""
    spawn(int8_worker, 2)


def unmatched_layers_worker(rank: int, ranks: int) -> None:
    model = build()
    lines: list[str] = []
    attach(model, "none", "tagc:layers=attention", log=lines.append)
    train(model, 3)
    assert [
        line for line in lines if "compresses no gradients: its layers have other names" in line
    ]


def test_a_compressor_that_names_no_layer_of_the_model_says_so() -> None:
    spawn(unmatched_layers_worker, 2)


def two_models_worker(rank: int, ranks: int) -> None:
    models = [build(), build()]
    lines: list[str] = []
    for model in models:
        attach(model, "lossless", "int8", start_iteration=1, log=lines.append)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()])
    for _ in range(3):
        sum(model(ones()).sum() for model in models).backward()
        optimizer.step()
    assert lines and UNKNOWN not in str(lines)


def test_no_audit_takes_one_model_for_the_other() -> None:
    """Two compressed models in one loop: what one sends is not missing in the other's ledger."""
    spawn(two_models_worker, 2)


def reference_model_worker(rank: int, ranks: int) -> None:
    model, reference = build(), build()
    lines: list[str] = []
    attach(model, "lossless", "int8", log=lines.append)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(ones()).sum().backward()
        optimizer.step()
        reference(ones())
    assert lines and UNKNOWN not in str(lines)


def test_the_audit_ends_with_the_step() -> None:
    """An uncompressed reference model may run between a step and the next pass."""
    spawn(reference_model_worker, 2)


def one_rank_worker(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(DEVICE, (ranks, 1), mesh_dim_names=("other", "own"))
    assert "device memory: 0.000 MB of buffers" in attach(build(mesh=mesh["own"])).summary()
    assert "device memory: 0.000 MB of buffers" not in attach(build(mesh=mesh)).summary()


def test_one_rank_sends_to_its_replicas_alone() -> None:
    """A mesh of one rank has no payloads; one shard under HSDP has those of the replicas."""
    spawn(one_rank_worker, 2)


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


def settings_worker(rank: int, ranks: int, name: str) -> None:
    options, gather, reduce = SETTINGS[name]
    plain = train(build(**options), 2, micro_batches=2)
    model = build(**options, device="meta" if name == "fp32" else None)
    lines: list[str] = []
    compression = attach(model, gather, reduce, log=lines.append)
    if name == "fp32":
        model.to_empty(device="cpu")
        model.load_state_dict(build(**options).state_dict())
    with TransportAudit() as audit:
        losses = train(model, 2, micro_batches=2)
    check_bytes(audit.sent, compression)
    assert close(losses, plain, 20 if compression.state_dict() else 1), (losses, plain)
    assert len(lines) == 2, lines  # and none of the first step's audit


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_fsdp(name: str) -> None:
    """Two micro-batches, of which one sends gradients: what c10d is given is in the ledger, and the loss is
    near that of FSDP as it is."""
    spawn(settings_worker, 3, name)


def overflow_worker(rank: int, ranks: int) -> None:
    def spread() -> nn.Module:
        """One shard of one module does not fit."""
        model = build()
        if rank == 0:
            spread_exponents(model[1].mlp[0].weight.to_local())
        return model

    plain = train(spread(), 3)
    model = spread()
    compression = attach(model, "lossless", "none")
    assert train(model, 3) == plain
    assert kinds(compression, "dp.weight") == {"compressed", "overflow"}
    assert [gather.fits for gather in compression.gathers] == [True, True, False]
    assert "1 modules have weights that lossless cannot shorten" in compression.summary()


def test_a_shard_that_does_not_fit_goes_uncompressed() -> None:
    """On all ranks, and the losses stay the same."""
    spawn(overflow_worker, 2)


def unnoticed_worker(rank: int, ranks: int, fits_again: bool = False) -> None:
    model = build()
    compression = attach(model, "lossless", "none")
    model[0].unshard(async_op=True).wait()
    train(model, 1)
    model(ones())
    weight = model[1].mlp[0].weight
    trained = weight.data.clone()
    weight.data.copy_(weight.data * 2.0 ** -(50 * torch.rand_like(weight)))  # no version is counted
    model(ones())
    if fits_again:
        weight.data.copy_(trained)
        model(ones())
    compression.weights_changed()
    with pytest.raises(
        RuntimeError, match=r"weights of the module of 1\.norm\.weight changed unnoticed"
    ):
        model(ones())


@pytest.mark.parametrize("fits_again", [False, True], ids=["still misfit", "fitting again"])
def test_a_change_that_nothing_tells_of_is_no_silent_one(fits_again: bool) -> None:
    """Where such weights did not fit, the next question to the ranks ends the run, also where those of
    a later pass did."""
    spawn(unnoticed_worker, 2, fits_again)


def unannounced_worker(rank: int, ranks: int) -> None:
    model = build()
    compression = attach(model, "lossless", "none")
    train(model, 1)
    model(ones())
    model[1].reshard()
    spread_exponents(model[1].mlp[0].weight.to_local())
    with pytest.raises(RuntimeError, match=r"between two passes.*call weights_changed\(\)"):
        model[1].unshard()
    compression.weights_changed()
    exact = model[1].mlp[0].weight.full_tensor().bfloat16()
    model[1].unshard()
    assert torch.equal(model[1].mlp[0].weight, exact)


def test_a_change_between_passes_that_does_not_fit_has_to_be_told() -> None:
    """It ends the run before anything is sent; told with weights_changed() it is sent exactly."""
    spawn(unannounced_worker, 2)


def change_on_one_rank_worker(rank: int, ranks: int) -> None:
    model = build()
    attach(model, "lossless", "int8", log=quiet)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(ones()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(ones())
        model(ones())
        if rank == 0:  # as where the other rank's shard is empty
            with torch.no_grad():
                model[0].mlp[0].weight.to_local().mul_(0.5)
        model[0].reshard()
        with torch.no_grad():
            exact = model[0].mlp[0].weight.full_tensor().bfloat16()
        model[0].unshard()
        assert torch.equal(model[0].mlp[0].weight, exact)


def test_a_change_on_one_rank_alone() -> None:
    """It is sent, and the ranks do not wait for each other (30 s)."""
    spawn(change_on_one_rank_worker, 2, timeout=30)


def evaluation_worker(rank: int, ranks: int) -> None:
    model = build()
    compression = attach(model, "lossless", "none")
    train(model, 1)
    with torch.no_grad():
        model(ones())
        spread_exponents(model[1].mlp[0].weight.to_local())
    model(ones())
    assert [gather.fits for gather in compression.gathers] == [True, True, False]


def test_weights_swapped_in_for_an_evaluation() -> None:
    """The ranks look again where a pass with gradients follows one without, or the other way round."""
    spawn(evaluation_worker, 2)


def parts_worker(rank: int, ranks: int) -> None:
    model = build()
    compression = attach(model, "lossless", "none", start_iteration=1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model[1](ones()).sum().backward()
        optimizer.step()
    assert kinds(compression, "dp.weight") == {"warmup", "compressed"}


def test_iterations_count_where_only_parts_of_a_model_are_called() -> None:
    spawn(parts_worker, 2)


def probe_worker(rank: int, ranks: int) -> None:
    model = build()
    compression = attach(model, "lossless", "int8", start_iteration=2, log=quiet)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(4):
        model(ones()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(ones())
        if rank == 0 and step < 3:
            probe = nn.Parameter(torch.zeros(3))
            probe.sum().backward()
            torch.optim.SGD([probe], lr=0.1).step()
        with torch.no_grad():
            model(ones())
        assert compression.iteration == step + 1
    assert kinds(compression, "dp.gradient") == {"warmup", "compressed"}


def test_an_optimizer_that_steps_on_one_rank_alone() -> None:
    """A probe on rank 0: the ranks do not wait for each other (30 s), and count the same iterations."""
    spawn(probe_worker, 2, timeout=30)


def two_optimizers_worker(rank: int, ranks: int) -> None:
    generator, critic = build(), build()
    counts = [
        attach(model, "lossless", "int8", start_iteration=4, log=quiet)
        for model in (generator, critic)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (generator, critic)]
    for step in range(3):
        for model, optimizer in ((critic, optimizers[1]), (generator, optimizers[0])):
            model(ones()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [compression.iteration for compression in counts] == [step, step]
    for compression in counts:
        assert kinds(compression, "dp.gradient") == {"warmup"}


def test_iterations_of_two_models_are_their_own() -> None:
    """Each counts the steps of the optimizer that holds its parameters."""
    spawn(two_optimizers_worker, 2)


def some_ranks_worker(rank: int, ranks: int, first: int, node_size: str | None) -> str:
    group = dist.new_group([first, first + 1])
    more_groups = [dist.new_group([1, 2])]  # some ranks are in more groups than others
    if rank not in (first, first + 1):
        return ""
    if node_size is not None:
        os.environ["MEGATRON_COMPRESSION_NODE_SIZE"] = node_size
        os.environ["MEGATRON_COMPRESSION_COMMUNICATORS"] = "2"
    lines: list[str] = []
    model = build(mesh=DeviceMesh.from_group(group, DEVICE))
    attach(model, "lossless", "int8", log=lines.append)
    train_alone(model, group)
    assert more_groups
    return lines[0]


def train_alone(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Two steps of ranks that are not the whole job."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(ones()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier(group)


def test_attach_on_some_ranks_of_the_job() -> None:
    """The others generate, or serve, and do not call it: nobody waits for them (30 s)."""
    lines = spawn(some_ranks_worker, 4, 2, None, timeout=30)
    assert "2 ranks on one node" in lines[2]


def test_attach_on_some_ranks_makes_groups_of_its_own() -> None:
    """Two communicators, made by the two ranks that call; these are in as many groups as each other."""
    lines = spawn(some_ranks_worker, 4, 1, "1", timeout=30)
    assert "2 communicators" in lines[1]


def test_attach_on_some_ranks_that_cannot_make_groups() -> None:
    """Ranks in different numbers of groups name new ones differently: one exchange, and a line says so."""
    lines = spawn(some_ranks_worker, 4, 0, "1", timeout=30)
    assert "these ranks alone cannot make groups" in lines[0]


def replicas_mesh() -> DeviceMesh:
    """Two replicas of two shards."""
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicas", "shards"))


def replicas_worker(rank: int, ranks: int) -> None:
    mesh = replicas_mesh()
    plain = train(build(mesh=mesh), 3)
    model = build(mesh=mesh)
    compression = attach(model, "lossless", "int8")
    with TransportAudit() as audit:
        losses = train(model, 3)
    check_bytes(audit.sent, compression)
    assert kinds(compression, "dp.weight") == {"compressed"} and close(losses, plain, 0.5)


def test_replicas_keep_near_the_losses() -> None:
    """HSDP on two times two ranks, every byte counted."""
    spawn(replicas_worker, 4)


def divisor_worker(rank: int, ranks: int) -> None:
    mesh = replicas_mesh()
    gradients = []
    inputs = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    for reduce in (None, "int8"):
        model = build(mesh=mesh)
        for module in (model[0], model[1], model):
            module.set_gradient_divide_factor(3)
            # else NCCL's, which multiplies before
            module.set_force_sum_reduction_for_comms(reduce is None)
        if reduce:
            attach(model, None, reduce)
        for last in (False, True):  # sums over shards each time, over replicas once
            model.set_requires_all_reduce(last)
            model(inputs[last]).square().mean().backward()
        gradients.append(model[0].mlp[0].weight.grad.to_local())
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()


def test_replicas_with_a_divisor_and_a_late_all_reduce() -> None:
    """set_gradient_divide_factor and set_requires_all_reduce under HSDP: FSDP's own gradients within 2 %."""
    spawn(divisor_worker, 4)


def stages_worker(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stages", "shards"))
    stage, stages = mesh.get_local_rank("stages"), mesh.get_group("stages")
    others = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    model = nn.Sequential(build(mesh=mesh["shards"]))
    if stage == 1:
        other = DeviceMesh.from_group(others[1], DEVICE)
        model.append(fully_shard(nn.Linear(33, 33, device=DEVICE), mesh=other, mp_policy=BF16))
    attach(model)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(4, WIDTH, device=DEVICE)
    for _ in range(2):  # the second stage begins when the first is through
        if stage == 1:
            dist.recv(x, group_src=0, group=stages)
        loss = model(x).sum()
        if stage == 0:
            dist.send(x, group_dst=1, group=stages)
        loss.backward()
        optimizer.step()


def test_pipeline_stages_of_different_meshes() -> None:
    """Two stages of two ranks, of which one has a second mesh: no stage waits for the other (30 s)."""
    spawn(stages_worker, 4, timeout=30)


def hook_worker(rank: int, ranks: int) -> None:
    mesh = replicas_mesh()
    rows = []
    model = build(mesh=mesh)
    model[0].set_all_reduce_hook(lambda row: rows.append(row.clone()))
    attach(model, "none", "int8", log=quiet)
    model(ones()).sum().backward()
    assert len(rows) == 1 and rows[0].abs().sum() > 0
    model[1].set_all_reduce_hook(lambda row: None)
    torch.optim.SGD(model.parameters()).step()
    with pytest.raises(
        CompressionConfigError,
        match=r"set_all_reduce_hook\(\) of the module of 1.*call set_all_reduce_hook\(\) before attach",
    ):
        model(ones())


def test_a_hook_of_hsdp_before_and_after_attach() -> None:
    """Set before, it is called after the sum over the replicas; set after, it is refused at the next pass."""
    spawn(hook_worker, 4)


def setters_worker(rank: int, ranks: int) -> None:
    model = build()
    attach(model, "lossless", "int8", log=quiet)
    model[0].set_custom_reduce_scatter(DefaultReduceScatter())
    with pytest.raises(
        CompressionConfigError, match=r"set_custom_reduce_scatter\(\) of the module"
    ):
        model(ones())
    model = build()
    model[0].set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(
        CompressionConfigError, match=r"drop set_custom_all_gather.*and set_allocate"
    ):
        attach(model, "lossless", "int8", log=quiet)


def test_setters_of_fsdp_that_take_our_place_are_refused() -> None:
    """Before attach(), and after it at the first pass."""
    spawn(setters_worker, 2)


def close_worker(rank: int, ranks: int) -> None:
    mesh = replicas_mesh()
    plain = train(build(mesh=mesh), 3)
    model = build(mesh=mesh)
    attach(model, "none", "int8", log=quiet).close()
    assert train(model, 3) == plain
    attach(model, "none", "int8", log=quiet)  # it is not attached any more


def test_close_gives_the_model_back() -> None:
    """After close() the losses are those of FSDP as it is, under HSDP too."""
    spawn(close_worker, 4)


def no_values_worker(rank: int, ranks: int) -> None:
    model = build()
    # FSDP has no gradients of it: torch's own copies fail
    extra = nn.Linear(4, 0, device=DEVICE).requires_grad_(False)
    model[0].extra = fully_shard(extra, mp_policy=BF16)
    attach(model, "lossless", "int8", log=quiet)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        total = model(ones()).sum()
        (total + model[0].extra(torch.ones(1, 4, device=DEVICE)).sum()).backward()
        optimizer.step()


def test_a_module_without_values() -> None:
    """It is gathered as it is; lossless payloads are asked about for the others."""
    spawn(no_values_worker, 2)


class Normed(nn.Module):
    """Two norms around an MLP that tensor parallelism cuts; one is a DTensor, the other a plain tensor.

    A codec's groups do not end where the parameters do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 1032), nn.GELU(), nn.Linear(1032, WIDTH))
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_norm(x + self.mlp(self.norm(x)))


def tensor_parallel_model(mesh: DeviceMesh) -> nn.Module:
    """Two blocks over the ``tensor`` dimension of a mesh, sharded over the others."""
    torch.manual_seed(0)
    tensor = mesh["tensor"]
    model = nn.Sequential(Normed(), Normed())
    data = mesh["replicas", "data"] if "replicas" in mesh.mesh_dim_names else mesh["data"]

    def replicated(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def local(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    for block in model:
        plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, tensor, plan)
        distribute_module(block.norm, tensor, input_fn=replicated, output_fn=local)
        for norm in (block.norm, block.last_norm):  # values that int8 does not keep
            values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                local_part = norm.weight.to_local() if norm is block.norm else norm.weight
                local_part.copy_(values)
        fully_shard(block, mesh=data, mp_policy=BF16)
    return fully_shard(model, mesh=data, mp_policy=BF16)


def copies_worker(rank: int, ranks: int, gather: str, reduce: str, shape: dict) -> tuple:
    mesh = init_device_mesh(DEVICE, tuple(shape.values()), mesh_dim_names=tuple(shape))
    model = tensor_parallel_model(mesh)
    compression = attach(model, gather, reduce, log=quiet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data_rank = rank // shape["tensor"]
    with TransportAudit() as audit:
        for step in range(3):
            x = torch.randn(
                4, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank)
            )
            model(x.to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    masters = {
        name: bits_of(parameter.to_local())
        for name, parameter in model.named_parameters()
        if "norm" in name or name.endswith("mlp.2.bias")
    }
    for block in model:
        block.unshard()
    used = {name: bits_of(plain_part(model, name)) for name in masters}
    assert "compressed" in kinds(compression, "dp.gradient")
    counted = total_of(compression.run.ledger.rows())
    assert counted["all_to_all"] == audit.sent["all_to_all"]
    return masters, used


def plain_part(model: nn.Module, name: str) -> torch.Tensor:
    """A gathered parameter, as this rank computes with it."""
    parameter = model.get_parameter(name)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def bits_of(values: torch.Tensor) -> bytes:
    return values.detach().float().cpu().numpy().tobytes()


COPIES = {
    "int8": ("int8", "int8"),
    "sdp4bit": ("int6", "sdp4bit"),
    "lossless weights": ("lossless", "int4"),
    "tagc": ("int8", "tagc:layers=all"),
    "a compressor of one's own": ("int8", "examples.powersgd:PowerSGD:rank=4"),
}
"""Lossy settings."""


@pytest.mark.parametrize("name", COPIES)
def test_copies_over_tensor_parallelism(name: str) -> None:
    """Norms and biases that tensor ranks hold alike keep their bits: the optimizer's and the gathered."""
    gather, reduce = COPIES[name]
    results = spawn(copies_worker, 4, gather, reduce, {"data": 2, "tensor": 2})
    for data_rank in range(2):
        one, other = results[2 * data_rank : 2 * data_rank + 2]
        assert len(one[0]) == 10
        assert one == other


def thawed_worker(rank: int, ranks: int) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel_model(mesh)
    compression = attach(model, "none", "int8", log=quiet)
    for frozen in (True, False):
        model[0].norm.requires_grad_(not frozen)
        for _ in range(2):
            model(torch.ones(4, WIDTH, device=DEVICE)).square().mean().backward()
        rows = compression.run.ledger.rows()
        uncompressed = [row for row in rows if row["operation"] == "reduce_scatter"]
        assert not uncompressed and kinds(compression, "dp.gradient") == {"compressed", "exact"}


def test_copies_that_are_frozen_and_thawed() -> None:
    """The others stay compressed in either phase."""
    spawn(thawed_worker, 4)


def test_copies_over_tensor_parallelism_and_replicas() -> None:
    """HSDP beside tensor parallelism: equal over replicas and tensor ranks."""
    shape = {"replicas": 2, "data": 1, "tensor": 2}
    results = spawn(copies_worker, 4, "int8", "int8", shape)
    assert all(result == results[0] for result in results)


def checkpoint_worker(rank: int, ranks: int, folder: str) -> None:
    def begin() -> tuple:
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


def memory_worker(rank: int, ranks: int) -> dict:
    compression = attach(build(), "none", "tagc:sparsity=0.9", log=quiet)
    return compression.state_dict()


def other_memory_worker(rank: int, ranks: int, states: list[dict]) -> None:
    compression = attach(build(), "none", "tagc:sparsity=0.9", log=quiet)
    with pytest.raises(CompressionConfigError, match=r"^load_state_dict\(\): .*starts from zero$"):
        compression.load_state_dict({**states[0], **states[1], **states[-1]})


def test_the_memory_of_another_number_of_ranks_is_refused() -> None:
    """In one line, from more ranks and from fewer."""
    of_two, of_three = spawn(memory_worker, 2), spawn(memory_worker, 3)
    spawn(other_memory_worker, 3, of_two)
    spawn(other_memory_worker, 2, of_three)


FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
REFUSED = {
    "offload": (
        {"offload_policy": CPUOffloadPolicy()},
        {},
        "2.weight is offloaded to CPU; drop CPUOff",
    ),
    "fp16 weights": ({"policy": FP16}, {}, "gathers float16, and lossless shortens bf16 and fp32"),
    "fp64 weights": (
        {"policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
        {},
        "gathers float64, and lossless shortens bf16 and fp32",
    ),
    "fp16 gradients and a memory": (
        {"policy": FP16},
        {"gather": "none", "reduce": "tagc"},
        "has fp16 gradients, whose scale",
    ),
    "a compressor for weights": ({}, {"gather": "tagc"}, "^gather tagc: .*; give it to reduce"),
    "lossless gradients": (
        {},
        {"reduce": "lossless"},
        "^reduce lossless: under FSDP2 the host would wait",
    ),
    "a codec that sees tokens": (
        {},
        {"gather": "tah-quant"},
        "^gather tah-quant needs tokens and channels",
    ),
    "iterations before 0": ({}, {"start_iteration": -1}, "^start_iteration -1 must be"),
    "outer": ({}, {"reduce": "sdp4bit:outer=int8"}, "drop outer="),
    "not sharded": (None, {}, r"call fully_shard\(\) before it"),
}


def refusals_worker(rank: int, ranks: int) -> None:
    for options, arguments, message in REFUSED.values():
        model = nn.Linear(2, 2) if options is None else build(**options)
        with pytest.raises(CompressionConfigError, match=message):
            attach(model, **arguments)
    with pytest.raises(CompressionConfigError, match="weight is replicated; use fully_shard"):
        # torch 2.10's wants the dimension to have a name.
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("replicas",))
        attach(replicate(nn.Linear(2, 2), mesh=mesh))


def test_refusals() -> None:
    """Settings that are not covered, each in one line."""
    spawn(refusals_worker, 2)


def attached_twice_worker(rank: int, ranks: int) -> None:
    model = build()
    model[0].mlp[0] = nn.Linear(WIDTH, 401)  # FSDP keeps the old one
    attach(model, "none", "int8")
    with pytest.raises(CompressionConfigError, match="is attached already"):
        attach(model)


def test_attach_twice_is_refused() -> None:
    """Also where a module has been replaced since fully_shard()."""
    spawn(attached_twice_worker, 2)


def fewer_gradients_worker(rank: int, ranks: int) -> None:
    model = build()
    attach(model, "none", "tagc")
    model[0].mlp[0].weight.requires_grad_(False)
    model(ones()).sum().backward()  # fewer parameters, in every pass
    model[0].mlp[0].weight.requires_grad_(True)
    with pytest.raises(
        CompressionConfigError, match="it needs the same in each, so choose a codec"
    ):
        model(ones()).sum().backward()


def test_fewer_gradients_than_before_are_refused_with_a_memory() -> None:
    spawn(fewer_gradients_worker, 2)


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
