"""Timing on the device: graph replays over rotating buffers, medians; and a copy, to compare with."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from taco_kernels.common.device import AS_IF

TILE, REPEATS = 4096, 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = {"MiB": "g", "dtype": "", "codec": "", "operation": "", "us": ".1f", "GB/s": ".0f"}
COLUMNS |= {"of copy": ".2f", "bits": ".3f", "error": ".4f"}
"""Of ``timed_rows``, with formats. The last two: bits a value on the wire, relative L2 error."""


class Case(NamedTuple):
    """What is timed."""

    codec: str
    operation: str
    call: Callable[[int], object]
    """On one of several buffer sets, by its number."""
    buffers: int
    moved: int
    """Bytes that a call reads and writes."""
    bits: float
    error: float | None = None


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((result.float() - exact.float()).norm() / exact.float().norm())


def buffers_for(bytes_each: int) -> int:
    """Buffer sets to rotate among, so that no call finds its data in the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, -(-4 * cache // max(bytes_each, 1)))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call in microseconds.

    ``calls`` do the same work on different buffers. All of them are captured in one CUDA graph, which takes
    the host's launch time out; the median is over ``REPEATS`` replays, after 20 ms of them for full clocks.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the calls read may still be on its way
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _results = [call() for call in calls]  # all at once: none reuses the memory of another
    begin, times = time.perf_counter(), []
    while time.perf_counter() - begin < 0.02:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[REPEATS // 2]


@triton.jit
def copy_kernel(source, target, count, T: tl.constexpr):
    """target = source, T elements a program."""
    place = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


def copy_rate(numel: int, dtype: torch.dtype) -> tuple[float, float]:
    """Microseconds and GB/s (bytes read and written) of the faster of torch's copy and a kernel's.

    Of 1 GiB the driver's is slower than kernels that read and write as much.
    """
    pairs = [
        (torch.randn(numel, device="cuda").to(dtype), torch.empty(numel, device="cuda", dtype=dtype))
        for _ in range(buffers_for(2 * numel * dtype.itemsize))
    ]
    grid = (triton.cdiv(numel, TILE),)
    us = min(
        microseconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs]),
        microseconds([lambda a=a, b=b: copy_kernel[grid](a, b, numel, T=TILE) for a, b in pairs]),
    )
    return us, 2 * numel * dtype.itemsize / us / 1e3


def timed_rows(mib: float, name: str, cases: Callable[[int, torch.dtype], Iterable[Case]]) -> Iterator[dict]:
    """Rows of a size: a copy of so many MiB, and each of ``cases(numel, dtype)``."""
    dtype = DTYPES[name]
    numel = int(mib * 2**20) // dtype.itemsize
    base = {"MiB": mib, "dtype": name}
    us, rate = copy_rate(numel, dtype)
    yield base | {"operation": "copy", "us": us, "GB/s": rate, "of copy": 1.0}
    for case in cases(numel, dtype):
        us = microseconds([partial(case.call, i) for i in range(case.buffers)])
        speed = case.moved / us / 1e3
        row = base | {"codec": case.codec, "operation": case.operation, "us": us, "GB/s": speed}
        row |= {"of copy": speed / rate, "bits": case.bits}
        yield row | ({} if case.error is None else {"error": case.error})


def report(rows: list[dict], columns: dict[str, str]) -> None:
    """Print ``rows``, if any, as a Markdown table (``columns``: key to format)."""
    if not rows:
        return
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    machine |= {"as if": os.environ[AS_IF]} if os.environ.get(AS_IF) else {}
    machine |= {"triton": triton.__version__, "python": platform.python_version()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cells = [format(row[key], spec) if key in row else "-" for key, spec in columns.items()]
        print("| " + " | ".join(cells) + " |")
