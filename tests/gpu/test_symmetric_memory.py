"""Symmetric-memory collectives on GPUs: simulated ranks on one device, then a process a device."""

import multiprocessing
import os
import random as python_random
import tempfile
from collections.abc import Callable

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

CALLS = 10_000
"""Calls of the stress test."""
MIXED_CALLS = 200
"""Calls and replays where both mix."""
OUTLIERS = CodecConfig("int6", scales="signed", outliers=True)
UNTRANSFORMED = CodecConfig("int8", 256, "single", hadamard=False, outliers=True)


def tensors_of_ranks(
    world_size: int, config: CodecConfig, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """A tensor of each rank, with a NaN in rank 0's, and with outliers if the codec stores them.

    Some blocks have more outliers than they list, some few, and some have them on one rank alone.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    xs = []
    for rank in range(world_size):
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        if config.outliers:
            x.view(-1)[2**15 :: 999 + rank] *= 100.0
            x.view(-1)[100:2000:150] *= 1000.0
        xs.append(x)
    xs[0][0, 1] = float("nan")
    return xs


@pytest.mark.parametrize(
    ("world_size", "config", "shape", "dtype"),
    [
        (4, CodecConfig("fp8-e4m3"), (1920, 4096), torch.bfloat16),  # ten steps a program
        (3, CodecConfig("int6", scales="single"), (129, 640), torch.bfloat16),  # no power of 2
        (2, CodecConfig("int4", 256), (64, 1000), torch.float16),
        (2, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (4, CodecConfig("int8", hadamard=False), (4, 5), torch.bfloat16),  # less than a tile
        (4, CodecConfig("int6", scales="signed"), (512, 1024), torch.bfloat16),
        (1, CodecConfig("int8"), (64, 1000), torch.bfloat16),
        (4, OUTLIERS, (512, 1024), torch.bfloat16),
        (3, CodecConfig("fp8-e4m3", 64, outliers=True), (129, 640), torch.float16),
        (2, UNTRANSFORMED, (64, 1000), torch.float32),
    ],
)
def test_simulated_ranks_have_the_bits_of_the_codec_kernels(
    world_size: int, config: CodecConfig, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Every collective runs several times over one channel, in an order that leaves slots askew."""
    xs = tensors_of_ranks(world_size, config, shape, dtype)
    channels = ranks.simulated_channels(world_size, programs=24)
    for call, expected in ranks.collective_cases(xs, config, second=config) * 3:
        results = ranks.on_all_ranks(channels, call)
        for result, expected_result in zip(results, expected, strict=True):
            assert torch.equal(bits(result), bits(expected_result))
    channels[0].check()


def over_nccl(x: torch.Tensor, config: CodecConfig, group: dist.ProcessGroup) -> torch.Tensor:
    """The same all-reduce by the codec's own kernels and NCCL's exchanges."""
    if group.size() == 2:
        wire = encode(x, config)
        wires = wire.new_empty(2, wire.shape[1])
        dist.all_gather_into_tensor(wires, wire, group=group)
        return decode_sum(wires, config, x.shape, x.dtype)
    wires = encode(x, config, group.size())
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires, group=group)
    piece = decode_sum_encode(received, config, config.chunk_numel(x.numel(), group.size()))
    sums = piece.new_empty(group.size(), piece.numel())
    dist.all_gather_into_tensor(sums.view(-1), piece, group=group)
    return decode(sums, config, x.shape, x.dtype)


def counters(count: int) -> list[torch.Tensor]:
    """Return zeros on the device that count wrong results; they are read after all calls."""
    return [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(count)]


def check_counters(wrong: list[torch.Tensor], groups: list[SymmetricGroup]) -> None:
    """No result was wrong, and no call gave up waiting."""
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * len(wrong)
    for group in groups:
        group.channel.check()


