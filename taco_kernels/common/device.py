"""What a launch needs to know of its device, how a kernel is run on it, and its compile-time constants."""

import logging
import os
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

AS_IF = "TACO_KERNELS_AS_IF"
"""Environment variable, for tests and benchmarks: kernels as on this architecture, 89 for sm_89."""


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
    capability: tuple[int, int]
    """Compute capability; (0, 0) under the interpreter."""
    interpret: bool

    @property
    def hardware_fp8(self) -> bool:
        """Whether fp32 is converted to fp8 by an instruction; else integer arithmetic does it."""
        return self.capability >= (8, 9)

    @property
    def small(self) -> bool:
        """Whether kernels are to need little: operands in registers, and 99 KiB of shared memory a program.
        So it is but on sm_90, whose tiles were measured; and under the interpreter."""
        return self.capability[0] not in (0, 9)

    @property
    def point(self) -> int:
        """Largest transform done as one product: a matrix of 128 by 128 does not fit a warp's registers."""
        return 64 if self.small else 128

    def grid(self, tiles: int, tuning: Tuning) -> tuple[int]:
        """One program a tile, or as many as ``tuning`` says."""
        if self.interpret or not tuning.programs:
            return (tiles,)
        return (min(tiles, tuning.programs * self.multiprocessors),)


@lru_cache
def device_number(index: int) -> Device:
    """Of a tensor whose ``get_device()`` is ``index``; -1, a tensor of the host, is the interpreter's."""
    if index < 0:
        return Device(multiprocessors=4, capability=(0, 0), interpret=True)
    properties = torch.cuda.get_device_properties(index)
    own = properties.major, properties.minor
    wanted = os.environ.get(AS_IF)
    if not wanted:
        return Device(properties.multi_processor_count, own, False)
    logging.getLogger("taco_kernels").warning(
        "%s=%s: kernels are not chosen for this GPU", AS_IF, wanted
    )
    device = Device(properties.multi_processor_count, capability_as_if(wanted, own), False)
    if device.small:  # the compiler too: mma.sync from registers, in instructions of this GPU
        triton.knobs.runtime.override_arch = f"sm{wanted}"
    return device


def capability_as_if(wanted: str, own: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that AS_IF names; ValueError unless a device of ``own`` can run its kernels."""
    capability = divmod(int(wanted), 10) if wanted.isdecimal() else (0, 0)
    if (
        capability < (8, 0) or min(capability, (8, 9)) > own
    ):  # what kernels are written for comes with 8.9
        raise ValueError(
            f"{AS_IF}={wanted}: give 80 to 120, such as 89, and no more than this GPU's {own}"
        )
    return capability


def device_for(tensor: torch.Tensor) -> Device:
    """The device that a tensor's kernel runs on."""
    return device_number(tensor.get_device())


@dataclass(frozen=True, repr=False, eq=False)
class Constants:
    """Base of frozen dataclasses of tl.constexpr, passed to kernels as one constant argument."""

    @classmethod
    def of(cls, **values: object) -> Self:
        """Constants with these values."""
        return cls(**{name: tl.constexpr(value) for name, value in values.items()})

    @cached_property
    def _text(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name).value}" for f in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._text))

    def __repr__(self) -> str:
        """Part of the compiler's cache key."""
        return self._text

    def __hash__(self) -> int:
        """Kept: a launch hashes its constants, and hashing twenty fields takes longer than the rest of it."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._text == other._text)


@triton.jit
def as_tensor(number):
    """The variable of a ``tl.range``, which is an int under the interpreter, as int32."""
    return tl.full((), 0, tl.int32) + number
