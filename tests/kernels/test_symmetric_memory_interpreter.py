"""The symmetric-memory kernels under Triton's CPU interpreter, a process a rank, over shared host memory.

Flags are inline PTX, which the interpreter does not know: here they are Python on the same addresses. The
rest, slots, steps, credits and arithmetic, is what runs on a GPU. A program waits for the program of the same
number on the other ranks only, so the interpreter may run them one after the other.

TRITON_INTERPRET must be set before triton is imported: the test runs this file as a program of its own.
"""

import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytestmark = pytest.mark.slow

if TYPE_CHECKING:  # triton reads TRITON_INTERPRET as it is imported
    from types import ModuleType

    from torch import Tensor

    from taco_kernels.symmetric_memory.lane import Lane
    from taco_kernels.taco import CodecConfig

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(world_size: int, what: str) -> None:
    """Run this file; its failure is the test's."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__, str(world_size), what]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok") == world_size  # lines of several processes may mix


def test_collectives_have_the_bits_of_the_codec_kernels() -> None:
    run_ranks(3, "collectives")


def test_many_steps_have_the_bits_of_the_codec_kernels() -> None:
    """Over so many steps that every slot is used again, twice."""
    run_ranks(2, "steps")


def use_python_flags() -> None:
    """Replace signals.py's functions."""

    from taco_kernels.symmetric_memory import all_gather, all_reduce, reduce_scatter, ring

    def value(x) -> int:
        return int(x.handle.data.item()) if hasattr(x, "handle") else int(getattr(x, "value", x))

    def flag(address: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(address)

    def publish(table, program, rank, sent, read, E) -> None:
        bases = (ctypes.c_uint64 * E.W.value).from_address(value(table))
        for base in bases:
            flag(base + value(ring.data_flag(program, rank, E))).value = value(sent)
            flag(base + value(ring.ack_flag(program, rank, E))).value = value(read)

    def wait(flags, target, error, timeout, first, COUNT, E) -> None:
        deadline = time.monotonic() + value(timeout) / 1e9
        for rank in range(value(COUNT)):
            address = value(flags) + rank * E.PROGRAMS.value * 8
            while ctypes.c_int64.from_address(address).value < value(target):
                late = value(first) + rank
                assert time.monotonic() < deadline, f"waited for rank {late}'s flag to be {value(target)}"
                time.sleep(0)

    for module in (all_reduce, reduce_scatter, all_gather):
        module.publish, module.wait = publish, wait


class Case(NamedTuple):
    """Tensors of all ranks, and what the codec's own kernels make of them."""

    config: "CodecConfig"
    other: "CodecConfig"
    """Of an all-reduce's second hop, for `summed_other`."""
    xs: "list[Tensor]"
    summed: "Tensor"
    summed_other: "Tensor"
    gathered: "Tensor"
    scattered: "list[Tensor]"
    wires: "list[Tensor]"
    """Each rank's slice, encoded."""


def use_small_tiles() -> "ModuleType":
    """Several tiles and steps even here; the module that has the expected results."""
    from taco_kernels.taco import launch
    from taco_kernels.taco.tuning import TUNING
    from tests.gpu import simulated_ranks as expected

    for name, tuning in TUNING.items():
        TUNING[name] = tuning._replace(tile=1024)
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        setattr(expected, name, getattr(launch, name))
    return expected


def make_cases(world_size: int) -> list[Case]:
    """What the ranks, which are forked afterwards, send and expect."""
    import torch

    from taco_kernels.taco import CodecConfig

    expected = use_small_tiles()
    cases = []
    # several tiles a program with two ranks; with three so few that the programs share a tile number
    settings = (
        (CodecConfig("int6", 128, "dual"), (6, 700), torch.float32),
        (CodecConfig("int8", 64, "single"), (6, 300), torch.float16),
        (CodecConfig("int4", 256, "dual"), (6, 170), torch.bfloat16),
    )
    for config, shape, dtype in settings[:1] if world_size == 2 else settings[1:]:
        generator = torch.Generator().manual_seed(0)
        xs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]
        summed = expected.expected_all_reduce(xs, config)
        other = CodecConfig("int8", config.group_size, "signed")
        summed_other = expected.expected_all_reduce(xs, config, other)
        gathered = expected.expected_all_gather(xs, config)
        scattered = expected.expected_reduce_scatter(xs, config)
        wires = [expected.encode(x, config) for x in xs]
        cases.append(Case(config, other, xs, summed, summed_other, gathered, scattered, wires))
    return cases


def make_sums(world_size: int) -> "tuple[CodecConfig, list[Tensor], Tensor]":
    """What the ranks sum, five steps of each program's, and their sum."""
    import torch

    from taco_kernels.taco import CodecConfig

    expected, config = use_small_tiles(), CodecConfig("int8", 128, "dual")
    generator = torch.Generator().manual_seed(0)
    numel = 5 * 1024 * world_size**2 - 100
    xs = [torch.randn(numel, generator=generator).bfloat16() for _ in range(world_size)]
    return config, xs, expected.expected_all_reduce(xs, config)


def make_lane(rank: int, world_size: int, directory: str) -> "Lane":
    """The rank's end of a lane over files that all ranks map."""
    import torch

    from taco_kernels.symmetric_memory.lane import lane_bytes
    from taco_kernels.symmetric_memory.lane import make_lane as make_end

    size = lane_bytes(world_size, world_size)
    memories = []
    for peer in range(world_size):
        with open(Path(directory) / str(peer), "r+b") as file:
            memories.append(mmap.mmap(file.fileno(), size))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    lane = make_end(addresses, rank, torch.device("cpu"), world_size, timeout=200.0)
    lane.__dict__["memory_owner"] = memories  # keep them mapped
    return lane


def run_steps(rank: int, world_size: int, directory: str, sums: tuple) -> None:
    """Two calls of many steps, compared with what is expected."""
    import torch

    from taco_kernels.symmetric_memory import collectives

    lane, (config, xs, summed) = make_lane(rank, world_size, directory), sums
    for call in range(2):
        result = collectives.all_reduce(lane, xs[rank], config)
        assert torch.equal(result, summed), (rank, call)
    print("ok", flush=True)


def run_collectives(rank: int, world_size: int, directory: str, cases: list[Case]) -> None:
    """Run every collective on this rank and compare with what is expected of it."""
    import torch

    from taco_kernels.symmetric_memory import collectives

    lane = make_lane(rank, world_size, directory)
    for config, other, xs, summed, summed_other, gathered, scattered, wires in cases:
        x = xs[rank]

        def same(result, wanted, config=config) -> None:
            assert torch.equal(result, wanted), (rank, config, (result - wanted).abs().max())

        same(collectives.all_reduce(lane, x, config), summed)
        for _ in range(2):  # slots that were used before
            same(collectives.all_reduce(lane, x, config, config_out=other), summed_other)
        encoded = collectives.all_gather_encoded(lane, wires[rank], x.shape, x.dtype, config)
        same(encoded, gathered)
        same(collectives.reduce_scatter(lane, x, config), scattered[rank])
    print("ok", flush=True)


def main(world_size: int, what: str) -> None:
    """Start the ranks; exit with 1 if one fails."""
    from taco_kernels.symmetric_memory.lane import lane_bytes
    from tests.kernels.interpreter import speed_up

    use_python_flags()
    speed_up()
    run, make = {"collectives": (run_collectives, make_cases), "steps": (run_steps, make_sums)}[what]
    expected = make(world_size)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world_size):
            (Path(directory) / str(rank)).write_bytes(bytes(lane_bytes(world_size, world_size)))
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=run, args=(rank, world_size, directory, expected))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
