"""Kernels compiled ahead of time, as their launches would have them on GPUs that are not here.

``ptxas`` comes with Triton. What is counted: bytes of shared memory a program, registers a thread, loads and
stores of spilled registers (LDL, STL), all and those between a backward branch and its target.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from taco_kernels.common import aligned, fast_launch
from taco_kernels.common import device as devices
from taco_kernels.common.device import Device
from taco_kernels.symmetric_memory import collectives
from taco_kernels.taco import launch as taco
from tests.kernels.recorded_launches import recorded_launches
from tests.kernels.settings import LAUNCHERS, SETTINGS

KIB = 1024


class Architecture(NamedTuple):
    """What a multiprocessor has (CUDA programming guide, table of compute capabilities), and 64 K registers."""

    gpus: str
    """GPUs that have it."""
    shared: int
    """Bytes of shared memory; a program takes 1 KiB more than it asks for, and may ask for all but 1 KiB."""
    warps: int
    """Most warps at once."""
    programs: int
    """Most programs at once."""


ARCHITECTURES = {
    80: Architecture("A100, A30", 164 * KIB, 64, 32),
    86: Architecture("A6000, A40, RTX 3090", 100 * KIB, 48, 16),
    89: Architecture("L40S, RTX 4090", 100 * KIB, 48, 24),
    90: Architecture("H100, H200", 228 * KIB, 64, 32),
    100: Architecture("B200", 228 * KIB, 64, 32),
    120: Architecture("RTX PRO 6000, RTX 5090", 100 * KIB, 48, 24),
}


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    kernel: str
    """Its name."""
    architecture: int
    """90 for sm_90."""
    registers: int
    """Registers a thread."""
    shared: int
    """Bytes of shared memory a program."""
    warps: int
    """Warps a program."""
    spilled: int
    """Loads and stores of spilled registers."""
    looped: int
    """Of those, in loops."""

    @property
    def programs(self) -> int:
        """Programs that fit on a multiprocessor at once; 0: the launch fails."""
        limits = ARCHITECTURES[self.architecture]
        # Registers are given to a warp of 32 threads in eights a thread.
        registers = aligned(self.registers, 8) * 32 * self.warps
        memory = limits.shared // (self.shared + KIB)
        return min(limits.programs, 64 * KIB // registers, memory, limits.warps // self.warps)


def device_of(architecture: int) -> Device:
    """Return a device of 132 multiprocessors of an architecture, 90 for sm_90."""
    return Device(132, divmod(architecture, 10), interpret=False)


def _forget() -> None:
    """Drop launches that were prepared for another device."""
    fast_launch._launches.clear()
    for cached in (taco._plan, taco._plan_decode_sum_encode, collectives._constants):
        cached.cache_clear()


@contextmanager
def pretended(architecture: int) -> Iterator[list]:
    """Take CPU tensors for a GPU's; give the list of what would be compiled for it, (source, options) each."""
    device = device_of(architecture)
    kernels = {
        f for module in LAUNCHERS for f in vars(module).values() if isinstance(f, JITFunction)
    }
    with ExitStack() as stack:
        for module in (devices, taco, collectives):
            stack.enter_context(mock.patch.object(module, "device_number", lambda index: device))
        _forget()
        stack.callback(_forget)
        _, driver = stack.enter_context(recorded_launches(*kernels, architecture=architecture))
        yield driver.compiled


def _cuobjdump(cubin: Path, option: str) -> str:
    """Return what the tool prints of compiled code."""
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spills(sass: str) -> tuple[int, int]:
    """Return how many loads and stores of spilled registers there are, and how many of them lie in loops.

    ``sass`` is machine code as text. A loop is what lies between a backward branch and its target.
    """
    lines = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)
    ]
    loops = []
    for at, text in lines:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < at:
            loops.append((int(branch[1], 16), at))
    spilled = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    looped = [at for at in spilled if any(begin <= at <= end for begin, end in loops)]
    return len(spilled), len(looped)


def usage_of(source, options: dict, architecture: int) -> Usage:
    """Compile a kernel, or take it from Triton's cache, and return what it takes.

    Args:
        source: as ``pretended`` gives it.
        options: of the compiler.
        architecture: 90 for sm_90.
    """
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump(cubin, "-res-usage")
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        stack = int(re.search(r"STACK:(\d+)", usage)[1])
        spilled = looped = 0
        if stack:
            spilled, looped = spills(_cuobjdump(cubin, "-sass"))
    meta = compiled.metadata
    return Usage(
        source.fn.__name__, architecture, registers, meta.shared, meta.num_warps, spilled, looped
    )


def usages(setting: str, architecture: int, kernel: str = "") -> list[Usage]:
    """Return what the kernels take that one of SETTINGS launches, each once.

    Args:
        setting: its name.
        architecture: 90 for sm_90.
        kernel: part of the names of the kernels that are wanted; by default all.
    """
    with pretended(architecture) as compiled:
        SETTINGS[setting]()
    return [
        usage_of(source, options, architecture)
        for source, options in compiled
        if kernel in source.fn.__name__
    ]
