"""Fast launches on a GPU: the bits of Triton's own launches, on the current device and stream, in graphs."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from taco_kernels import bitmap_sparse, sdp4bit, tah_quant
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.taco import CodecConfig
from tests.gpu.simulated_ranks import on_all_ranks, simulated_channels

SETTINGS = [CodecConfig("int8"), CodecConfig("int6", 64, "single"), CodecConfig("fp8-e4m3", 32)]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: equal also where values are NaN."""
    return x.contiguous().view(torch.uint8)


@contextmanager
def only_fast_launches():
    """Fail on a launch that goes through Triton."""
    from taco_kernels.common.fast_launch import Launch

    def refuse(self, *_) -> None:
        raise AssertionError(f"{self.kernel} went through Triton")

    with mock.patch.object(Launch, "_through_triton", refuse):
        yield


def same(call: Callable[[], list[torch.Tensor]]) -> None:
    """By Triton, by what is a fast launch from the second call on, and by fast launches alone."""
    from taco_kernels.common.fast_launch import plain_launches

    with plain_launches():
        expected = call()
    results = [call()]
    with only_fast_launches():
        results.append(call())
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(bits(a), bits(b))


def views(numel: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """Tensors that begin at a multiple of 16 bytes and elsewhere, and rows of a wider one."""
    base = torch.randn(2 * numel + 64, generator=generator, device="cuda").to(dtype)
    base[numel // 2] = float("nan")
    tensors = [base[:numel], base[1 : numel + 1]]
    if numel % 4 == 0:
        tensors.append(base[3 : 3 + 2 * numel].view(4, numel // 2)[:, : numel // 4])
    return tensors


# Few: each is specialised on otherwise, and compiled anew.
CODEC_CALLS = [
    (0, 1, 1, torch.bfloat16),
    (0, 4 * 1031, 3, torch.bfloat16),
    (0, 2**18, 1, torch.float32),
    (0, 100_003, 1, torch.bfloat16),
    (1, 4 * 1031, 1, torch.bfloat16),
    (1, 2**18, 3, torch.float32),
    (2, 2**18, 1, torch.bfloat16),
]


@pytest.mark.parametrize(("setting", "numel", "chunks", "dtype"), CODEC_CALLS)
def test_codec(setting: int, numel: int, chunks: int, dtype: torch.dtype) -> None:
    """Every operation, aligned and not, contiguous and not, sizes of one group, odd ones, multiples of 16."""
    from taco_kernels.taco import launch

    config = SETTINGS[setting]
    for x in views(numel, dtype, torch.Generator("cuda").manual_seed(0)):

        def call(x=x) -> list[torch.Tensor]:
            wires = launch.encode(x, config, chunks)
            odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
            piece = config.chunk_numel(x.numel(), chunks)
            return [
                wires,
                launch.decode(wires, config, x.shape, x.dtype),
                launch.decode(wires, config, x.shape, x.dtype, odd),
                launch.decode_sum(wires, config, (piece,), torch.float32),
                launch.decode_sum_encode(wires, config, piece),
            ]

        same(call)


@pytest.mark.parametrize(("world_size", "numel", "chosen"), [(1, 4 * 1031, (0, 1)), (2, 2**17, (0, 2))])
def test_collectives(world_size: int, numel: int, chosen: tuple[int, ...]) -> None:
    """On two channels, whose addresses are arguments too; tensors at odd addresses, and rows."""
    from taco_kernels.symmetric_memory import collectives
    from taco_kernels.taco import launch

    config = CodecConfig("int6")

    def all_gather(x: torch.Tensor, channel) -> torch.Tensor:
        return collectives.all_gather_encoded(channel, launch.encode(x, config), x.shape, x.dtype, config)

    xs = views(numel, torch.bfloat16, torch.Generator("cuda").manual_seed(0))
    operations = (
        lambda x, channel: collectives.all_reduce(channel, x, config),
        lambda x, channel: collectives.reduce_scatter(channel, x, config),
        all_gather,
    )
    for _ in range(2):
        channels = simulated_channels(world_size, programs=24)
        for x in (xs[number].reshape(4, -1) if number < 2 else xs[number] for number in chosen):

            def call(x=x, channels=channels) -> list[torch.Tensor]:
                results = []
                for operation in operations:
                    results += on_all_ranks(channels, lambda _, channel, run=operation: run(x, channel))
                return results

            same(call)
        channels[0].check()


def test_the_other_codecs() -> None:
    """SDP4Bit, TAH-Quant and bitmap-sparse values."""
    generator = torch.Generator("cuda").manual_seed(0)
    config = tah_quant.TahConfig()
    for numel in (4 * 1031, 2**16):
        for x in views(numel, torch.bfloat16, generator)[:2]:
            x = x.view(4, -1)

            def call(x=x) -> list[torch.Tensor]:
                results = []
                for format in (GroupFormat(4, 128, True), GroupFormat(8, 128)):
                    wires = sdp4bit.quantize(x, format)
                    out = torch.empty(4, x.shape[1], device=x.device)
                    results += [wires, sdp4bit.sum_dequantize(wires[None], format, out, 0.5)]
                wire = tah_quant.encode(x, config)
                results += [wire, tah_quant.decode(wire, config, x.shape, x.dtype)]
                layout = bitmap_sparse.BitmapLayout(x.shape[1], 0.2, 16)
                sent = bitmap_sparse.encode(x.float(), torch.ones(4, device=x.device), layout)
                return [*results, sent, bitmap_sparse.decode_sum(sent, layout)]

            same(call)


@pytest.mark.parametrize("config", SETTINGS[:2])
def test_graph_capture(config: CodecConfig) -> None:
    """Launches are captured, and replays see what the tensors hold by then."""
    from taco_kernels.common.fast_launch import plain_launches
    from taco_kernels.symmetric_memory import collectives
    from taco_kernels.taco import launch

    x = torch.randn(1000, 128, device="cuda").bfloat16()
    (channel,) = simulated_channels(1, programs=24)

    def call() -> list[torch.Tensor]:
        wires = launch.encode(x, config, 2)
        back = launch.decode(wires, config, x.shape, x.dtype)
        return [wires, back, collectives.all_reduce(channel, x, config)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with only_fast_launches(), torch.cuda.graph(graph):
        captured = call()
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        with plain_launches():
            expected = call()
        for a, b in zip(captured, expected, strict=True):
            assert torch.equal(bits(a), bits(b))


@pytest.mark.skipif(
    os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    reason="streams share a queue with CUDA_DEVICE_MAX_CONNECTIONS=1; unset it",
)
def test_side_stream() -> None:
    """A kernel on another stream waits for that stream, and for it alone."""
    from taco_kernels.taco import launch

    config, side = CodecConfig("int8"), torch.cuda.Stream()
    x, new = torch.zeros(2**16, device="cuda"), torch.randn(2**16, device="cuda")
    expected = launch.encode(new, config)
    assert not torch.equal(launch.encode(x, config), expected)
    torch.cuda.synchronize()
    with only_fast_launches(), torch.cuda.stream(side):
        launch.encode(x, config)  # its memory is there for the next
        torch.cuda._sleep(2_000_000_000)  # about a second
        x.copy_(new)
        late = launch.encode(x, config)
    early = launch.encode(new, config)  # on the default stream
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the default stream waited for the other"
    side.synchronize()
    assert torch.equal(late, expected) and torch.equal(early, expected)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_second_device() -> None:
    """Each device has kernels of its own; alternating between them changes nothing."""
    from taco_kernels.taco import launch

    config = CodecConfig("int8")
    x = torch.randn(1000, 128).bfloat16()
    wires = []
    for device in (0, 1, 0, 1, 0, 1):
        with torch.cuda.device(device):
            wire = launch.encode(x.to(device), config)
            wires.append((wire.cpu(), launch.decode(wire, config, x.shape, x.dtype).cpu()))
            assert wire.device.index == device
    for wire, back in wires[1:]:
        assert torch.equal(wire, wires[0][0]) and torch.equal(bits(back), bits(wires[0][1]))
    with only_fast_launches(), torch.cuda.device(1):
        assert torch.equal(launch.encode(x.to(1), config).cpu(), wires[0][0])


def test_wrong_device_is_an_error() -> None:
    """A tensor of the host never reaches a kernel, whatever was launched before."""
    from taco_kernels.taco import launch

    config, x = CodecConfig("int8"), torch.randn(1024, device="cuda")
    for _ in range(3):
        wire = launch.encode(x, config)
    with pytest.raises(ValueError, match="cannot be accessed"):
        launch.decode(wire, config, x.shape, x.dtype, x.cpu())
    assert torch.equal(launch.encode(x, config), wire)
