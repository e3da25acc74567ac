"""Every kernel compiled ahead of time, as its launch would have it on GPUs that are not here.

    python -m tests.kernels.architectures --advised --jobs 8    # the table of docs/results/architectures.md
    python -m tests.kernels.architectures --arch 86 --jobs 8 --minutes 60      # go on where --results ends
    python -m tests.kernels.architectures --only "encode .* 256" --minutes 0   # the table of what is there

7,900 kernels an architecture, 1,400 of them advised, a second or some each: they are drawn, so that whatever
has been compiled is a sample of all. ``ptxas`` comes with Triton. What is counted: bytes of shared memory a
program, registers a thread, loads and stores of spilled registers (LDL, STL), all and those between a
backward branch and its target. The exit status is 1 if a kernel does not compile or does not fit.
"""

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from taco_kernels.common import device as devices
from taco_kernels.common import fast_launch
from taco_kernels.common.device import Device
from taco_kernels.symmetric_memory import collectives
from taco_kernels.taco import launch as taco
from tests.kernels.every_setting import LAUNCHERS, Setting, every_setting
from tests.kernels.recorded_launches import recorded_launches

KIB = 1024


class Architecture(NamedTuple):
    """What a multiprocessor has (CUDA programming guide, table of compute capabilities)."""

    gpus: str
    shared: int
    """Bytes of shared memory; a program takes 1 KiB more than it asks for, and may ask for all but 1 KiB."""
    warps: int
    programs: int
    """And at most so many programs; 64 K registers, each of them."""


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
    architecture: int
    registers: int
    shared: int
    warps: int
    spilled: int
    """Loads and stores of spilled registers."""
    looped: int
    """Of those, in loops."""

    @property
    def programs(self) -> int:
        """That fit on a multiprocessor at once; 0: the launch fails."""
        limits = ARCHITECTURES[self.architecture]
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min(
            limits.programs,
            64 * KIB // registers,
            limits.shared // (self.shared + KIB),
            limits.warps // self.warps,
        )


def device_of(architecture: int) -> Device:
    """132 multiprocessors of it."""
    return Device(132, divmod(architecture, 10), False)


def _forget() -> None:
    """Launches that were prepared for another device."""
    fast_launch._launches.clear()
    plans = taco._plan_encode, taco._plan_decode, taco._plan_decode_sum_encode
    for cached in (*plans, collectives._constants):
        cached.cache_clear()


@contextmanager
def pretended(architecture: int) -> Iterator[list]:
    """CPU tensors are a GPU's; what would be compiled for it, (source, options) each."""
    device = device_of(architecture)
    kernels = {f for module in LAUNCHERS for f in vars(module).values() if isinstance(f, JITFunction)}
    with ExitStack() as stack:
        for module in (devices, taco, collectives):
            stack.enter_context(mock.patch.object(module, "device_number", lambda index: device))
        _forget()
        stack.callback(_forget)
        _, driver = stack.enter_context(recorded_launches(*kernels, architecture=architecture))
        yield driver.compiled


