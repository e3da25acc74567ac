"""Triton launches up to the last step, without a GPU: what the launcher's C function would be given."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple
from unittest import mock

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from taco_kernels.common import fast_launch

FAST = (None, None, None)
"""Hooks of a launch that Triton had no part in."""
SERIES = tuple(int(part) for part in triton.__version__.split(".")[:2])
PACKS = SERIES >= (3, 7)
"""Whether the launcher's C function takes a kernel's arguments as one tuple, and memories after hooks."""


class Record(NamedTuple):
    """One launch."""

    grid: tuple[int, int, int]
    stream: int
    function: int
    """Another number for each compiled kernel."""
    options: tuple
    """Cooperative, dependent, both scratch memories, metadata."""
    hooks: tuple
    """FAST for launches that Triton had no part in."""
    arguments: tuple
    """Tensors as addresses."""


class Recorder(CudaLauncher):
    """A launcher whose C function writes down what it is called with."""

    num_ctas = 1
    global_scratch_size = profile_scratch_size = 0
    global_scratch_align = profile_scratch_align = 1
    launch_cooperative_grid = launch_pdl = False
    gsan_enabled = False
    arg_annotations = kernel_signature = None
    """Attributes from Triton 3.7 on."""

    def __init__(self, records: list[Record]) -> None:
        def launch(*args) -> None:
            # In Triton 3.6: grid (0-2), stream, function, options (5-9), metadata and hooks (10-12), arguments.
            if PACKS:
                args = (*args[:7], *args[11:13], *args[7:11], *args[-1])
            values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args[13:]]
            records.append(
                Record(args[:3], args[3], args[4], args[5:10], args[10:13], tuple(values))
            )
            for hook, event in ((args[11], "enter"), (args[12], "exit")):
                if hook is not None:
                    hook((event, args[10]))

        self.launch = launch


class Device:
    """Triton's driver for machine-independent launches: the current device and stream are set by the test."""

    def __init__(self, records: list[Record], architecture: int = 90) -> None:
        self.architecture = architecture
        self.compiled: list[tuple] = []
        """Source and options of what would be compiled."""
        self.number = 0
        self.stream = 700
        self._functions = count(1)
        self.launcher_cls = lambda src, metadata: Recorder(records)
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *args: (object(), next(self._functions), 32, 0, 1024),
        )

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class NotCompiled:
    """A CompiledKernel of nothing, for tests in which only the choice of a kernel matters."""

    name = "not compiled"
    launch_metadata = triton.compiler.CompiledKernel.launch_metadata

    def __init__(self, src, options: dict, device: Device) -> None:
        device.compiled.append((src, options))
        self.src = src
        self.metadata = types.SimpleNamespace(**options)
        self.packed_metadata = (options["num_warps"], 1, 0)
        self.run = device.launcher_cls(src, self.metadata)
        self.function = device.utils.load_binary()[1]

    def _init_handles(self) -> None:
        pass


@contextmanager
def recorded_launches(
    *kernels, compiled: bool = False, architecture: int = 90
) -> Iterator[tuple[list[Record], Device]]:
    """Record the launches of ``kernels`` within it; give the list, and the device that they believe to be on.

    Args:
        compiled: compile them, which takes seconds for a large one; else ``Device.compiled`` has what would
            be.
        architecture: 90 for sm_90.
    """
    records: list[Record] = []
    device = Device(records, architecture)
    active_before = driver._active

    def not_compiled(src, target=None, options=None) -> NotCompiled:
        return NotCompiled(src, options, device)

    compile_function = triton.compiler.compile if compiled else not_compiled
    compiling = mock.patch.object(triton.compiler, "compile", compile_function)
    caches = [kernel.device_caches for kernel in kernels]
    with (
        compiling,
        mock.patch.object(fast_launch, "_current_device", device.get_current_device),
        mock.patch.object(fast_launch, "_current_stream", device.get_current_stream),
    ):
        driver.set_active(device)
        for kernel in kernels:
            kernel.device_caches = type(kernel.device_caches)(kernel.create_binder)
        try:
            yield records, device
        finally:
            driver._active = active_before
            for kernel, cache in zip(kernels, caches, strict=True):
                kernel.device_caches = cache
