"""Exchanges through pinned host memory by copy engines, as torch.distributed has them."""

import threading

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.collectives import all_reduce
from megatron.compression.communication.host_memory import CopyEngines, HostMemory, HostMemoryError
from megatron.compression.communication.topology import find_topology
from megatron.compression.communication.transport import HostTransport, Transports
from tests.distributed import test_tagc
from tests.distributed.spawn import spawn
from tests.distributed.test_host_memory import check_the_same, exchanges_worker, trained
from tests.distributed.tiny_ddp import start
from tests.gpu.devices import UNSHARED, WORLD_SIZES, needs

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges(world_size: int) -> None:
    """Uneven, empty, larger than the rings, and several under way."""
    spawn(exchanges_worker, world_size, CopyEngines, "cuda", backend="nccl")


def sums_worker(rank: int, world_size: int) -> list[bool]:
    """Return for each sum whether copies and NCCL give the same bits."""
    transports = Transports("host")
    same = []
    (line,) = transports.prepare([dist.group.WORLD])
    assert "through host memory" in line
    by_copies = transports.transport(dist.group.WORLD)
    assert isinstance(by_copies, HostTransport)
    by_nccl = Transports("collective").transport(dist.group.WORLD)
    generator = torch.Generator("cuda").manual_seed(rank)
    weight = torch.randn(2048, 2048, device="cuda")
    for number in range(40):
        x = torch.randn(1 + 99991 * number, device="cuda", generator=generator).bfloat16()
        codec = parse_codec(("int6", "taco", "int6:outliers=on", "lossless")[number % 4])
        work = all_reduce(x, codec, by_copies)
        busy = weight @ weight  # what runs meanwhile
        work.advance()
        same.append(torch.equal(work.wait(), all_reduce(x, codec, by_nccl).wait()))
        del busy
    return same


@needs(2, shared=False)
def test_sums_have_the_bits_of_nccl() -> None:
    for same in spawn(sums_worker, 2, backend="nccl"):
        assert all(same)


def data_parallel_worker(rank: int, world_size: int) -> None:
    test_tagc.DEVICE = f"cuda:{torch.cuda.current_device()}"
    for node_size in (None, 2) if world_size > 2 else (None,):
        by_copies, by_nccl = (
            find_topology(dist.group.WORLD, node_size, Transports(choice))
            for choice in ("host", "collective")
        )
        assert "through host memory" in by_copies.describe()
        for _ in range(3):  # the rings go round
            check_the_same(by_copies, by_nccl)
    start(rank)
    assert trained(rank, "host") == trained(rank, "collective")


@pytest.mark.parametrize("world_size", UNSHARED)
def test_data_parallel_payloads_have_the_same_bits(world_size: int) -> None:
    """Gradients of several buckets under way, weights, and TAGC, over one node and over two.

    A training has them too: its hooks run in autograd's thread.
    """
    spawn(data_parallel_worker, world_size, backend="nccl")


