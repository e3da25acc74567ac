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
from typing import NamedTuple

import pytest

from tests.kernels.interpreter import interpreted, small_tiles

pytestmark = pytest.mark.slow

PROGRAMS = 2
"""Programs of the channel."""


@pytest.mark.parametrize(
    ("ranks", "outliers"),
    [(2, False), pytest.param(3, False, marks=pytest.mark.thorough), (2, True)],
)
def test_collectives_have_the_bits_of_the_codec_kernels(ranks: int, outliers: bool) -> None:
    """Over so many steps that every slot is used again, twice, with two ranks; odd sizes with three."""
    assert interpreted(main, ranks, outliers).count("ok") == ranks  # lines may mix


def use_python_flags() -> None:
    """Replace the PTX of channel.py by Python that does the same."""
    from taco_kernels.symmetric_memory import channel, kernels

    def value(x) -> int:
        """The number in a tensor of the interpreter or in a constexpr."""
        if hasattr(x, "handle"):
            return int(x.handle.data.item())
        return int(getattr(x, "value", x))

    def publish(table, program, rank, sent, read, CHANNEL) -> None:
        addresses = (ctypes.c_uint64 * CHANNEL.W.value).from_address(value(table))
        data_at = value(channel.data_flag(program, rank, CHANNEL))
        ack_at = value(channel.ack_flag(program, rank, CHANNEL))
        for memory in addresses:
            ctypes.c_uint64.from_address(memory + data_at).value = value(sent)
            ctypes.c_uint64.from_address(memory + ack_at).value = value(read)

    def wait(flags, target, error, timeout, CHANNEL) -> None:
        deadline = time.monotonic() + value(timeout) / 1e9
        for rank in range(CHANNEL.W.value):
            flag = ctypes.c_int64.from_address(value(flags) + rank * CHANNEL.PROGRAMS.value * 8)
            while flag.value < value(target):
                assert time.monotonic() < deadline, (
                    f"waited for rank {rank}'s flag to be {value(target)}"
                )
                time.sleep(0)

    kernels.publish = publish
    kernels.wait = wait


class Setting(NamedTuple):
    """A codec, and a tensor of each rank."""

    format: str
    group_size: int
    scales: str
    shape: tuple[int, int]
    dtype: str


SETTINGS = {
    (2, False): [Setting("int8", 128, "dual", (4, 2500), "bfloat16")],  # five steps a program
    (3, False): [
        Setting("int6", 64, "single", (6, 300), "float32"),
        Setting("int4", 256, "dual", (6, 170), "float16"),
    ],
    (2, True): [
        Setting("int6", 128, "signed", (2, 5000), "bfloat16"),
        # pieces of whole groups, less than a tile: read in place
        Setting("int8", 64, "dual", (4, 640), "float32"),
    ],
}
"""By number of ranks, and whether the codec stores outliers separately."""


def tensors_of(setting: Setting, world_size: int, outliers: bool) -> list:
    """A tensor of each rank; rank 0's has a NaN.

    With outliers they are rows of larger tensors, and have more outliers than a block lists, in all ranks and
    in one alone, and in each piece.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    xs = []
    for _ in range(world_size):
        x = torch.randn(setting.shape, generator=generator)
        xs.append(x.to(getattr(torch, setting.dtype)))
    xs[0][0, 1] = float("nan")
    if not outliers:
        return xs
    for x in xs:
        x.view(-1)[200::128] *= 1000.0
    xs[1].view(-1)[300::700] *= 3000.0
    return [torch.nn.functional.pad(x, (0, 64))[:, : setting.shape[1]] for x in xs]


def cases(world_size: int, outliers: bool) -> list[tuple]:
    """(config, collectives as ``simulated_ranks.collective_cases`` has them) of each setting."""
    from taco_kernels.taco import CodecConfig, launch
    from taco_kernels.taco.spec import TUNING
    from tests.gpu import simulated_ranks

    small_tiles(TUNING, 4096 if outliers else 1024)  # and several steps; half a tile holds a block
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        setattr(
            simulated_ranks, name, getattr(launch, name)
        )  # kernels, though tensors are the host's
    made = []
    for setting in SETTINGS[world_size, outliers]:
        config = CodecConfig(setting.format, setting.group_size, setting.scales, outliers=outliers)
        second = CodecConfig("int8", setting.group_size, "signed", outliers=outliers)
        xs = tensors_of(setting, world_size, outliers)
        made.append((config, simulated_ranks.collective_cases(xs, config, second)))
    return made


def calls_to_run(number: int, config, calls: list) -> list:
    """All collectives of a setting, fewer where tiles take long: those of outliers."""
    if not config.outliers:
        return calls
    return calls[:4] if number == 0 else calls[:2]


def run(rank: int, world_size: int, directory: str, made: list[tuple]) -> None:
    """Run every collective on this rank, over files that all ranks map, and compare.

    Args:
        rank: of this process.
        world_size: how many there are.
        directory: with a file of a channel's memory for each rank.
        made: of ``cases``.
    """
    import torch

    from taco_kernels.symmetric_memory.channel import Channel, channel_bytes

    memories = []
    for peer in range(world_size):
        with open(Path(directory) / str(peer), "r+b") as file:
            memories.append(mmap.mmap(file.fileno(), channel_bytes(world_size, PROGRAMS)))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    channel = Channel(addresses, rank, torch.device("cpu"), PROGRAMS, timeout=200.0)
    for number, (config, calls) in enumerate(made):
        for call, expected_of_ranks in calls_to_run(number, config, calls):
            result = call(rank, channel)
            expected = expected_of_ranks[rank]
            assert expected_of_ranks[0].isnan().any(), "a NaN stays visible"
            assert torch.equal(result.isnan(), expected.isnan()), (rank, config)
            assert torch.equal(result.nan_to_num(), expected.nan_to_num()), (rank, config)
    print("ok", flush=True)


def main(world_size: int, outliers: bool) -> None:
    """Start the ranks; exit with 1 if one fails."""
    from taco_kernels.symmetric_memory.channel import channel_bytes

    use_python_flags()
    made = cases(world_size, outliers)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world_size):
            memory = bytes(channel_bytes(world_size, PROGRAMS))
            (Path(directory) / str(rank)).write_bytes(memory)
        context = multiprocessing.get_context("fork")
        processes = []
        for rank in range(world_size):
            arguments = (rank, world_size, directory, made)
            processes.append(context.Process(target=run, args=arguments))
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(any(process.exitcode for process in processes))
