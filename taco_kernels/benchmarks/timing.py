"""Timing on the device: graph replays over rotating buffers, medians; and a copy, to compare with."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import triton

from taco_kernels.common.device import AS_IF

REPEATS = 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = {"MiB": "g", "dtype": "", "codec": "", "operation": "", "us": ".1f", "GB/s": ".0f"}
COLUMNS |= {"of copy": ".2f", "bits": ".3f", "error": ".4f"}
"""Of ``timed_rows``, with formats. The last two: bits a value on the wire, relative L2 error."""
Operation = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """What is timed."""

    codec: str
    operation: str
    call: Callable[[int], object]
    """On one of several buffer sets, by its number."""
    buffers: int
    moved: int
    """Bytes that a call reads and writes."""
    bits: float | None = None
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
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.02:
        graph.replay()
        torch.cuda.synchronize()
    return median(graph.replay) / len(calls)


def median(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of ``call`` on the device, each after ``before``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPEATS):
        before()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPEATS // 2]


def case(
    codec: str, operation: str, call: Operation, make: Callable[[], tuple], *figures: float
) -> Case:
    """``call(*make())``, which reads these tensors and writes its result; ``figures``: Case.bits, .error."""
    first = make()
    moved = sum(tensor.nbytes for tensor in (*first, call(*first)))
    sets = [first, *[make() for _ in range(buffers_for(moved) - 1)]]
    return Case(codec, operation, lambda i: call(*sets[i]), len(sets), moved, *figures)


def timed_rows(
    mib: float, name: str, cases: Callable[[int, torch.dtype], Iterable[Case]]
) -> Iterator[dict]:
    """Rows of a size: a copy of so many MiB, and each of ``cases(numel, dtype)``.

    The copy changes signs: the driver's own is slower at 1 GiB than kernels that read and write as much.
    """
    dtype, rate = DTYPES[name], 0.0
    numel = int(mib * 2**20) // dtype.itemsize
    copy = case("-", "copy", torch.neg, lambda: (torch.randn(numel, device="cuda").to(dtype),))
    for one in chain([copy], cases(numel, dtype)):
        us = microseconds([partial(one.call, i) for i in range(one.buffers)])
        speed = one.moved / us / 1e3
        rate = rate or speed
        row = {"MiB": mib, "dtype": name, "codec": one.codec, "operation": one.operation, "us": us}
        yield row | {"GB/s": speed, "of copy": speed / rate, "bits": one.bits, "error": one.error}


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
        cells = [
            "-" if row.get(key) is None else format(row[key], spec) for key, spec in columns.items()
        ]
        print("| " + " | ".join(cells) + " |")