def corners_worker(rank: int, world_size: int) -> None:
    transport = HostTransport(HostMemory(dist.group.WORLD))
    payload = torch.full((1, 8 << 20), rank + 1, dtype=torch.uint8, device="cuda")

    def in_a_new_thread() -> None:  # which has no context on device 0
        torch.cuda.set_device(rank)
        gathered, work = transport.all_gather(payload)
        work.wait()
        same.append(
            bool((gathered.float().mean(dim=1).cpu() == torch.arange(1.0, world_size + 1)).all())
        )

    same: list[bool] = []
    thread = threading.Thread(target=in_a_new_thread)
    thread.start()
    thread.join()
    assert same == [True]
    for _ in range(20):
        transport.all_gather(payload)  # nobody waits, so its memory is free at once
        assert (torch.full((world_size, 8 << 20), 77, dtype=torch.uint8, device="cuda") == 77).all()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        late = payload * 3
        gathered, work = transport.all_gather(late)
        work.wait()
        total = gathered[:, -1].sum()
    torch.cuda.current_stream().wait_stream(side)
    assert total == 3 * sum(range(1, world_size + 1))
    if rank == 0:
        with (
            pytest.raises(KeyError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            transport.all_gather(payload)  # nobody waits
            raise KeyError
    gathered, work = transport.all_gather(payload)  # the ranks are in step as before
    work.wait()
    assert gathered[:, -1].sum() == sum(range(1, world_size + 1))


@needs(2, shared=False)
def test_corners() -> None:
    """Threads without a context, dropped handles, side streams, and a capture that is given up."""
    spawn(corners_worker, 2, backend="nccl")


def captures_worker(rank: int, world_size: int) -> list[bool]:
    """Return for each replay whether it and the exchanges around it have NCCL's bits."""
    transports = Transports("host")
    same = []
    transports.prepare([dist.group.WORLD])
    transport = transports.transport(dist.group.WORLD)
    by_nccl = Transports("collective").transport(dist.group.WORLD)
    codec = parse_codec("int6")
    side = torch.cuda.Stream()
    forked = torch.cuda.Stream()
    generator = torch.Generator("cuda").manual_seed(rank)

    def captured(numel: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], list[torch.Tensor]]:
        """Capture two sums on two streams and a gather that is larger than the rings.

        Returns:
            The graph, its inputs and its outputs.
        """
        values = [
            torch.zeros(numel + more, device="cuda", dtype=torch.bfloat16) for more in (0, 777)
        ]
        payload = torch.zeros((1, 20 * numel), device="cuda", dtype=torch.uint8)
        for x in values:
            all_reduce(x, codec, transport).wait()  # kernels are loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            forked.wait_stream(torch.cuda.current_stream())
            first = all_reduce(values[0], codec, transport)
            with torch.cuda.stream(forked):
                second = all_reduce(values[1], codec, transport)
            first.advance()
            gathered, work = transport.all_gather(payload)
            with torch.cuda.stream(forked):
                second_sum = second.wait()
            first_sum = first.wait()
            work.wait()
            torch.cuda.current_stream().wait_stream(forked)
        return graph, [*values, payload], [first_sum, second_sum, gathered]

    graphs = [captured(numel) for numel in (1000, 400_000, 2_000_000)]
    for number in range(100):
        graph, inputs, outputs = graphs[number % 3]
        for x in inputs:
            x.copy_(torch.randn(x.shape, device="cuda", generator=generator) * 50)
        early, late = (
            torch.randn(10 ** (3 + number % 5), device="cuda", generator=generator).bfloat16()
            for _ in range(2)
        )
        side.wait_stream(torch.cuda.current_stream())
        under_way = all_reduce(early, codec, transport)
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            graph.replay()
            if number % 7 == 0:
                graph.replay()
        sums = [all_reduce(late, codec, transport).wait(), under_way.wait()]
        torch.cuda.current_stream().wait_stream(side)
        expected = [all_reduce(x, codec, by_nccl).wait() for x in (late, early, *inputs[:2])]
        parts = [torch.empty_like(inputs[2]) for _ in range(world_size)]
        dist.all_gather(parts, inputs[2])
        same.append(all(map(torch.equal, [*sums, *outputs], [*expected, torch.cat(parts)])))
    return same


@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("world_size", UNSHARED)
def test_replays_have_the_bits_of_eager_exchanges(
    world_size: int, connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager exchanges are under way when a graph is replayed, on the same stream or on another."""
    # With 1 the streams of a device share one queue.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    for same in spawn(captures_worker, world_size, backend="nccl"):
        assert all(same), [number for number, equal in enumerate(same) if not equal]


def refused_worker(rank: int, world_size: int) -> None:
    def refusing(base: int, size: int) -> CopyEngines:
        engines = CopyEngines(base, size)
        with pytest.raises(HostMemoryError, match="cuMemHostRegister failed"):
            CopyEngines(base, size)  # twice
        if rank == 1:
            engines.close()
            raise HostMemoryError("refused")
        return engines

    for _ in range(3):  # it has been given back, wherever it is mapped next
        with pytest.raises(HostMemoryError, match="rank 1: refused"):
            HostMemory(dist.group.WORLD, refusing)
    dist.all_reduce(torch.ones(1 << 24, device="cuda"))
    torch.cuda.synchronize()


@needs(2, shared=False)
def test_refusal_leaves_the_device_as_it_was() -> None:
    """NCCL carries payloads then: no error of CUDA's may be left behind."""
    spawn(refused_worker, 2, backend="nccl")
