"""What a launch needs to know of its device, and how a kernel is run on it."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Tuning(NamedTuple):
    """How a kernel is run; measured."""

    tile: int
    """Values a program holds at a time."""
    warps: int
    stages: int
    """Depth of the software pipeline over tiles."""
    programs: int
    """Programs a multiprocessor, of persistent kernels; 0: one program a tile."""
    registers: int | None = None
    """Most registers a thread, where the compiler's own choice costs occupancy."""

    @property
    def options(self) -> dict[str, object]:
        """Compiler options of the kernel."""
        return dict(num_warps=self.warps, maxnreg=self.registers, enable_fp_fusion=False)


class Device(NamedTuple):
    """What a launch needs to know of a device."""

    multiprocessors: int
    hardware_fp8: bool
    interpret: bool

    def grid(self, tiles: int, tuning: Tuning) -> tuple[int]:
        """One program a tile, or as many as ``tuning`` says."""
        if self.interpret or not tuning.programs:
            return (tiles,)
        return (min(tiles, tuning.programs * self.multiprocessors),)


@lru_cache
def device_number(index: int) -> Device:
    """Of a tensor whose ``get_device()`` is ``index``; -1, a tensor of the host, is the interpreter's."""
    if index < 0:
        return Device(multiprocessors=4, hardware_fp8=False, interpret=True)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Device(properties.multi_processor_count, capability >= (8, 9), False)


def device_for(tensor: torch.Tensor) -> Device:
    """The device that a tensor's kernel runs on."""
    return device_number(tensor.get_device())
