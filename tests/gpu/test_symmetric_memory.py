"""Symmetric-memory collectives on GPUs: simulated ranks on one device, then one process a device."""

import multiprocessing
import os
import random as python_random
import tempfile

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import Transports, all_gather, all_reduce, reduce_scatter
from megatron.compression.communication.transport import SymmetricTransport, TorchTransport
from taco_kernels.symmetric_memory import SymmetricGroup, SymmetricMemoryError
from taco_kernels.taco import CodecConfig, decode, decode_sum, decode_sum_encode, encode
from tests.distributed.spawn import spawn
from tests.gpu import simulated_ranks as ranks
from tests.gpu.devices import UNSHARED, needs
from tests.kernels.wires.lossless import bits

CALLS, MIXED_CALLS = 10_000, 200


@pytest.mark.parametrize(
    ("world_size", "config", "shape", "dtype"),
    [
        (4, CodecConfig("fp8-e4m3"), (1920, 4096), torch.bfloat16),  # ten steps a program
        (
            3,
            CodecConfig("int6", scales="single"),
            (129, 640),
            torch.bfloat16,
        ),  # ranks of no power of 2
        (2, CodecConfig("int4", 256), (64, 1000), torch.float16),
        (2, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (4, CodecConfig("int8", hadamard=False), (4, 5), torch.bfloat16),  # less than a tile
        (4, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (1, CodecConfig("int8"), (64, 1000), torch.bfloat16),
        (4, CodecConfig("int6", scales="signed", outliers=True), (512, 1024), torch.bfloat16),
        (3, CodecConfig("fp8-e4m3", 64, outliers=True), (129, 640), torch.float16),
        (
            2,
            CodecConfig("int8", 256, "single", hadamard=False, outliers=True),
            (64, 1000),
            torch.float32,
        ),
    ],
)
def test_simulated_ranks_have_the_bits_of_the_codec_kernels(
    world_size, config, shape, dtype
) -> None:
    """Every collective, several times over the same channel, in an order that leaves their slots askew."""
    generator = torch.Generator("cuda").manual_seed(0)
    xs = [
        torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(world_size)
    ]
    if config.outliers:  # more than a block lists, few, and in one rank alone
        for rank, x in enumerate(xs):
            x.view(-1)[2**15 :: 999 + rank] *= 100.0
            x.view(-1)[100:2000:150] *= 1000.0
    xs[0][0, 1] = float("nan")
    channels = ranks.simulated_channels(world_size, programs=24)
    cases = ranks.collective_cases(xs, config, second=config)
    for call, expected in cases * 3:
        for result, wanted in zip(ranks.on_all_ranks(channels, call), expected, strict=True):
            assert torch.equal(bits(result), bits(wanted))
    channels[0].check()


def over_nccl(x: torch.Tensor, config: CodecConfig, group: dist.ProcessGroup) -> torch.Tensor:
    """The same all-reduce by the codec's own kernels and NCCL's exchanges."""
    if group.size() == 2:
        own = encode(x, config)
        both = own.new_empty(2, own.shape[1])
        dist.all_gather_into_tensor(both, own, group=group)
        return decode_sum(both, config, x.shape, x.dtype)
    wires = encode(x, config, group.size())
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires, group=group)
    own = decode_sum_encode(received, config, config.chunk_numel(x.numel(), group.size()))
    sums = own.new_empty(group.size(), own.numel())
    dist.all_gather_into_tensor(sums.view(-1), own, group=group)
    return decode(sums, config, x.shape, x.dtype)


def stress_worker(rank: int, world_size: int) -> None:
    """Back-to-back calls of random sizes on two groups and two streams, each compared on the device."""
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
    for _ in range(CALLS):
        x, expected = draw.choice(cases)
        which = draw.randrange(2)
        with torch.cuda.stream(streams[which]):
            wrong[which] += (symmetric[which].all_reduce(x, config) != expected[which]).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]
    for group in symmetric:
        group.channel.check()


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_ten_thousand_calls_on_two_groups(world_size: int) -> None:
    spawn(stress_worker, world_size, backend="nccl")


def two_groups(world_size: int) -> tuple[list[dist.ProcessGroup], list[SymmetricGroup]]:
    """Two process groups of all ranks, each with symmetric memory."""
    groups = [dist.group.WORLD, dist.new_group(range(world_size))]
    return groups, [SymmetricGroup(group) for group in groups]


