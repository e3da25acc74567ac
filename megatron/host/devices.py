"""Stand-ins for `torch.cuda`: the CPU as the one device, with no streams and nothing to synchronise."""

import contextlib
import os
import resource
import time
from collections import defaultdict
from types import SimpleNamespace

import psutil
import torch

from megatron.compression.patches import put

CPU = torch.device("cpu")


def _nothing(self, *args) -> None:
    """Work is in program order: there is nothing to wait for."""


class _Stream:
    """For torch.cuda.Stream: CPU work is in program order, so every wait is already satisfied."""

    device = CPU
    wait_stream = wait_event = synchronize = __exit__ = _nothing

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def record_event(self, event=None):
        """Returns the event given, or a new one."""
        return event if event is not None else _Event()

    def query(self) -> bool:
        """Always done."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, equal here."""
        return 0, 0


class _Event:
    """For torch.cuda.Event: records the host clock, so `elapsed_time` stays meaningful (milliseconds)."""

    wait = synchronize = _nothing
    query = _Stream.query
    _time = 0.0

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        """Remember the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds between two records."""
        return (end._time - self._time) * 1e3


_STREAM = _Stream()


def _resident() -> int:
    """Resident memory of this process in bytes, for torch.cuda.memory_allocated / memory_reserved."""
    return psutil.Process().memory_info().rss


def _peak() -> int:
    """Peak resident memory in bytes, for torch.cuda.max_memory_allocated / max_memory_reserved."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats() -> dict[str, int]:
    """For torch.cuda.memory_stats, read by --log-memory-to-tensorboard; unknown keys count 0."""
    current = dict.fromkeys(("reserved_bytes.all.current", "allocated_bytes.all.current"), _resident())
    return defaultdict(int, current, **{"allocated_bytes.all.peak": _peak()})


def _free_and_total() -> tuple[int, int]:
    """For torch.cuda.mem_get_info, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _properties() -> SimpleNamespace:
    """For torch.cuda.get_device_properties: compute capability 0.0, below every kernel's requirement."""
    memory = psutil.virtual_memory().total
    return SimpleNamespace(name="cpu", major=0, minor=0, total_memory=memory, multi_processor_count=1)


def _returning(value=None):
    """A new function that returns `value`: torch._dynamo refuses one object under two names."""

    def stand_in(*_args, **_kwargs):
        return value

    return stand_in


def _calling(function):
    """A new function that calls `function`, for the same reason."""

    def stand_in(*_args, **_kwargs):
        return function()

    return stand_in


def install() -> None:
    """Replace what Megatron asks of `torch.cuda`. `torch.cuda.is_available()` keeps saying False."""
    # TP and context parallelism insist on this variable below compute capability 10; no queues here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda = torch.cuda
    why = "buffers are made on current_device(); device_count() == 0 would skip initialize_model_parallel"
    put(cuda, "current_device", _returning(CPU), why)
    put(cuda, "device_count", _returning(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), why)
    put(cuda, "get_device_properties", _calling(_properties), why)
    put(cuda, "get_device_capability", _returning((0, 0)), why)
    put(cuda, "get_device_name", _returning("cpu"), why)
    why = "the memory report after the first iteration, and TensorBoard's memory scalars"
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        put(cuda, name, _calling(_resident), why)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        put(cuda, name, _calling(_peak), why)
    put(cuda, "memory_stats", _calling(_memory_stats), why)
    put(cuda, "mem_get_info", _calling(_free_and_total), why)
    why = "timers, checkpointing and pipeline communication synchronise the device and empty its cache"
    for name in ("empty_cache", "reset_peak_memory_stats", "set_device", "set_stream", "synchronize"):
        put(cuda, name, _returning(), why)
    why = "DDP initialisation and the overlap of communication use streams and events"
    put(cuda, "Stream", _Stream, why)
    put(cuda, "Event", _Event, why)
    put(cuda, "current_stream", _returning(_STREAM), why)
    put(cuda, "default_stream", _returning(_STREAM), why)
    put(cuda, "stream", _calling(contextlib.nullcontext), why)
    for name in ("range_push", "range_pop"):
        put(cuda.nvtx, name, _returning(), "--nvtx-ranges")