def _tool(cubin: Path, option: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spills(sass: str) -> tuple[int, int]:
    """Spilled registers' loads and stores, and how many of them lie in loops."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    loops = []
    for at, text in lines:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < at:
            loops.append((int(branch[1], 16), at))
    found = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return len(found), sum(any(begin <= at <= end for begin, end in loops) for at in found)


def usage_of(source, options: dict, architecture: int) -> Usage:
    """Compile, or take from Triton's cache, and look at the result."""
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool(cubin, "-res-usage")
        registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
        spilled, looped = spills(_tool(cubin, "-sass")) if stack else (0, 0)
    meta = compiled.metadata
    return Usage(source.fn.__name__, architecture, registers, meta.shared, meta.num_warps, spilled, looped)


def usages(setting: Setting, architecture: int, kernel: str = "") -> list[Usage]:
    """Of every kernel that a setting launches (or those of the name ``kernel``), each once."""
    with pretended(architecture) as compiled:
        setting.call()
    return [usage_of(*found, architecture) for found in compiled if kernel in found[0].fn.__name__]


class Kernel(NamedTuple):
    """What is to be compiled."""

    key: str
    """Of all that the compiler is given."""
    family: str
    setting: str
    """The first that launches it."""
    architecture: int
    source: object
    options: dict

    @property
    def row(self) -> tuple[int, str]:
        """Of the table."""
        return self.architecture, f"{self.family} {self.source.fn.__name__.removesuffix('_kernel')}"


def kernels_of(settings: Iterable[Setting], architecture: int) -> list[Kernel]:
    """What ``settings`` launch, in an order whose beginnings hold of each kernel the root of its number."""
    rows: dict[tuple, list[Kernel]] = defaultdict(list)
    with pretended(architecture) as compiled:
        for setting in settings:
            before = len(compiled)
            setting.call()
            for source, options in compiled[before:]:
                told = sorted(
                    (name, value) for name, value in options.items() if name != "extern_libs"
                )  # paths
                text = f"{architecture} {source.hash()} {told}"
                key = hashlib.sha256(text.encode()).hexdigest()[:16]
                kernel = Kernel(key, setting.family, setting.name, architecture, source, options)
                rows[kernel.row].append(kernel)
    order = random.Random(architecture)
    places = [
        ((place + order.random()) / math.sqrt(len(row)), kernel)
        for row in rows.values()
        for place, kernel in enumerate(order.sample(row, len(row)))
    ]
    return [kernel for _, kernel in sorted(places, key=lambda found: found[0])]


_kernels: list[Kernel] = []
"""What the processes of ``compile_all`` find when they are forked: sources cannot be sent."""


def line_of(place: int) -> dict:
    """The results' line of a kernel of ``_kernels``; ``error`` where the compiler gave up."""
    kernel = _kernels[place]
    line = {"key": kernel.key, "family": kernel.family, "setting": kernel.setting}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # a kernel's intermediate files are megabytes
        try:
            return line | usage_of(kernel.source, kernel.options, kernel.architecture)._asdict()
        except Exception as error:
            return line | {"architecture": kernel.architecture, "error": f"{type(error).__name__}: {error}"}


def compile_all(kernels: list[Kernel], path: Path, jobs: int, minutes: float) -> None:
    """Add a line to ``path`` for each of ``kernels``, until the time is over."""
    _kernels[:] = kernels
    end, began, running = time.monotonic() + 60 * minutes, 0, []
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=50) as pool, path.open("a") as file:
        while True:
            while began < len(kernels) and len(running) < 2 * jobs and time.monotonic() < end:
                running.append(pool.apply_async(line_of, (began,)))
                began += 1
            if not running:
                return
            line = running.pop(0).get()
            print(json.dumps(line), file=file, flush=True)
            if "error" in line or line["looped"] or not usage_in(line).programs:
                print(line, flush=True)


def usage_in(line: dict) -> Usage:
    """The usage in a line of the results."""
    return Usage(**{name: line[name] for name in Usage._fields})


def table(kernels: list[Kernel], lines: dict[str, dict]) -> Iterator[str]:
    """Markdown, by kernels and architecture: how many were compiled (of how many, where some are missing),
    how many of them spill in a loop (the most accesses there), least programs a multiprocessor.
    """
    columns = sorted({kernel.architecture for kernel in kernels})
    yield "| kernels |" + "".join(f" sm_{architecture} |" for architecture in columns)
    yield "|---" * (1 + len(columns)) + "|"
    cells: dict[str, dict[int, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for kernel in kernels:
        name = kernel.row[1] if kernel.family == "taco" else kernel.family
        cells[name][kernel.architecture].append(kernel)
    for name, row in sorted(cells.items()):
        yield f"| {name} |" + "".join(f" {cell(row[architecture], lines)} |" for architecture in columns)


def cell(kernels: list[Kernel], lines: dict[str, dict]) -> str:
    """Of the table."""
    found = [lines[kernel.key] for kernel in kernels if kernel.key in lines]
    usages = [usage_in(line) for line in found if "error" not in line]
    of = f" of {len(kernels)}" * (len(found) < len(kernels))
    looped = [usage.looped for usage in usages if usage.looped]
    least = min((usage.programs for usage in usages), default="-")
    return f"{len(found)}{of}, {len(looped)} ({max(looped, default=0)}), {least}"


def failures(kernels: list[Kernel], lines: dict[str, dict]) -> list[str]:
    """What does not compile or does not fit."""
    found = [lines[kernel.key] for kernel in kernels if kernel.key in lines]
    return [json.dumps(line) for line in found if "error" in line or not usage_in(line).programs]


def main() -> int:
    """Compile what is not in the results yet, print the table, and last what does not compile or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", default="80,86,89,90,100,120")
    parser.add_argument("--only", default="", help="settings whose name has this regular expression")
    parser.add_argument("--advised", action="store_true", help="settings that the pages advise alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="compile so long at most")
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"), help="what is there")
    options = parser.parse_args()
    settings = [s for s in every_setting() if re.search(options.only, f"{s.family} {s.name}")]
    settings = [setting for setting in settings if setting.advised or not options.advised]
    architectures = [int(text) for text in options.arch.split(",")]
    found = [kernels_of(settings, architecture) for architecture in architectures]
    kernels = [kernel for turn in itertools.zip_longest(*found) for kernel in turn if kernel is not None]
    options.results.touch()
    lines = {line["key"]: line for line in map(json.loads, options.results.read_text().splitlines())}
    missing = [kernel for kernel in kernels if kernel.key not in lines]
    if missing and options.minutes:
        compile_all(missing, options.results, options.jobs, options.minutes)
        lines = {line["key"]: line for line in map(json.loads, options.results.read_text().splitlines())}
    failed = failures(kernels, lines)
    print(*table(kernels, lines), *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
