"""Symmetric-memory collectives on GPUs: simulated ranks on one device, then one process a device."""

import multiprocessing
import os
import random as python_random
import tempfile

import pytest
import torch
import torch.distributed as dist

from taco_kernels.taco import CodecConfig, decode, decode_sum_encode, encode
from tests.distributed.spawn import spawn
from tests.gpu import simulated_ranks as ranks

CALLS = 10_000


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: equal also where values are NaN."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("world_size", "config", "shape", "dtype"),
    [
        (4, CodecConfig("fp8-e4m3"), (516, 1003), torch.bfloat16),
        (3, CodecConfig("int6", scales="single"), (129, 640), torch.bfloat16),
        (2, CodecConfig("int4", 256), (64, 4096), torch.float16),
        (4, CodecConfig("int5", 32, "single"), (64, 1000), torch.float32),
        (4, CodecConfig("int8", hadamard=False), (4, 5), torch.bfloat16),  # less than a tile
        (4, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (1, CodecConfig("int8"), (64, 1000), torch.bfloat16),
    ],
)
def test_simulated_ranks_have_the_bits_of_the_codec_kernels(world_size, config, shape, dtype) -> None:
    """Every collective, several times over the same channel, in an order that leaves their slots askew."""
    from taco_kernels.symmetric_memory import collectives

    generator = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(world_size)]
    xs[0][0, 1] = float("nan")
    channels = ranks.simulated_channels(world_size, programs=24)
    summed = ranks.expected_all_reduce(xs, config)
    scattered = ranks.expected_reduce_scatter(xs, config)
    gathered = ranks.expected_all_gather(xs, config)
    wires = [encode(x, config) for x in xs]

    def on_all(call, expected: list[torch.Tensor]) -> None:
        for result, wanted in zip(ranks.on_all_ranks(channels, call), expected, strict=True):
            assert torch.equal(bits(result), bits(wanted))

    for _ in range(3):
        on_all(lambda r, channel: collectives.all_reduce(channel, xs[r], config), [summed] * world_size)
        on_all(lambda r, channel: collectives.reduce_scatter(channel, xs[r], config), scattered)
        on_all(
            lambda r, channel: collectives.all_gather_encoded(channel, wires[r], shape, dtype, config),
            [gathered] * world_size,
        )
    channels[0].check()


def needs(devices: int):
    """Skip where there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} CUDA devices")


WORLD_SIZES = [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))]


def over_nccl(x: torch.Tensor, config: CodecConfig, group: dist.ProcessGroup) -> torch.Tensor:
    """The same all-reduce by the codec's own kernels and NCCL's exchanges."""
    wires = encode(x, config, group.size())
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires, group=group)
    own = decode_sum_encode(received, config, config.chunk_numel(x.numel(), group.size()))
    sums = own.new_empty(group.size(), own.numel())
    dist.all_gather_into_tensor(sums.view(-1), own, group=group)
    return decode(sums, config, x.shape, x.dtype)


def stress_worker(rank: int, world_size: int) -> int:
    """Back-to-back calls of random sizes on two groups and two streams, each compared on the device."""
    from taco_kernels.symmetric_memory import SymmetricGroup

    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    groups = [dist.group.WORLD, pairs[rank // 2]]
    symmetric = [SymmetricGroup(group) for group in groups]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    config = CodecConfig("int6")
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    base = torch.randn(3 * 2**20, device="cuda").bfloat16()
    cases = []
    for _ in range(40):
        numel, offset = 16 * int(2 ** draw.uniform(0, 17)), 16 * draw.randrange(2**16)
        x = base[offset : offset + numel]
        cases.append((x, [over_nccl(x, config, group) for group in groups]))
    torch.cuda.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in groups]
    done = 0
    for _ in range(CALLS):
        x, expected = draw.choice(cases)
        which = draw.randrange(2)
        with torch.cuda.stream(streams[which]):
            wrong[which] += (symmetric[which].all_reduce(x, config) != expected[which]).any()
        done += 1
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]
    for group in symmetric:
        group.channel.check()
    return done


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ten_thousand_calls_on_two_groups(world_size: int) -> None:
    assert spawn(stress_worker, world_size, backend="nccl") == [CALLS] * world_size


def dead_rank_main(rank: int, store: str, outcome) -> None:
    """Rank 1 leaves; rank 0's next call must end, and the one after it must say why."""
    from taco_kernels.symmetric_memory import SymmetricGroup, SymmetricMemoryError

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    group, config = SymmetricGroup(dist.group.WORLD, timeout=2.0), CodecConfig("int8")
    x = torch.ones(100_000, device="cuda", dtype=torch.bfloat16)
    group.all_reduce(x, config)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    messages = []
    for call in (lambda: (group.all_reduce(x, config), torch.cuda.synchronize()), group.channel.check):
        try:
            call()
        except (RuntimeError, SymmetricMemoryError) as error:
            messages.append(str(error))
    outcome.put(messages)
    outcome.close()
    outcome.join_thread()
    os._exit(0)  # the device is lost to this process


@pytest.mark.multigpu
@needs(2)
def test_a_rank_that_dies_does_not_hang_the_others() -> None:
    context = multiprocessing.get_context("spawn")
    outcome = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = [context.Process(target=dead_rank_main, args=(r, store, outcome)) for r in range(2)]
        for process in processes:
            process.start()
        try:
            messages = outcome.get(timeout=120)
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    assert len(messages) == 2 and "waited 2 s for rank 1" in messages[1]
