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

from taco_kernels.common import ceil_div
from taco_kernels.common.device import AS_IF

REPEATS = 20
"""Replays of which the median is taken."""
WARM_UP = 0.02
"""Seconds of replays before that, for full clocks."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = {
    "MiB": "g",
    "dtype": "",
    "codec": "",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "bits": ".3f",  # a value, on the wire
    "error": ".4f",  # relative L2
}
"""Columns of ``timed_rows``, with the formats of their cells."""
Operation = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """An operation to be timed."""

    codec: str
    operation: str
    call: Callable[[int], object]
    """Runs it on one of several buffer sets, given by its number."""
    buffers: int
    """Buffer sets."""
    moved: int
    """Bytes that a call reads and writes."""
    bits: float | None = None
    """Bits of a value on the wire."""
    error: float | None = None
    """Relative L2 error of a round trip."""


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error."""
    difference = result.float() - exact.float()
    return float(difference.norm() / exact.float().norm())


def buffers_for(bytes_each: int) -> int:
    """Buffer sets to rotate among, so that no call finds its data in the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, ceil_div(4 * cache, max(bytes_each, 1)))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call in microseconds.

    ``calls`` do the same work on different buffers. All of them are captured in one CUDA graph,
    which takes the host's launch time out.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the calls read may still be on its way
    with torch.cuda.stream(stream):
        calls[0]()  # compiles, which a capture must not
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # All results live at once: no call reuses the memory of another, which would be in the
        # cache.
        _results = [call() for call in calls]
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP:
        graph.replay()
        torch.cuda.synchronize()
    return median(graph.replay) / len(calls)


def median(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of ``call`` on the device, each after ``before``."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
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
    codec: str,
    operation: str,
    call: Operation,
    make: Callable[[], tuple],
    bits: float | None = None,
    error: float | None = None,
) -> Case:
    """``call(*make())`` as a Case, over as many buffer sets as the cache asks for.

    Args:
        codec: name for the table.
        operation: name for the table.
        call: reads its arguments, tensors, and returns a tensor.
        make: returns new arguments.
        bits: of a value on the wire.
        error: of a round trip.
    """
    sets = [make()]
    # Every tensor is read once, and the result written once; buffers_for needs to know how large
    # they are.
    moved = sum(tensor.nbytes for tensor in sets[0]) + call(*sets[0]).nbytes
    while len(sets) < buffers_for(moved):
        sets.append(make())
    return Case(codec, operation, lambda i: call(*sets[i]), len(sets), moved, bits, error)


def copy_case(numel: int, dtype: torch.dtype) -> Case:
    """A copy of a tensor, which the others are compared with.

    It changes signs: the driver's own copy is slower at 1 GiB than kernels that read and write as
    much.
    """
    return case("-", "copy", torch.neg, lambda: (torch.randn(numel, device="cuda").to(dtype),))


def timed_rows(
    mib: float, dtype_name: str, cases: Callable[[int, torch.dtype], Iterable[Case]]
) -> Iterator[dict]:
    """Time a copy and some cases, one row each.

    Args:
        mib: size of the tensor.
        dtype_name: key of DTYPES.
        cases: returns the cases for a number of values and a dtype.
    """
    dtype = DTYPES[dtype_name]
    numel = int(mib * 2**20) // dtype.itemsize
    copy_speed = None
    # One case after the other, since each holds its buffers.
    for timed in chain([copy_case(numel, dtype)], cases(numel, dtype)):
        us = microseconds([partial(timed.call, i) for i in range(timed.buffers)])
        speed = timed.moved / us / 1e3
        if copy_speed is None:
            copy_speed = speed
        yield {
            "MiB": mib,
            "dtype": dtype_name,
            "codec": timed.codec,
            "operation": timed.operation,
            "us": us,
            "GB/s": speed,
            "of copy": speed / copy_speed,
            "bits": timed.bits,
            "error": timed.error,
        }


def machine() -> str:
    """The device and the versions that a table was measured with."""
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if os.environ.get(AS_IF):
        facts["as if"] = os.environ[AS_IF]
    facts["triton"] = triton.__version__
    facts["python"] = platform.python_version()
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def report(rows: list[dict], columns: dict[str, str]) -> None:
    """Print ``rows``, if any, as a Markdown table; ``columns`` maps their keys to formats."""
    if not rows:
        return
    print(machine())
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = []
        for key, spec in columns.items():
            value = row.get(key)
            cells.append("-" if value is None else format(value, spec))
        print("| " + " | ".join(cells) + " |")
