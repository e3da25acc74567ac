"""Gradients of one backward pass, compressed and not: the same direction AND the same length.

Adam's steps and clipped gradients hide a constant factor on gradients: losses of a run whose gradients
are halved look right. So these tests compare the reduced gradients themselves, as the optimizer
will read them, with those of an uncompressed run of the same model and batch.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron.compression.fsdp2 import attach
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, batch_of, start

INT8_TOLERANCE = 0.02
"""Relative L2 distance that 8-bit codes may cause (one encoding costs 0.008, two cost 0.011)."""

SHARDED = Setup(dtype=torch.float32)
REPLICATED = replace(SHARDED, distributed_optimizer=False)
MEGATRON_SETUPS = {
    "distributed optimizer": SHARDED,
    "distributed optimizer, no overlap": replace(SHARDED, overlap=False),
    "distributed optimizer, averaged in the collective": replace(
        SHARDED, average_in_collective=True
    ),
    "plain DDP": REPLICATED,
    "plain DDP, averaged in the collective": replace(REPLICATED, average_in_collective=True),
    "plain DDP, one padded bucket": replace(REPLICATED, bucket_size=None, overlap=False),
    "bf16 gradients": replace(SHARDED, dtype=torch.bfloat16, fp32_gradients=False),
    "two micro-batches": replace(SHARDED, micro_batches=2),
}
CODECS = ("int8", "int5/int6", "taco", "sdp4bit:intra=8,inter=8", "lossless", "identity")
TOLERANCES = {"int5/int6": 0.12, "taco": 0.06, "lossless": 0.004, "identity": 0.004}
"""Relative L2 distances of codecs with another error than 8-bit codes; exact ones differ by the order
of the sum, which bf16 gradients show."""


def reduced_gradients(rank: int, setup: Setup) -> torch.Tensor:
    """The gradients that this rank's optimizer reads after one backward pass and its reduction.

    Args:
        rank: this rank.
        setup: one run; ``start`` has made its groups.

    Returns:
        fp32 ``[n]``: all buckets' gradients, or, with the distributed optimizer, this rank's shards.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    training = Training(rank, setup)
    training.ddp.zero_grad_buffer()
    replica = parallel_state.get_data_parallel_rank()
    for number in range(setup.micro_batches):
        is_last = number == setup.micro_batches - 1
        batch = batch_of(number, replica)
        if is_last:
            training.ddp(**batch).float().mean().backward()
        else:
            with training.ddp.no_sync():
                training.ddp(**batch).float().mean().backward()
    finalize_model_grads([training.ddp])
    if setup.settings:
        assert "compressed" in training.kinds() | training.kinds("dp.outer"), "nothing compressed"
    if not setup.distributed_optimizer or ranks_of_instance(training) == 1:
        gradients = [parameter.main_grad.view(-1) for parameter in training.model.parameters()]
        return torch.cat(gradients).float()
    parts = []
    for group in training.groups:
        for bucket in group.buckets:
            shards = bucket.grad_data.chunk(group.intra_distributed_optimizer_instance_size)
            parts.append(shards[group.intra_distributed_optimizer_instance_rank].float())
    return torch.cat(parts)


def ranks_of_instance(training: Training) -> int:
    """The number of ranks over which one instance of the distributed optimizer shards."""
    return training.groups[0].intra_distributed_optimizer_instance_size


