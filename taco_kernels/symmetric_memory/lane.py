"""A lane: the memory through which one stream of collectives runs, and how it is laid out."""

import ctypes
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from taco_kernels.common.device import Device
from taco_kernels.symmetric_memory.ring import Exchange
from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, CodecConfig
from taco_kernels.taco.spec import STEP_BYTES
from taco_kernels.taco.tuning import tuning_for, tuning_of

WARPS = 4  # of every kernel here; see tile_of
DEPTH = 3  # slots a sender: one being filled, one on its way, one being read
_ALIGNMENT = 1024


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory cannot be had, or a peer stopped answering."""


def tile_of(config: CodecConfig, device: Device) -> int:
    """Values of a tile: as many as encode's and decode's own kernels hold.

    With as many warps too, sums over a group run in the same order here and there, and give the same bits.
    """
    return tuning_for("encode", config, device).tile


def tile_bytes(config: CodecConfig, tile: int) -> int:
    """Bytes that ``tile`` values travel in; of dual scales the step alone, all that a decoder uses."""
    saved = STEP_BYTES if config.scales == "dual" else 0
    return tile // config.group_size * (config.bytes_per_group() - saved)


@lru_cache
def slot_bytes() -> int:
    """Bytes of a slot: the largest tile of any device in the largest wire format there is."""
    configs = [CodecConfig(f, g) for f in FORMATS for g in GROUP_SIZES]
    return max(tile_bytes(config, tuning_of("encode", config).tile) for config in configs)


@lru_cache
def exchange(world_size: int, programs: int, splits: int) -> Exchange:
    """Compile-time constants of a launch on a lane for ``programs`` programs."""
    slot = slot_bytes()
    flags = 2 * world_size * programs * 8
    return Exchange.of(
        W=world_size,
        PROGRAMS=programs,
        DEPTH=DEPTH,
        SLOT=slot,
        RINGS=-(-flags // _ALIGNMENT) * _ALIGNMENT,
        RING=programs * DEPTH * world_size * slot,
        SPLITS=splits,
    )


def lane_bytes(world_size: int, programs: int) -> int:
    """Bytes of a lane's memory on each rank."""
    shape = exchange(world_size, programs, 1)
    return shape.RINGS.value + 2 * shape.RING.value


@dataclass(frozen=True)
class Lane:
    """One rank's end of a lane. Calls on a lane must not overlap; those on different lanes may."""

    rank: int
    world_size: int
    programs: int
    """Programs that may run at once, the same on every rank."""
    memory: int
    """Address of this rank's lane memory, whose flags start as zeros."""
    table: torch.Tensor
    """int64[W] on the device: addresses of all ranks' lane memory as this rank sees them."""
    steps: torch.Tensor
    """int64[programs] on the device: steps done so far; zeros at first."""
    error: torch.Tensor
    """int32[1] in pinned host memory: 1 + the rank that a program gave up waiting for, else 0."""
    timeout_ns: int
    """How long a program waits for a peer before it gives up."""

    @cached_property
    def error_address(self) -> int:
        """Where the kernels write ``error``."""
        return self.error.data_ptr()

    @cached_property
    def _error(self) -> ctypes.c_int32:
        """``error`` itself, which takes less time to read than the tensor does."""
        return ctypes.c_int32.from_address(self.error_address)

    @cached_property
    def plans(self) -> dict:
        """What collectives.py keeps for calls to come."""
        return {}

    def check(self) -> None:
        """Raise SymmetricMemoryError if an earlier call gave up waiting. Does not synchronise."""
        code = self._error.value
        if code:
            raise SymmetricMemoryError(
                f"rank {self.rank} waited {self.timeout_ns / 1e9:g} s for rank {code - 1} of its group in a "
                "symmetric-memory collective and gave up: that rank has died, hangs, or made another call. "
                "All results since are lost; restart from a checkpoint"
            )


def make_lane(addresses: list[int], rank: int, device: torch.device, programs: int, timeout: float) -> Lane:
    """One rank's end of a lane.

    Args:
        addresses: where each rank's memory of ``lane_bytes`` zeroed bytes starts, as this rank's device sees
            it.
        rank, device: of the caller.
        programs: of the lane.
        timeout: seconds that a program waits for a peer.
    """
    return Lane(
        rank=rank,
        world_size=len(addresses),
        programs=programs,
        memory=addresses[rank],
        table=torch.tensor(addresses, dtype=torch.int64, device=device),
        steps=torch.zeros(programs, dtype=torch.int64, device=device),
        error=torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        timeout_ns=int(timeout * 1e9),
    )
