"""Stand-ins for CUDA in torch: devices, streams, memory, tensor factories, random state, gloo's
groups.

The tensor factories are wrapped one by one. A TorchFunctionMode would reach the same call sites
with one class, but it intercepts every other operation as well: an iteration of a tiny model takes
a quarter longer.
"""

import contextlib
import functools
import os
import resource
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import torch
from torch import library
from torch.distributed import ProcessGroupGloo
from torch.utils._device import _device_constructors

from megatron.compression.errors import InputError
from megatron.compression.patches.symbols import around, put, replace

CPU = torch.device("cpu")
_ATEN = library.Library("aten", "IMPL")


def _nothing(self, *args, **kwargs) -> None:
    """Work is in program order: there is nothing to wait for, and nothing to set up."""


class _Stream:
    """For torch.cuda.Stream: CPU work is in program order, so every wait is already satisfied."""

    device = CPU
    __init__ = wait_stream = wait_event = synchronize = __exit__ = _nothing

    def __enter__(self):
        return self

    def record_event(self, event=None):
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """For torch.cuda.Event: records the host clock, so `elapsed_time` stays meaningful
    (milliseconds)."""

    __init__ = wait = synchronize = _nothing
    query = _Stream.query
    _time = 0.0

    def record(self, stream=None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time - self._time) * 1e3


_STREAM = _Stream()


def _resident() -> int:
    """Resident memory of this process in bytes, for torch.cuda.memory_allocated /
    memory_reserved."""
    return psutil.Process().memory_info().rss


def _peak() -> int:
    """Peak resident memory in bytes, for torch.cuda.max_memory_allocated / max_memory_reserved."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats() -> dict[str, int]:
    """Stand in for torch.cuda.memory_stats, read by --log-memory-to-tensorboard; unknown keys count
    0."""
    current = dict.fromkeys(
        ("reserved_bytes.all.current", "allocated_bytes.all.current"), _resident()
    )
    return defaultdict(int, current, **{"allocated_bytes.all.peak": _peak()})


def _properties() -> SimpleNamespace:
    """Stand in for torch.cuda.get_device_properties: compute capability 0.0, below every kernel's
    requirement."""
    memory = psutil.virtual_memory().total
    return SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=memory, multi_processor_count=1
    )


def _calling(function):
    """Return a new function that calls `function`: torch._dynamo refuses one object under two
    names."""

    def stand_in(*_args, **_kwargs):
        return function()

    return stand_in


def _nothing_to_do() -> None:
    """Stand in for functions of torch.cuda that wait for the device, or change it."""


def _memory_info() -> tuple[int, int]:
    """Stand in for torch.cuda.mem_get_info: free and total memory of this machine, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _put_functions(functions: dict[str, Callable], reason: str) -> None:
    """Put functions into torch.cuda by name, each as a function of its own."""
    for name, function in functions.items():
        put(torch.cuda, name, _calling(function), reason)


def install_devices() -> None:
    """Replace what Megatron asks of `torch.cuda`. `torch.cuda.is_available()` keeps saying False.

    Raises:
        InputError: --use-megatron-fsdp, which does not run without GPUs.
    """
    if "--use-megatron-fsdp" in sys.argv:
        raise InputError("--use-megatron-fsdp does not run without GPUs; use --use-torch-fsdp2")
    # TP and context parallelism insist on 1 below compute capability 10, FSDP2 on more; no queues
    # here.
    connections = "8" if "--use-torch-fsdp2" in sys.argv else "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    # One a rank of this node, as on a machine with a GPU for each.
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _put_functions(
        {
            "current_device": lambda: CPU,
            "device_count": lambda: devices,
            "get_device_properties": _properties,
            "get_device_capability": lambda: (0, 0),
            "get_device_name": lambda: "cpu",
        },
        "buffers are made on current_device(); device_count() == 0 would skip "
        "initialize_model_parallel",
    )
    _put_functions(
        {
            "memory_allocated": _resident,
            "memory_reserved": _resident,
            "device_memory_used": _resident,
            "max_memory_allocated": _peak,
            "max_memory_reserved": _peak,
            "memory_stats": _memory_stats,
            "mem_get_info": _memory_info,
        },
        "the memory report after the first iteration, and TensorBoard's memory scalars",
    )
    _put_functions(
        {
            "empty_cache": _nothing_to_do,
            "reset_peak_memory_stats": _nothing_to_do,
            "set_device": _nothing_to_do,
            "set_stream": _nothing_to_do,
            "synchronize": _nothing_to_do,
        },
        "timers, checkpointing and pipeline communication synchronise the device and empty its "
        "cache",
    )
    overlap = "DDP initialisation and the overlap of communication use streams and events"
    _put_functions(
        {
            "current_stream": lambda: _STREAM,
            "default_stream": lambda: _STREAM,
            "stream": contextlib.nullcontext,
        },
        overlap,
    )
    put(torch.cuda, "Stream", _Stream, overlap)
    put(torch.cuda, "Event", _Event, overlap)
    for name in ("range_push", "range_pop"):
        put(torch.cuda.nvtx, name, _calling(_nothing_to_do), "--nvtx-ranges")


FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
"""What megatron.core and megatron.training call with device="cuda", or with a torch.device of
it."""


def _is_cuda(device) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _on_cpu(factory):
    """Wrap a tensor factory: device "cuda" means the CPU, pinned memory means ordinary memory."""

    def wrapper(*args, **kwargs):
        # Most calls name no device: this runs in every one of them.
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _type_on_gpu(original, self, dtype=None, *args, **kwargs):
    """Stand in for Tensor.type(): the optimizers sort parameters by names such as
    'torch.cuda.FloatTensor'."""
    if dtype is not None or args or kwargs:
        return original(self, dtype, *args, **kwargs)
    name = original(self)
    if name.startswith("torch.cuda."):
        return name
    return name.replace("torch.", "torch.cuda.", 1)


