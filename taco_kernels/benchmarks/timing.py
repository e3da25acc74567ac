"""Timing on the device: graph replays over rotating buffers, medians."""

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def buffers_for(bytes_each: int) -> int:
    """Buffer sets to rotate among, so that no call finds its data in the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, -(-4 * cache // max(bytes_each, 1)))


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of one call in microseconds.

    ``calls`` do the same work on different buffers. All of them are captured in one CUDA graph, which takes
    the host's launch time out; the median is over ``repeats`` replays, after 20 ms of them for full clocks.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the calls read may still be on its way
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, times = time.perf_counter(), []
    while time.perf_counter() - begin < 0.02:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[repeats // 2]


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def report(rows: list[dict], columns: dict[str, str], path: Path | None) -> None:
    """Print ``rows`` as a Markdown table (``columns``: key to format spec); write JSON to ``path``."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(format(row[key], spec) for key, spec in columns.items()) + " |")
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