def stress_worker(rank: int, world_size: int) -> None:
    """Compare back-to-back calls of random sizes on two groups and two streams, on the device."""
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
        numel = 16 * int(2 ** draw.uniform(0, 17))
        offset = 16 * draw.randrange(2**16)
        x = base[offset : offset + numel]
        cases.append((x, [over_nccl(x, config, group) for group in groups]))
    torch.cuda.synchronize()
    wrong = counters(len(groups))
    for _ in range(CALLS):
        x, expected = draw.choice(cases)
        i = draw.randrange(2)
        with torch.cuda.stream(streams[i]):
            wrong[i] += (symmetric[i].all_reduce(x, config) != expected[i]).any()
    check_counters(wrong, symmetric)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_ten_thousand_calls_on_two_groups(world_size: int) -> None:
    spawn(stress_worker, world_size, backend="nccl")


def captured(calls: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """``calls`` in a graph, after they have run eagerly, and what they return there."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = calls()
    return graph, result


class MixedCalls:
    """Calls of two groups of the same ranks, as eager calls and as a graph.

    With ``nccl`` the graph has an all-reduce of NCCL in its parallel branch.
    """

    def __init__(self, world_size: int, nccl: bool) -> None:
        self.config = CodecConfig("int6", scales="signed")
        second = dist.new_group(range(world_size))
        self.symmetric = [SymmetricGroup(dist.group.WORLD), SymmetricGroup(second)]
        self.nccl_group = dist.new_group(range(world_size)) if nccl else None
        self.ones = torch.ones(2**20, device="cuda")
        self.branch = torch.cuda.Stream()

    def scatter_and_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The first group's other two collectives."""
        wire = encode(x, self.config)
        gathered = self.symmetric[0].all_gather_encoded(wire, x.shape, x.dtype, self.config)
        return [self.symmetric[0].reduce_scatter(x, self.config), gathered]

    def expected(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The results that ``in_branches`` should return: NCCL's bits, and eager calls'."""
        summed = over_nccl(x, self.config, dist.group.WORLD)
        return [summed, summed, *self.scatter_and_gather(x)]

    def in_branches(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Calls of each group, in parallel branches as far as anybody but the order knows."""
        main = torch.cuda.current_stream()
        self.branch.wait_stream(main)
        with torch.cuda.stream(self.branch):
            results = [self.symmetric[1].all_reduce(x, self.config)]
            if self.nccl_group is not None:
                dist.all_reduce(self.ones.clone(), group=self.nccl_group)
        results.append(self.symmetric[0].all_reduce(x, self.config))
        results.extend(self.scatter_and_gather(x))
        main.wait_stream(self.branch)
        return results

    def reduce_over_nccl(self) -> None:
        """An eager all-reduce of NCCL, beside everything else."""
        dist.all_reduce(self.ones, op=dist.ReduceOp.MAX, group=self.nccl_group, async_op=True)


def mixed_worker(rank: int, world_size: int, nccl: bool) -> None:
    """Compare eager sums and replays of all collectives on the device, over two streams."""
    calls = MixedCalls(world_size, nccl)
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    cases = [torch.randn(2**22, device="cuda").bfloat16() for _ in range(8)]
    expected = [calls.expected(x) for x in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    graphs = []  # for each stream, as a graph's memory is used by one replay at a time
    for _ in streams:
        static = cases[0].clone()
        graphs.append((static, *captured(lambda static=static: calls.in_branches(static))))
    torch.cuda.synchronize()
    wrong = counters(len(streams))
    for _ in range(MIXED_CALLS):
        i = draw.randrange(2)
        case = draw.randrange(len(cases))
        eager = draw.random() < 0.5
        if nccl and draw.random() < 0.3:
            calls.reduce_over_nccl()
        with torch.cuda.stream(streams[i]):
            if eager:
                group = calls.symmetric[draw.randrange(2)]
                results = [group.all_reduce(cases[case], calls.config)]
            else:
                static, graph, results = graphs[i]
                static.copy_(cases[case])
                graph.replay()
            for result, expected_result in zip(results, expected[case], strict=False):
                wrong[i] += (result != expected_result).any()
    check_counters(wrong, calls.symmetric)


@pytest.mark.multigpu
@pytest.mark.parametrize("nccl", [False, True], ids=["alone", "with_nccl"])
@pytest.mark.parametrize("world_size", UNSHARED)
def test_graph_replays_and_eager_calls_mix(world_size: int, nccl: bool) -> None:
    spawn(mixed_worker, world_size, nccl, backend="nccl", timeout=120)


def dead_rank_main(rank: int, store: str, outcome) -> None:
    """Let rank 1 leave; rank 0 puts the errors of its next call and of the check in ``outcome``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    group = SymmetricGroup(dist.group.WORLD, timeout=2.0)
    config = CodecConfig("int8")
    x = torch.ones(100_000, device="cuda", dtype=torch.bfloat16)
    group.all_reduce(x, config)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os._exit(0)

    def waits_for_rank_1() -> None:
        group.all_reduce(x, config)
        torch.cuda.synchronize()

    messages = []
    for call in (waits_for_rank_1, group.channel.check):
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
    """The next call ends with an error, and the one after it tells which rank did not answer."""
    context = multiprocessing.get_context("spawn")
    outcome = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = []
        for rank in range(2):
            arguments = (rank, store, outcome)
            processes.append(context.Process(target=dead_rank_main, args=arguments))
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


def prepared_transports() -> Transports:
    """Transports whose fused one is symmetric memory, which ``prepare`` says once."""
    transports = Transports("symmetric")
    (line,) = transports.prepare([dist.group.WORLD])
    assert "symmetric memory" in line
    assert transports.prepare([dist.group.WORLD]) == []
    return transports


def same_bits_worker(rank: int, world_size: int) -> None:
    """Codecs with a kernel for the collective, on sizes that divide nothing, and with outliers."""
    group = dist.group.WORLD
    symmetric = prepared_transports().transport(group)
    assert isinstance(symmetric, SymmetricTransport)
    over_torch = TorchTransport(group)
    torch.manual_seed(rank)
    specs = ("taco:format=int8", "int4", "int6", "int5/int6", "int5:outliers=on/int6:outliers=on")
    for spec in specs:
        codec = parse_codec(spec)
        for shape in ((world_size, 40), (world_size * 128, 1000), (4096, 1024)):
            x = torch.randn(shape, device="cuda").bfloat16()
            x.view(-1)[7::999] *= 50.0
            for operation in (all_reduce, reduce_scatter, all_gather):
                expected = operation(x, codec, over_torch).wait()
                result = operation(x, codec, symmetric).wait()
                assert torch.equal(result, expected), (spec, operation, shape)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_transports_give_the_same_bits(world_size: int) -> None:
    spawn(same_bits_worker, world_size, backend="nccl")


def counting_worker(rank: int, world_size: int) -> None:
    """128 int8 values have 128 bytes and a step: fp32 for dual scales, bf16 for single."""
    sends: list[tuple[str, int]] = []
    symmetric = prepared_transports().transport(
        dist.group.WORLD, lambda operation, sent: sends.append((operation, sent))
    )
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    groups_sent = (world_size - 1) * 2**20 // 128
    all_reduce(x, parse_codec("taco:format=int8/int8"), symmetric).wait()
    assert sends == [("all_to_all", groups_sent * 132), ("all_gather", groups_sent * 130)]
    if world_size == 2:  # one exchange, of all that a rank has
        sends.clear()
        all_reduce(x, parse_codec("taco:format=int8"), symmetric).wait()
        assert sends == [("all_gather", 2 * groups_sent * 132)]


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_the_symmetric_transport_counts_what_it_stores(world_size: int) -> None:
    spawn(counting_worker, world_size, backend="nccl")


def unfused_worker(rank: int, world_size: int) -> None:
    """Codecs without a kernel for the collective go over torch.distributed."""
    symmetric = prepared_transports().transport(dist.group.WORLD)
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    for spec in ("identity", "sdp4bit"):
        result = all_reduce(x, parse_codec(spec), symmetric).wait()
        assert abs(result[0] - world_size) < 0.1


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", UNSHARED)
def test_codecs_without_a_kernel_work_over_the_symmetric_transport(world_size: int) -> None:
    spawn(unfused_worker, world_size, backend="nccl")
