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

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_collectives_have_the_bits_of_the_codec_kernels(world_size: int = 3) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__, str(world_size)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == ["ok"] * world_size


def use_python_flags() -> None:
    """Replace signals.py's functions, and let the interpreter loop over run-time bounds."""
    from triton.runtime import interpreter

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

    def wait(flags, target, error, timeout, COUNT, E) -> None:
        deadline = time.monotonic() + value(timeout) / 1e9
        for rank in range(value(COUNT)):
            address = value(flags) + rank * E.PROGRAMS.value * 8
            while ctypes.c_int64.from_address(address).value < value(target):
                assert time.monotonic() < deadline, f"waited for flag {rank} to be {value(target)}"
                time.sleep(0)

    for module in (all_reduce, reduce_scatter, all_gather):
        module.publish, module.wait = publish, wait
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def rank_main(rank: int, world_size: int, directory: str) -> None:
    """Run every collective on this rank and compare with the codec's own kernels on all ranks' tensors."""
    import torch

    from taco_kernels import CodecConfig, Stream
    from taco_kernels.symmetric_memory import collectives
    from taco_kernels.symmetric_memory.lane import lane_bytes, make_lanes
    from taco_kernels.triton import launch
    from tests.gpu import simulated_ranks as expected

    use_python_flags()
    for name, tuning in launch.TUNING.items():
        launch.TUNING[name] = tuning._replace(tile=1024)  # several tiles and steps even here
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        setattr(expected, name, getattr(launch, name))
    size = lane_bytes(world_size, world_size)
    memories = []
    for peer in range(world_size):
        with open(Path(directory) / str(peer), "r+b") as file:
            memories.append(mmap.mmap(file.fileno(), size))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    lane = make_lanes(addresses, rank, torch.device("cpu"), 1, world_size, timeout=200.0)[0]

    # several tiles a program with two ranks; with three so few that the programs share a tile number
    cases = (
        (CodecConfig("int6", 128, "dual", "nearest"), (6, 700), torch.float32),
        (CodecConfig("int8", 64, "single", "dither"), (6, 300), torch.float16),
        (CodecConfig("int4", 512, "dual", "stochastic"), (6, 170), torch.bfloat16),
    )
    for config, shape, dtype in cases[:1] if world_size == 2 else cases[1:]:
        random = None if config.rounding == "nearest" else Stream(7, 2**32 - 1, 0)
        generator = torch.Generator().manual_seed(0)
        xs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]
        x = xs[rank]

        def same(result, wanted, config=config) -> None:
            assert torch.equal(result, wanted), (rank, config, (result - wanted).abs().max())

        summed = expected.expected_all_reduce(xs, config, random)
        for algorithm in ("two-shot", "one-shot", "two-shot"):
            same(collectives.all_reduce(lane, x, config, random, algorithm), summed)
        other = CodecConfig("int8", config.group_size, "single", config.rounding)
        summed = expected.expected_all_reduce(xs, config, random, other)
        for algorithm in ("one-shot", "two-shot"):
            same(collectives.all_reduce(lane, x, config, random, algorithm, config_out=other), summed)
        gathered = expected.expected_all_gather(xs, config, random)
        same(collectives.all_gather(lane, x, config, random), gathered)
        wire = expected.encoded_slice(x, rank, config, random)
        same(collectives.all_gather_encoded(lane, wire, shape, dtype, config, random), gathered)
        scattered = expected.expected_reduce_scatter(xs, config, random)
        same(collectives.reduce_scatter(lane, x, config, random), scattered[rank])
    print("ok", flush=True)


def main(world_size: int) -> None:
    """Start the ranks; exit with 1 if one fails."""
    from taco_kernels.symmetric_memory.lane import lane_bytes

    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world_size):
            (Path(directory) / str(rank)).write_bytes(bytes(lane_bytes(world_size, world_size)))
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=rank_main, args=(rank, world_size, directory))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
