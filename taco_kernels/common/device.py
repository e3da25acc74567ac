"""What a launch needs to know of its device, how a kernel is run on it, and its compile-time
constants."""

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
LEAST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that kernels can be chosen for: A100."""


class Tuning(NamedTuple):
    """How a kernel is run."""

    tile: int
    """Values a program holds at a time."""
    warps: int
    """Warps a program, of 32 threads."""
    stages: int
    """Depth of the software pipeline over tiles."""
    programs: int
    """Programs a multiprocessor, of persistent kernels; 0: one program a tile."""
    registers: int | None = None
    """Most registers a thread, where the compiler's own choice costs occupancy."""

    @property
    def options(self) -> dict[str, object]:
        """Compiler options of the kernel.

        Without fusion: a product and a sum that the compiler joins are rounded once, and bytes
        would differ from the definition's. Kernels ask for ``tl.fma`` where the definition rounds
        once.
        """
        return dict(num_warps=self.warps, maxnreg=self.registers, enable_fp_fusion=False)


class Device(NamedTuple):
    """What a launch needs to know of a device."""

    multiprocessors: int
    """How many the device has."""
    capability: tuple[int, int]
    """Compute capability; (0, 0) under the interpreter."""
    interpret: bool
    """Whether kernels run in Triton's interpreter."""

    @property
    def hardware_fp8(self) -> bool:
        """True where an instruction converts fp32 to fp8; else integer arithmetic does it."""
        return self.capability >= (8, 9)

    @property
    def small(self) -> bool:
        """True where kernels must need little: operands in registers, 99 KiB of shared memory a
        program.

        False on sm_90, whose tensor cores read a matrix from shared memory, 227 KiB, and whose
        tiles were measured; and under the interpreter.
        """
        return self.capability[0] not in (0, 9)

    @property
    def point(self) -> int:
        """Points of the largest transform that is done as one product.

        A matrix of 128 by 128 does not fit a warp's registers.
        """
        return 64 if self.small else 128

    def grid(self, tiles: int, tuning: Tuning) -> tuple[int]:
        """Return a grid of one program a tile, or of as many programs as ``tuning`` says."""
        if self.interpret or not tuning.programs:
            return (tiles,)
        # Persistent: every program takes several tiles, and fetches the next while it works on one.
        return (min(tiles, tuning.programs * self.multiprocessors),)


@lru_cache
def device_number(index: int) -> Device:
    """Return the device of tensors whose ``get_device()`` is ``index``.

    -1, which tensors of the host have, stands for the interpreter.
    """
    if index < 0:
        return Device(multiprocessors=4, capability=(0, 0), interpret=True)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    requested = os.environ.get(AS_IF)
    if not requested:
        return Device(properties.multi_processor_count, capability, interpret=False)

    logging.getLogger("taco_kernels").warning(
        "%s=%s: kernels are not chosen for this GPU", AS_IF, requested
    )
    as_if = capability_as_if(requested, capability)
    device = Device(properties.multi_processor_count, as_if, interpret=False)
    if device.small:
        # The compiler is told, too: mma.sync from registers, in instructions of this GPU.
        triton.knobs.runtime.override_arch = f"sm{requested}"
    return device


def capability_as_if(requested: str, actual: tuple[int, int]) -> tuple[int, int]:
    """Return the compute capability that the variable AS_IF names.

    ``requested`` is its value, ``actual`` the capability of the device that is to run the kernels.

    Raises:
        ValueError: it is no architecture, or one whose kernels this device cannot run.
    """
    capability = (0, 0)
    if requested.isdecimal():
        capability = divmod(int(requested), 10)
    # Kernels use nothing newer than 8.9, so a device of 8.9 runs those of every later architecture.
    if capability < LEAST_CAPABILITY or min(capability, (8, 9)) > actual:
        raise ValueError(
            f"{AS_IF}={requested}: give 80 to 120, such as 89, and no more than this GPU's {actual}"
        )
    return capability


def device_for(tensor: torch.Tensor) -> Device:
    """Return the device that a tensor's kernel runs on."""
    return device_number(tensor.get_device())


@dataclass(frozen=True, repr=False, eq=False)
class Constants:
    """Base of frozen dataclasses of tl.constexpr, passed to kernels as one constant argument.

    A kernel reads ``C.G`` where C is such an argument. Triton compiles a kernel for each text of
    its constants (``__repr__``), and looks up the compiled kernel by ``__hash__`` and ``__eq__`` at
    every launch.
    """

    @classmethod
    def of(cls, **values: object) -> Self:
        """Return constants with these values, each wrapped as tl.constexpr."""
        return cls(**{name: tl.constexpr(value) for name, value in values.items()})

    @cached_property
    def _text(self) -> str:
        values = {field.name: getattr(self, field.name).value for field in fields(self)}
        return ",".join(f"{name}={value}" for name, value in values.items())

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._text))

    def __repr__(self) -> str:
        """Return a part of the compiler's cache key."""
        return self._text

    def __hash__(self) -> int:
        """Return the hash, computed once: hashing twenty fields takes longer than the rest of a
        launch."""
        return self._hash

    def __eq__(self, constants: object) -> bool:
        if self is constants:
            return True
        return type(self) is type(constants) and self._text == constants._text


@triton.jit
def as_tensor(number):
    """int32 of the variable of a ``tl.range``, which is a Python int under the interpreter."""
    return tl.full((), 0, tl.int32) + number