def distance(gradients: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance of two gradients ``[n]``: 1 if one is zero, 1 if one is twice the other."""
    return float((gradients - exact).norm() / exact.norm())


def megatron_worker(rank: int, ranks: int) -> dict[tuple[str, str], float]:
    """Distances by (set-up, codec), over the data-parallel ranks of one instance."""
    start(rank)
    distances = {}
    for name, setup in MEGATRON_SETUPS.items():
        exact = reduced_gradients(rank, setup)
        assert exact.norm() > 0
        for codec in CODECS:
            compressed = replace(setup, settings={"compression": codec})
            distances[name, codec] = distance(reduced_gradients(rank, compressed), exact)
    return distances


@cache
def megatron_distances(ranks: int) -> list[dict[tuple[str, str], float]]:
    """What ``megatron_worker`` found, by rank."""
    return spawn(megatron_worker, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("setup", MEGATRON_SETUPS)
def test_gradients_of_data_parallelism_keep_their_length(
    setup: str, codec: str, ranks: int
) -> None:
    for distances in megatron_distances(ranks):
        assert distances[setup, codec] < TOLERANCES.get(codec, INT8_TOLERANCE)


INNER_ALONE = "int8:outer=none"
OUTER_SPECS = ("none:outer=int8", INNER_ALONE, "int8:outer=int8", "int8:outer=lossless")


def instances_worker(rank: int, ranks: int) -> dict[tuple[str, bool], float]:
    """Distances by (spec, averaged in the collective), over two optimizer instances."""
    start(rank, instances=2)
    distances = {}
    for averaged in (False, True):
        setup = replace(SHARDED, instances=2, average_in_collective=averaged)
        exact = reduced_gradients(rank, setup)
        for spec in OUTER_SPECS:
            if ranks == 2 and spec == INNER_ALONE:
                continue  # an instance of one rank has no inner reduction
            settings = {"compression": spec, "node_size": ranks // 2}
            compressed = reduced_gradients(rank, replace(setup, settings=settings))
            distances[spec, averaged] = distance(compressed, exact)
    return distances


@cache
def instances_distances(ranks: int) -> list[dict[tuple[str, bool], float]]:
    """What ``instances_worker`` found, by rank."""
    return spawn(instances_worker, ranks)


@pytest.mark.parametrize(
    "ranks, spec",
    [
        (ranks, spec)
        for ranks in (2, 4)
        for spec in OUTER_SPECS
        if (ranks, spec) != (2, INNER_ALONE)
    ],
)
@pytest.mark.parametrize("averaged", [False, True], ids=["summed", "averaged"])
def test_gradients_of_two_instances_keep_their_length(
    spec: str, averaged: bool, ranks: int
) -> None:
    for distances in instances_distances(ranks):
        assert distances[spec, averaged] < INT8_TOLERANCE


def instances_equal_one_worker(rank: int, ranks: int) -> float:
    """The distance between two uncompressed-inside instances with an 8-bit hop and one instance."""
    start(rank)
    one = reduced_gradients(rank, REPLICATED)
    start(rank, instances=2)
    setup = replace(SHARDED, instances=2, settings={"compression": "none:outer=int8"})
    return distance(reduced_gradients(rank, setup), one)


def test_two_instances_of_one_rank_have_the_average_of_plain_ddp() -> None:
    for between in spawn(instances_equal_one_worker, 2):
        assert between < INT8_TOLERANCE


def fsdp2_model(mesh, codec: str | None, policy: MixedPrecisionPolicy) -> nn.Module:
    """A model under FSDP2 after one backward pass.

    Args:
        mesh: the device mesh of ``fully_shard``: one dimension, or (replicas, shards) under HSDP.
        codec: of the gradients; None attaches nothing.
        policy: dtypes of parameters and reductions.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 401), nn.GELU(), nn.Linear(401, 7))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if codec is not None:
        attach(model, gather="none", reduce=codec)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 32, generator=generator)
    (model(x).float() - 1).square().mean().backward()
    return model


def fsdp2_gradients(mesh, codec: str | None, policy: MixedPrecisionPolicy) -> torch.Tensor:
    """This rank's shards of one backward pass's gradients under FSDP2, fp32 ``[n]``.

    Args: as for ``fsdp2_model``.
    """
    parameters = fsdp2_model(mesh, codec, policy).parameters()
    return torch.cat([parameter.grad.to_local().float().view(-1) for parameter in parameters])