def captured(calls) -> tuple[torch.cuda.CUDAGraph, object]:
    """``calls`` in a graph, once they have run eagerly, and what they return there."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = calls()
    return graph, result


def mixed_worker(rank: int, world_size: int, nccl: bool) -> None:
    """Eager sums and replays of all collectives at random on two streams, compared on the device with NCCL's
    bits and with eager calls'.

    With ``nccl`` graphs have an all-reduce of NCCL in a parallel branch, and eager ones run on a stream too.
    """
    groups, symmetric = two_groups(world_size)
    third = dist.new_group(range(world_size))
    config = CodecConfig("int6", scales="signed")
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    cases = [torch.randn(2**22, device="cuda").bfloat16() for _ in range(8)]

    def others(x: torch.Tensor) -> list[torch.Tensor]:
        gathered = symmetric[0].all_gather_encoded(encode(x, config), x.shape, x.dtype, config)
        return [symmetric[0].reduce_scatter(x, config), gathered]

    expected = [[over_nccl(x, config, groups[0])] * 2 + others(x) for x in cases]
    ones = torch.ones(2**20, device="cuda")
    streams, branch = [torch.cuda.Stream(), torch.cuda.Stream()], torch.cuda.Stream()

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        """Calls of each group, in parallel branches as far as anybody but the order knows."""
        main = torch.cuda.current_stream()
        branch.wait_stream(main)
        with torch.cuda.stream(branch):
            results = [symmetric[1].all_reduce(x, config)]
            if nccl:
                dist.all_reduce(ones.clone(), group=third)
        results += [symmetric[0].all_reduce(x, config), *others(x)]
        main.wait_stream(branch)
        return results

    graphs = []  # for each stream, as a graph's memory is used by one replay at a time
    for _ in streams:
        static = cases[0].clone()
        graphs.append((static, *captured(lambda static=static: both(static))))
    torch.cuda.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for _ in range(MIXED_CALLS):
        which, case, eager = draw.randrange(2), draw.randrange(len(cases)), draw.random() < 0.5
        if nccl and draw.random() < 0.3:
            dist.all_reduce(ones, op=dist.ReduceOp.MAX, group=third, async_op=True)
        with torch.cuda.stream(streams[which]):
            if eager:
                results = [symmetric[draw.randrange(2)].all_reduce(cases[case], config)]
            else:
                static, graph, results = graphs[which]
                static.copy_(cases[case])
                graph.replay()
            for result, wanted in zip(results, expected[case], strict=False):
                wrong[which] += (result != wanted).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]
    for group in symmetric:
        group.channel.check()


@pytest.mark.multigpu
@pytest.mark.parametrize("nccl", [False, True], ids=["alone", "with_nccl"])
@pytest.mark.parametrize("world_size", UNSHARED)
def test_graph_replays_and_eager_calls_mix(world_size: int, nccl: bool) -> None:
    spawn(mixed_worker, world_size, nccl, backend="nccl", timeout=120)


def dead_rank_main(rank: int, store: str, outcome) -> None:
    """Rank 1 leaves; rank 0's next call must end, and the one after it must say why."""
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
    for call in (
        lambda: (group.all_reduce(x, config), torch.cuda.synchronize()),
        group.channel.check,
    ):
        try:
            call()
        except (RuntimeError, SymmetricMemoryError) as error:
            messages.append(str(error))
    outcome.put(messages)
    outcome.close()
    outcome.join_thread()
    os._exit(0)  # the device is lost to this process


@pytest.mark.multigpu
@needs(2, shared=False)
def test_a_rank_that_dies_does_not_hang_the_others() -> None:
    context = multiprocessing.get_context("spawn")
    outcome = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = [
            context.Process(target=dead_rank_main, args=(r, store, outcome)) for r in range(2)
        ]
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


def transports_worker(rank: int, world_size: int) -> None:
    """Every transport gives the same bits, and the symmetric one counts what it stores."""
    group = dist.group.WORLD
    transports = Transports("symmetric")
    (line,) = transports.prepare([group])
    assert "symmetric memory" in line
    assert transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    symmetric = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    assert isinstance(symmetric, SymmetricTransport)
    plain = TorchTransport(group)
    torch.manual_seed(rank)
    for spec in (
        "taco:format=int8",
        "int4",
        "int6",
        "int5/int6",
        "int5:outliers=on/int6:outliers=on",
    ):
        codec = parse_codec(spec)
        for shape in ((world_size, 40), (world_size * 128, 1000), (4096, 1024)):
            x = torch.randn(shape, device="cuda").bfloat16()
            x.view(-1)[7::999] *= 50.0
            for operation in (all_reduce, reduce_scatter, all_gather):
                expected = operation(x, codec, plain).wait()
                assert torch.equal(operation(x, codec, symmetric).wait(), expected), (
                    spec,
                    operation,
                    shape,
                )
    sends.clear()
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    all_reduce(x, parse_codec("taco:format=int8/int8"), symmetric).wait()
    half, second = (
        (world_size - 1) * 2**20 // 128 * size for size in (132, 130)
    )  # a step of fp32, of bf16
    assert sends == [("all_to_all", half), ("all_gather", second)], (sends, half, second)
    if world_size == 2:
        sends.clear()
        all_reduce(x, parse_codec("taco:format=int8"), symmetric).wait()
        assert sends == [("all_gather", 2 * half)], sends
    for spec in ("identity", "sdp4bit"):  # over torch.distributed
        assert abs(all_reduce(x, parse_codec(spec), symmetric).wait()[0] - world_size) < 0.1


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_transports_agree(world_size: int) -> None:
    """Symmetric memory and torch.distributed, codecs with and without a kernel for the collective."""
    spawn(transports_worker, world_size, backend="nccl")
