"""Symmetric-memory collectives on GPUs: simulated ranks on one device, then one process a device."""

import multiprocessing
import os
import random as python_random
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import build_codec
from megatron.compression.collectives import (
    SymmetricTransport,
    TorchTransport,
    Transports,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from taco_kernels.taco import CodecConfig
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
        (4, CodecConfig("int8"), (512, 1024), torch.bfloat16),
        (3, CodecConfig("int6", scales="single", rounding="dither"), (129, 640), torch.bfloat16),
        (4, CodecConfig("fp8-e5m2", rounding="stochastic"), (256, 1000), torch.float32),
        (2, CodecConfig("int4", 512, rounding="dither"), (64, 4096), torch.float16),
        (4, CodecConfig("int5", 32, "single", "stochastic"), (64, 1000), torch.bfloat16),
        (4, CodecConfig("int8", hadamard=False), (64, 1000), torch.bfloat16),
        (4, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (2, CodecConfig("int5", 32, "signed"), (130, 640), torch.float16),
        (2, CodecConfig("int8", 256), (400, 777), torch.float16),
        (4, CodecConfig("int8"), (4, 5), torch.bfloat16),
        (1, CodecConfig("int8"), (64, 1000), torch.bfloat16),
    ],
)
def test_simulated_ranks_have_the_bits_of_the_codec_kernels(world_size, config, shape, dtype) -> None:
    """Every collective, several times over the same lane, in an order that leaves the rings askew."""
    from taco_kernels.symmetric_memory import collectives

    random = None if config.rounding == "nearest" else Stream(77, 5, 0)
    generator = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(world_size)]
    xs[0][0, 1] = float("nan")
    lanes = ranks.simulated_lanes(world_size, programs=24)
    summed = ranks.expected_all_reduce(xs, config, random)
    scattered = ranks.expected_reduce_scatter(xs, config, random)
    gathered = ranks.expected_all_gather(xs, config, random)
    wires = [ranks.encoded_slice(x, rank, config, random) for rank, x in enumerate(xs)]

    def on_all(call, expected: list[torch.Tensor]) -> None:
        for result, wanted in zip(ranks.on_all_ranks(lanes, call), expected, strict=True):
            assert torch.equal(bits(result), bits(wanted))

    for algorithm in ("two-shot", "one-shot", "two-shot"):
        on_all(
            lambda r, lane, a=algorithm: collectives.all_reduce(lane, xs[r], config, random, a),
            [summed] * world_size,
        )
        on_all(lambda r, lane: collectives.reduce_scatter(lane, xs[r], config, random), scattered)
        on_all(lambda r, lane: collectives.all_gather(lane, xs[r], config, random), [gathered] * world_size)
        on_all(
            lambda r, lane: collectives.all_gather_encoded(lane, wires[r], shape, dtype, config, random),
            [gathered] * world_size,
        )
    lanes[0].check()


@pytest.mark.parametrize(
    ("config", "config_out"),
    [
        (CodecConfig("int6", scales="single"), CodecConfig("int6", scales="single", rounding="stochastic")),
        (CodecConfig("int4", scales="single"), CodecConfig("int8", scales="single", rounding="dither")),
        (CodecConfig("fp8-e4m3"), CodecConfig("int5", scales="single")),
        (CodecConfig("int6", scales="signed"), CodecConfig("int4", scales="signed", rounding="dither")),
    ],
)
def test_hops_of_an_all_reduce_may_differ(config, config_out) -> None:
    """The second encode has a format, scales and a rounding of its own."""
    from taco_kernels.symmetric_memory import collectives

    random = Stream(77, 5, 0)
    generator = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(130, 640, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    lanes = ranks.simulated_lanes(4, programs=24)
    expected = ranks.expected_all_reduce(xs, config, random, config_out)
    for algorithm in ("two-shot", "one-shot"):
        results = ranks.on_all_ranks(
            lanes,
            lambda r, lane, a=algorithm: collectives.all_reduce(
                lane, xs[r], config, random, a, config_out=config_out
            ),
        )
        for result in results:
            assert torch.equal(bits(result), bits(expected))


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (4, CodecConfig("fp8-e4m3", scales="single")),
        (4, CodecConfig("int6", rounding="dither")),
        (2, CodecConfig("int8")),
    ],
)
def test_many_steps_have_the_bits_of_the_codec_kernels(world_size, config) -> None:
    """From one step a program to ten."""
    from taco_kernels.symmetric_memory import collectives

    random = None if config.rounding == "nearest" else Stream(77, 5, 0)
    lanes = ranks.simulated_lanes(world_size, programs=24)
    base = [torch.randn(world_size * 240 * 8192, device="cuda").bfloat16() for _ in range(world_size)]
    for tiles in (3, 24, 30, 70, 240):
        xs = [x[: world_size * tiles * 8192 - 1000] for x in base]
        expected = ranks.expected_all_reduce(xs, config, random)
        for _ in range(2):
            results = ranks.on_all_ranks(
                lanes,
                lambda r, lane, xs=xs: collectives.all_reduce(lane, xs[r], config, random, "two-shot"),
            )
            for result in results:
                assert torch.equal(bits(result), bits(expected)), tiles
    lanes[0].check()


def test_strided_input() -> None:
    """Rows of a wider tensor are read where they lie."""
    from taco_kernels.symmetric_memory import collectives

    config = CodecConfig("int8")
    xs = [torch.randn(512, 1280, device="cuda").bfloat16()[:, :1024] for _ in range(2)]
    lanes = ranks.simulated_lanes(2, programs=24)
    results = ranks.on_all_ranks(lanes, lambda r, lane: collectives.all_reduce(lane, xs[r], config))
    assert torch.equal(results[0], ranks.expected_all_reduce(xs, config))
    assert torch.equal(results[0], results[1])


