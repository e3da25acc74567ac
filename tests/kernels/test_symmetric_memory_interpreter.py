"""The symmetric-memory kernels under Triton's CPU interpreter, a process a rank, over shared host memory.

Flags are inline PTX, which the interpreter does not know: here they are Python on the same addresses. The
rest, slots, steps, acknowledgements and arithmetic, is what runs on a GPU. A program waits for the program of
the same number on the other ranks only, so the interpreter may run them one after the other.
"""

import ctypes
import mmap
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.kernels.interpreter import interpreted, small_tiles

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "outliers"),
    [(2, False), pytest.param(3, False, marks=pytest.mark.thorough), (2, True)],
)
def test_collectives_have_the_bits_of_the_codec_kernels(ranks: int, outliers: bool) -> None:
    """Over so many steps that every slot is used again, twice, with two ranks; odd sizes with three."""
    assert interpreted(main, ranks, outliers).count("ok") == ranks  # lines may mix


def use_python_flags() -> None:
    """Replace what is PTX in channel.py."""
    from taco_kernels.symmetric_memory import channel, kernels

    def value(x) -> int:
        return int(x.handle.data.item()) if hasattr(x, "handle") else int(getattr(x, "value", x))

    def publish(table, program, rank, sent, read, CHANNEL) -> None:
        for base in (ctypes.c_uint64 * CHANNEL.W.value).from_address(value(table)):
            for at, steps in ((channel.data_flag, sent), (channel.ack_flag, read)):
                ctypes.c_uint64.from_address(
                    base + value(at(program, rank, CHANNEL))
                ).value = value(steps)

    def wait(flags, target, error, timeout, CHANNEL) -> None:
        deadline = time.monotonic() + value(timeout) / 1e9
        for rank in range(CHANNEL.W.value):
            address = value(flags) + rank * CHANNEL.PROGRAMS.value * 8
            while ctypes.c_int64.from_address(address).value < value(target):
                assert time.monotonic() < deadline, (
                    f"waited for rank {rank}'s flag to be {value(target)}"
                )
                time.sleep(0)

    kernels.publish, kernels.wait = publish, wait


def cases(world_size: int, outliers: bool) -> list[tuple]:
    """Config, config of an all-reduce's second exchange, tensors of all ranks, and what they become."""
    import torch

    from taco_kernels.taco import CodecConfig, launch
    from taco_kernels.taco.spec import TUNING
    from tests.gpu import simulated_ranks as expected

    small_tiles(TUNING, 4096 if outliers else 1024)  # and several steps; half a tile holds a block
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        setattr(expected, name, getattr(launch, name))
    settings = {
        (2, False): (
            (CodecConfig("int8", 128, "dual"), (4, 2500), torch.bfloat16),
        ),  # five steps a program
        (3, False): (
            (CodecConfig("int6", 64, "single"), (6, 300), torch.float32),
            (CodecConfig("int4", 256, "dual"), (6, 170), torch.float16),
        ),
        (2, True): (
            (CodecConfig("int6", 128, "signed", outliers=True), (2, 5000), torch.bfloat16),
            # pieces of whole groups, less than a tile: read in place
            (CodecConfig("int8", 64, "dual", outliers=True), (4, 640), torch.float32),
        ),
    }
    made = []
    for config, shape, dtype in settings[world_size, outliers]:
        generator = torch.Generator().manual_seed(0)
        xs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]
        xs[0][0, 1] = float("nan")
        if outliers:  # more than a block lists, in both ranks and in one alone, and in each piece
            for x in xs:
                x.view(-1)[200::128] *= 1000.0
            xs[1].view(-1)[300::700] *= 3000.0
            xs = [
                torch.nn.functional.pad(x, (0, 64))[:, : shape[1]] for x in xs
            ]  # rows of a larger tensor
        other = CodecConfig("int8", config.group_size, "signed", outliers=outliers)
        made.append((config, expected.collective_cases(xs, config, other)))
    return made


def run(rank: int, world_size: int, directory: str, made: list[tuple]) -> None:
    """Run every collective on this rank, over files that all ranks map, and compare."""
    import torch

    from taco_kernels.symmetric_memory.channel import Channel, channel_bytes

    memories = []
    for peer in range(world_size):
        with open(Path(directory) / str(peer), "r+b") as file:
            memories.append(mmap.mmap(file.fileno(), channel_bytes(world_size, 2)))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    channel = Channel(addresses, rank, torch.device("cpu"), 2, timeout=200.0)
    for number, (config, calls) in enumerate(made):
        few = (4 if number == 0 else 2) if config.outliers else None  # whose tiles take long
        for call, expected in calls[:few]:
            result, wanted = call(rank, channel), expected[rank]
            assert expected[0].isnan().any(), "a NaN stays visible"
            assert torch.equal(result.isnan(), wanted.isnan()), (rank, config)
            assert torch.equal(result.nan_to_num(), wanted.nan_to_num()), (rank, config)
    print("ok", flush=True)


def main(world_size: int, outliers: bool) -> None:
    """Start the ranks; exit with 1 if one fails."""
    from taco_kernels.symmetric_memory.channel import channel_bytes

    use_python_flags()
    made = cases(world_size, outliers)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world_size):
            (Path(directory) / str(rank)).write_bytes(bytes(channel_bytes(world_size, 2)))
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=run, args=(rank, world_size, directory, made))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(any(process.exitcode for process in processes))
