"""torch's DDP over codecs on GPUs: gradients, memories, and the stream that reductions are on."""

from collections.abc import Callable

import pytest
import torch

from megatron.compression.ddp import attach
from tests.distributed import test_ddp
from tests.distributed.spawn import spawn
from tests.gpu.devices import needs

pytestmark = pytest.mark.multigpu


def _on_gpu(rank: int, world_size: int, worker: Callable, *args: object) -> object:
    test_ddp.DEVICE = "cuda"
    return worker(rank, world_size, *args)


@needs(2)
def test_gradients_are_those_of_ddp() -> None:
    """Every case of the tests on CPUs: codecs, settings of DDP, unused parameters on one rank."""
    results = spawn(_on_gpu, 2, test_ddp.cases_worker, backend="nccl")
    for name, (_, _, _, tolerance) in test_ddp.CASES.items():
        one, other = (result[name] for result in results)
        assert max(one["distances"]) < tolerance, name
        assert one["digests"] == other["digests"], name


@needs(2)
@pytest.mark.parametrize(
    "worker",
    [
        test_ddp.uncompressed_worker,
        test_ddp.no_sync_worker,
        test_ddp.join_worker,
        test_ddp.two_models_worker,
    ],
)
def test_settings_of_ddp(worker: Callable) -> None:
    """Uncompressed bits, micro-batches, joins of uneven inputs, two models in one backward pass."""
    spawn(_on_gpu, 2, worker, backend="nccl")


@needs(2)
def test_memories_follow_their_parameters() -> None:
    spawn(_on_gpu, 2, test_ddp.memory_worker, "tagc:sparsity=0.9", backend="nccl")


class Slow(torch.nn.Module):
    """A layer whose backward pass keeps the GPU busy for about 0.2 s."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x.register_hook(lambda gradient: torch.cuda._sleep(300_000_000))
        return x


def overlap_worker(rank: int, ranks: int) -> tuple[bool, bool]:
    layers = [Slow().cuda() for _ in range(3)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    compression = attach(model, "int8", log=test_ddp.quiet)
    reduce_bucket = compression.gradients.start
    events = []

    def noted(gradients: torch.Tensor, *arguments: object) -> object:
        work = reduce_bucket(gradients, *arguments)
        # On the stream of the reduction, behind its first exchange.
        done = torch.cuda.Event()
        done.record()
        events.append(done)
        return work

    x = torch.ones(8, 1024, device="cuda")
    for _ in range(3):  # buckets are made anew, kernels are compiled
        model(x).sum().backward()
    torch.cuda.synchronize()
    compression.gradients.start = noted
    model(x).sum().backward()
    backward_done = torch.cuda.Event()
    backward_done.record()
    events[0].synchronize()
    first_came_early = not backward_done.query()
    torch.cuda.synchronize()
    return first_came_early, len(events) > 1


@needs(2)
def test_reductions_overlap_the_backward_pass() -> None:
    """The first bucket is on its way while the GPU still computes the next gradients."""
    assert spawn(overlap_worker, 2, backend="nccl") == [(True, True)] * 2