def _to_cpu(original, self, *args, **kwargs):
    if args and _is_cuda(args[0]):
        args = (CPU, *args[1:])
    elif kwargs and _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return original(self, *args, **kwargs)


def _install_tensors() -> None:
    """Wrap the factories, the Tensor methods that move a tensor to the device, and products of
    matrices."""
    # On a CPU without bf16 instructions torch's products of bf16 matrices are slow: fp32's are used.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with warnings.catch_warnings(action="ignore"):  # torch warns of such a replacement
            for name in ("mm", "addmm", "bmm", "baddbmm"):
                _ATEN.impl(
                    name, functools.partial(_in_fp32, getattr(torch.ops.aten, name).out), "CPU"
                )
    # Before they are replaced: torch keeps this set, in which `with torch.device("meta")` looks the
    # originals up.
    _device_constructors()
    for name in FACTORIES:
        replace(torch, name, (), _on_cpu, lasting=True)
    tensor = torch.Tensor
    # Methods that make a tensor like another one, on a device that may be named.
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        replace(tensor, name, (), _on_cpu, lasting=True)
    around(tensor, "to", (), _to_cpu, lasting=True)
    around(tensor, "type", (), _type_on_gpu, lasting=True)
    # Module.cuda() goes through Tensor.cuda(); both mean "where it is already".
    put(tensor, "cuda", lambda self, *args, **kwargs: self, "it is on the device")
    put(tensor, "pin_memory", lambda self, *args, **kwargs: self, "there is nothing to pin for")
    put(tensor, "record_stream", lambda self, stream: None, "there are no streams")


def _in_fp32(product, *matrices, **factors) -> torch.Tensor:
    """Return a product of matrices; of bf16 ones by way of fp32.

    torch takes 40 times as long for bf16 where the CPU has no instructions for it.
    """
    dtype = matrices[-1].dtype
    if dtype == torch.bfloat16:
        matrices = [matrix.float() for matrix in matrices]
    return product(*matrices, **factors, out=matrices[-1].new_empty(0)).to(dtype)


def _get_state(*_args, **_kwargs) -> torch.Tensor:
    """Stand in for torch.cuda.get_rng_state and megatron's _get_cuda_rng_state: a uint8 copy of the
    state."""
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, *_args, **_kwargs) -> None:
    """Stand in for torch.cuda.set_rng_state and megatron's _set_cuda_rng_state."""
    torch.default_generator.set_state(new_state)


@contextlib.contextmanager
def _fork(self, name: str = "model-parallel-rng"):
    """Stand in for CudaRNGStatesTracker.fork: draw from the named state inside, restore the outer
    one after.

    Megatron's own warns when the CPU state moves inside, which is the purpose here. Nested forks
    keep the outer name's state up to date, as Megatron's do.

    Raises:
        KeyError: `name` was never added.
    """
    if name not in self.states_:
        raise KeyError(f"rng state {name!r} was never added to the tracker")
    outer_name = self._current_state_name
    outer_state = _get_state()
    # A fork within a fork: what the outer one has drawn so far is kept under its name.
    if outer_name != "default-rng":
        self.states_[outer_name] = outer_state
    _set_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = _get_state()
        if outer_name != "default-rng":
            # An inner fork may have drawn from the outer name's state, too.
            outer_state = self.states_[outer_name]
        _set_state(outer_state)
        self._current_state_name = outer_name


def _install_random_state() -> None:
    """Replace torch.cuda's random-state functions. `install_tracker` does Megatron's tracker."""
    reason = "the CPU's generator is the device's"
    for module in (torch.cuda, torch.cuda.random):
        put(module, "get_rng_state", _get_state, reason)
        put(module, "set_rng_state", _set_state, reason)
        # manual_seed_all stays torch's: torch.manual_seed calls it
        put(module, "manual_seed", _seed, reason)


def _seed(seed: int) -> None:
    """Stand in for torch.cuda.manual_seed."""
    torch.default_generator.manual_seed(int(seed))


def install_tracker(random_module) -> None:
    """Replace the tracker's state access in `megatron.core.tensor_parallel.random`."""
    reason = "the tracker keeps the CPU generator's states"
    put(random_module, "_get_cuda_rng_state", _get_state, reason)
    put(random_module, "_set_cuda_rng_state", _set_state, reason)
    put(random_module.CudaRNGStatesTracker, "fork", _fork, reason)


def _share_gloo_device() -> None:
    """Give each gloo group that is made from now on this process's one device, whose thread wakes a
    hundred times a second. Megatron makes dozens of groups."""
    make = ProcessGroupGloo.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def shared(self, store, rank, size, *arguments, **options) -> None:
        # torch gives the timeout alone; from 2.15 on it says enable_reconfigure=False, too.
        requested = {name for name, value in options.items() if value is not False}
        if arguments or requested != {"timeout"} or "GLOO_SOCKET_IFNAME" in os.environ:
            return make(self, store, rank, size, *arguments, **options)
        # The device holds the thread and the sockets; groups share it.
        gloo_options = ProcessGroupGloo._Options()
        gloo_options._timeout = options["timeout"]
        gloo_options._devices = [_device(os.getpid())]
        return make(self, store, rank, size, gloo_options)

    ProcessGroupGloo.__init__ = shared


@functools.cache
def _device(process: int) -> ProcessGroupGloo.Device:
    """Return the device of a process, made once: a fork has none of its parent's threads."""
    return ProcessGroupGloo.create_default_device()


def install() -> None:
    """Put all of them in place."""
    install_devices()
    _install_tensors()
    _install_random_state()
    _share_gloo_device()