def needs(devices: int):
    """Skip where there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} CUDA devices")


WORLD_SIZES = [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))]


def transports_worker(rank: int, world_size: int, choice: str) -> None:
    """Every transport gives the same bits, and the symmetric one counts what it stores."""
    group = dist.group.WORLD
    transports = Transports(choice)
    (line,) = transports.prepare([group])
    assert "symmetric memory" in line
    assert transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    symmetric = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    assert isinstance(symmetric, SymmetricTransport)
    plain = TorchTransport(group)
    torch.manual_seed(rank)
    for settings in ({"format": "int8"}, {"format": "int4", "rounding": "dither"}):
        codec = build_codec("taco", **settings)
        for shape in ((world_size, 40), (world_size * 128, 1000), (4096, 1024)):
            x = torch.randn(shape, device="cuda").bfloat16()
            for operation in (all_reduce, reduce_scatter, all_gather):
                expected = operation(x, codec, plain, key=11)
                assert torch.equal(operation(x, codec, symmetric, key=11), expected), (operation, shape)
                handle = operation(x, codec, symmetric, async_op=True, key=11)
                assert torch.equal(handle.wait(), expected), (operation, shape)
    sends.clear()
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    all_reduce(x, build_codec("taco", format="int8"), symmetric)
    half = (world_size - 1) * 2**20 // 128 * 132  # whole tiles, an fp32 step a group
    assert sends == [("all_to_all", half), ("all_gather", half)]
    assert all_reduce(x, build_codec("identity"), symmetric)[0] == world_size  # over torch.distributed


@pytest.mark.multigpu
@pytest.mark.parametrize("choice", ["symmetric", "copies"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_transports_agree(world_size: int, choice: str) -> None:
    spawn(transports_worker, world_size, choice, backend="nccl")


def copies_worker(rank: int, world_size: int) -> None:
    """Collectives of random sizes behind GEMMs, several under way, fused ones between them, all compared."""
    group = dist.group.WORLD
    transports = Transports("copies")
    transports.prepare([group])
    behind, codec = transports.transport(group), build_codec("taco", format="int8")
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    matrix = torch.randn(4096, 4096, device="cuda").bfloat16()
    base = torch.randn(3 * 2**20, device="cuda").bfloat16()
    cases = []
    for _ in range(20):
        numel, offset = 16 * world_size * int(2 ** draw.uniform(0, 15)), 16 * draw.randrange(2**15)
        x = base[offset : offset + numel].view(world_size, -1)
        operation = draw.choice((all_reduce, reduce_scatter, all_gather))
        cases.append((operation, x, operation(x, codec, TorchTransport(group))))
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    under_way = []
    for _ in range(1000):
        operation, x, expected = draw.choice(cases)
        if draw.random() < 0.2:
            wrong += (operation(x, codec, behind) != expected).any()
        else:
            under_way.append((operation(x, codec, behind, async_op=True), expected))
            torch.matmul(matrix, matrix)
        while len(under_way) > draw.randrange(4):
            handle, expected = under_way.pop(0)
            wrong += (handle.wait() != expected).any()
    assert int(wrong) == 0
    behind.symmetric.lanes[0].check()


@pytest.mark.multigpu
@pytest.mark.parametrize("connections", ["1", "32"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_copies_behind_gemms(world_size: int, connections: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    spawn(copies_worker, world_size, backend="nccl")


def graph_worker(rank: int, world_size: int) -> None:
    """Replays of a captured call, with eager calls in between, on other input each time."""
    from taco_kernels.symmetric_memory import SymmetricGroup

    group, config = SymmetricGroup(dist.group.WORLD), CodecConfig("int8")
    x = torch.empty(300_000, device="cuda", dtype=torch.bfloat16)
    group.all_reduce(x.normal_(), config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [group.all_reduce(x, config, algorithm=a) for a in ("two-shot", "one-shot")]
    for _ in range(20):
        x.normal_()
        graph.replay()
        eager = group.all_reduce(x, config)
        assert torch.equal(captured[0], eager) and torch.equal(captured[1], eager)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graph_replays(world_size: int) -> None:
    spawn(graph_worker, world_size, backend="nccl")


def stress_worker(rank: int, world_size: int) -> int:
    """Back-to-back calls of random sizes on two groups and two streams, each compared on the device."""
    from taco_kernels.symmetric_memory import SymmetricGroup

    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    groups = [dist.group.WORLD, pairs[rank // 2]]
    symmetric = [SymmetricGroup(group) for group in groups]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    config, codec = CodecConfig("int6"), build_codec("taco", format="int6")
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    base = torch.randn(3 * 2**20, device="cuda").bfloat16()
    cases = []
    for _ in range(40):
        numel, offset = 16 * int(2 ** draw.uniform(0, 17)), 16 * draw.randrange(2**16)
        x = base[offset : offset + numel]
        cases.append((x, [all_reduce(x, codec, TorchTransport(group)) for group in groups]))
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
        group.lanes[0].check()
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
    began = time.monotonic()
    messages = []
    for call in (lambda: (group.all_reduce(x, config), torch.cuda.synchronize()), group.lanes[0].check):
        try:
            call()
        except (RuntimeError, SymmetricMemoryError) as error:
            messages.append(str(error))
    outcome.put((time.monotonic() - began, messages))
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
            seconds, messages = outcome.get(timeout=120)
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    assert 1.5 < seconds < 30
    assert len(messages) == 2 and "waited 2 s for rank 1" in messages[1]