FSDP2_TOLERANCE = 0.03
"""These gradients of three ranks cancel in part, so errors of addends weigh more in their sum."""
FSDP2_CODECS = ("int8", "sdp4bit:intra=8,inter=8", "identity")
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


def gradients_of_copies(mesh, codec: str | None) -> torch.Tensor:
    """This rank's shards of the biases' gradients, fp32 ``[n]``; arguments as ``fsdp2_gradients``.

    Where the job has ranks outside the mesh, biases are taken for copies that those hold as well,
    and are summed beside the payload.
    """
    parameters = fsdp2_model(mesh, codec, MixedPrecisionPolicy()).parameters()
    biases = [parameter for parameter in parameters if parameter.dim() == 1]
    return torch.cat([bias.grad.to_local().float().view(-1) for bias in biases])


COPIES_TOLERANCE = 1e-5
"""Copies are summed in fp32, with a codec and without."""
MESHES_OF_A_PART = {
    "FSDP": {"shards": 2, "outside": 2},
    "HSDP": {"replicas": 2, "shards": 1, "outside": 2},
}
"""Dimensions of the whole job; the model is sharded over all but the last."""


def copies_worker(rank: int, ranks: int, name: str) -> dict[str, float]:
    """Distances of the biases' gradients, by codec."""
    shape = MESHES_OF_A_PART[name]
    job = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    mesh = job[tuple(shape)[:-1]]
    exact = gradients_of_copies(mesh, None)
    return {codec: distance(gradients_of_copies(mesh, codec), exact) for codec in FSDP2_CODECS}


@pytest.mark.parametrize("name", MESHES_OF_A_PART)
def test_gradients_of_copies_under_fsdp2_keep_their_length(name: str) -> None:
    for distances in spawn(copies_worker, 4, name):
        for codec, between in distances.items():
            assert between < COPIES_TOLERANCE, codec


class OneOfTwo(nn.Module):
    """Two layers in one parameter group of FSDP, of which a pass uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 8)
        self.second = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def unused_layer_worker(rank: int, ranks: int) -> float:
    """The distance of the used layer's bias gradient, with int8, from the uncompressed one."""
    job = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "outside"))
    gradients = []
    for codec in (None, "int8"):
        torch.manual_seed(0)
        model = fully_shard(OneOfTwo(), mesh=job["shards"])
        if codec is not None:
            attach(model, gather="none", reduce=codec)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
        (model(x) - 1).square().mean().backward()
        assert model.first.bias.grad is None
        gradients.append(model.second.bias.grad.to_local())
    exact, compressed = gradients
    return distance(compressed, exact)


def test_copies_stay_exact_where_a_pass_leaves_a_layer_out() -> None:
    """FSDP reduces fewer gradients then, and does not say whose: nobody may guess where copies lie."""
    for between in spawn(unused_layer_worker, 4):
        assert between < COPIES_TOLERANCE


def fsdp2_worker(rank: int, ranks: int, mesh_shape: tuple[int, ...]) -> dict[tuple, float]:
    """Distances by (policy, codec)."""
    names = ("replicas", "shards")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    distances = {}
    for name, policy in POLICIES.items():
        exact = fsdp2_gradients(mesh, None, policy)
        for codec in FSDP2_CODECS:
            distances[name, codec] = distance(fsdp2_gradients(mesh, codec, policy), exact)
    return distances


@cache
def fsdp2_distances(mesh_shape: tuple[int, ...]) -> list[dict[tuple, float]]:
    """What ``fsdp2_worker`` found, by rank."""
    ranks = torch.Size(mesh_shape).numel()
    return spawn(fsdp2_worker, ranks, mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("codec", FSDP2_CODECS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_under_fsdp2_keep_their_length(
    policy: str, codec: str, mesh_shape: tuple[int, ...]
) -> None:
    """A mesh of one dimension is FSDP, one of two is HSDP: (replicas, shards)."""
    for distances in fsdp2_distances(mesh_shape):
        assert distances[policy, codec] < FSDP2_TOLERANCE
