"""A channel: the memory through which one stream of collectives runs, laid out the same on every rank.

``data`` flags, ``ack`` flags (each uint64[W, PROGRAMS], row w written by rank w), then two areas of slots,
each uint8[PROGRAMS, DEPTH, W, SLOT]: what arrives from each sender, and what comes back from each owner.
Between two ranks, where an all-reduce is one exchange, the second area takes each sender's second tile.

Program p of a rank talks to program p of its peers only, step after step, and counts its steps from the
channel's creation on (int64 in device memory: nothing to reset, nothing for the host to know). In step n it
uses slot n % DEPTH. A flag holds the number of steps that one program of a peer has published; it only grows,
in the memory of the rank that waits for it. Data flag n + 1 from a peer: its tiles of step n have arrived.
Ack flag n + 1 from a peer: it has read the tiles of step n that were sent to it, and in an all-reduce its
sums of step n have arrived. A sender waits for the acks of step n - DEPTH before it fills a slot again, also
across calls, so a peer never finds a slot overwritten that it still reads. Sums that come back are protected
by the data flags of their owner instead, which second tiles do not wait for: so between two ranks an
all-reduce in two exchanges ends with an empty step, for whose acks both wait.

Flags are PTX, because a spin needs a loop with acquire loads and a clock. Every thread of a program calls
them.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from taco_kernels.common import aligned
from taco_kernels.common.device import Constants, Device
from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, CodecConfig
from taco_kernels.taco.outliers import BLOCK, LIST_BYTES
from taco_kernels.taco.spec import STEP_BYTES, tuning_for, tuning_of

WARPS = 4
"""Of every kernel here; see tile_of."""
DEPTH = 3
"""Slots a sender: one being filled, one on its way, one being read."""


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory is not available, or a peer stopped answering."""


@dataclass(frozen=True, repr=False, eq=False)
class ChannelShape(Constants):
    """Compile-time shape of a channel."""

    W: tl.constexpr
    """Ranks."""
    PROGRAMS: tl.constexpr
    """Programs that the channel has slots and flags for."""
    DEPTH: tl.constexpr
    """Slots a program and sender, in each area."""
    SLOT: tl.constexpr
    """Bytes of a slot."""
    SLOTS_AT: tl.constexpr
    """Offset of the first area of slots."""
    AREA: tl.constexpr
    """Bytes of an area."""


@triton.jit
def arrival(program, step, sender, E: tl.constexpr):
    """Offset of the slot for what ``sender`` sends to ``program`` in ``step``."""
    at = (program.to(tl.int64) * E.DEPTH + step % E.DEPTH) * E.W + sender
    return at * E.SLOT + E.SLOTS_AT


@triton.jit
def returned(program, step, owner, E: tl.constexpr):
    """Offset of the slot for the sum that ``owner`` sends back."""
    return arrival(program, step, owner, E) + E.AREA


@triton.jit
def data_flag(program, sender, E: tl.constexpr):
    """Offset of the flag by which ``sender`` says that its tiles have arrived."""
    return (program + sender * E.PROGRAMS).to(tl.int64) * 8


@triton.jit
def ack_flag(program, sender, E: tl.constexpr):
    """Offset of the flag by which ``sender`` says that it has read its tiles."""
    return data_flag(program, sender, E) + E.W * E.PROGRAMS * 8


# Thread t < $6: release what the program has written, then store $3 and $5 to the flags at offsets $2 and $4
# in the memory of rank t, which starts where entry t of the table $1 says.
_PUBLISH = tl.constexpr(
    """
{
    .reg .pred mine;
    .reg .u32 thread;
    .reg .u64 entry, base, flag;
    mov.u32 thread, %tid.x;
    setp.lt.u32 mine, thread, $6;
    mad.wide.u32 entry, thread, 8, $1;
    @mine ld.global.u64 base, [entry];
    @mine fence.acq_rel.sys;
    add.u64 flag, base, $2;
    @mine st.relaxed.sys.global.u64 [flag], $3;
    add.u64 flag, base, $4;
    @mine st.relaxed.sys.global.u64 [flag], $5;
    mov.u32 $0, 0;
}
"""
)

# Thread t < $4: spin until the flag at $1 + t * $2 is at least $3. After $6 nanoseconds leave t + 1 at $5,
# which the host can read, and trap.
_WAIT = tl.constexpr(
    """
{
    .reg .pred mine, done;
    .reg .u32 thread;
    .reg .u64 address, value, start, now;
    mov.u32 thread, %tid.x;
    setp.ge.u32 mine, thread, $4;
    @mine bra ready;
    mad.wide.u32 address, thread, $2, $1;
    ld.acquire.sys.global.u64 value, [address];
    setp.ge.s64 done, value, $3;
    @done bra ready;
    mov.u64 start, %globaltimer;
again:
    ld.acquire.sys.global.u64 value, [address];
    setp.ge.s64 done, value, $3;
    @done bra ready;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 done, now, $6;
    @done bra again;
    add.u32 thread, thread, 1;
    st.relaxed.sys.global.u32 [$5], thread;
    fence.acq_rel.sys;
    trap;
ready:
    mov.u32 $0, 0;
}
"""
)


@triton.jit
def publish(table, program, rank, sent, read, E: tl.constexpr):
    """Make all earlier accesses of the program visible, then set its data and ack flags on every rank.

    A fence waits for every store on its way: best some time after the last one, and one for both flags.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _PUBLISH,
        "=r,l,l,l,l,l,r",
        [
            table.to(tl.int64),
            data_flag(program, rank, E),
            sent,
            ack_flag(program, rank, E),
            read,
            tl.full((), E.W, tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(flags, value, error, timeout, E: tl.constexpr):
    """Until the program's flags from all ranks, rank 0's at address ``flags``, are at least ``value``."""
    stride = tl.full((), E.PROGRAMS * 8, tl.int32)
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,r,l,r,l,l",
        [flags, stride, value, tl.full((), E.W, tl.int32), error, timeout],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


def tile_of(config: CodecConfig, device: Device) -> int:
    """Values of a tile: as many as encode's and decode's own kernels hold, and with as many warps, so that
    sums over a group have the same bits."""
    return tuning_for("encode", config, device).tile


def tile_bytes(config: CodecConfig, tile: int) -> int:
    """Bytes that ``tile`` values are sent in; of dual scales the step alone, all that a decoder uses."""
    saved = STEP_BYTES if config.scales == "dual" else 0
    lists = tile // BLOCK * LIST_BYTES if config.outliers else 0
    return tile // config.group_size * (config.bytes_per_group() - saved) + lists


@lru_cache
def slot_bytes() -> int:
    """Bytes of a slot: the largest tile of any device in the largest wire format there is."""
    configs = [CodecConfig(f, g, outliers=True) for f in FORMATS for g in GROUP_SIZES]
    return max(tile_bytes(config, tuning_of("encode", config).tile) for config in configs)


@lru_cache
def channel_shape(world_size: int, programs: int) -> ChannelShape:
    """Compile-time constants of a channel for ``programs`` programs."""
    slot, flags = slot_bytes(), 2 * world_size * programs * 8
    sizes = dict(
        SLOT=slot, SLOTS_AT=aligned(flags, 1024), AREA=programs * DEPTH * world_size * slot
    )
    return ChannelShape.of(W=world_size, PROGRAMS=programs, DEPTH=DEPTH, **sizes)


def channel_bytes(world_size: int, programs: int) -> int:
    """Bytes of a channel's memory on each rank."""
    shape = channel_shape(world_size, programs)
    return shape.SLOTS_AT.value + 2 * shape.AREA.value


class Channel:
    """One rank's end of a channel. Calls on it must not overlap; those on different channels may.

    Args:
        addresses: where each rank's ``channel_bytes`` of zeros start, as this rank's device sees it.
        rank, device: of the caller.
        programs: that may run at once, the same on every rank.
        timeout: seconds that a program waits for a peer before it gives up.
    """

    def __init__(
        self, addresses: list[int], rank: int, device: torch.device, programs: int, timeout: float
    ) -> None:
        self.rank, self.world_size, self.programs, self.device = (
            rank,
            len(addresses),
            programs,
            device,
        )
        self.memory, self.timeout_ns = addresses[rank], int(timeout * 1e9)
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.steps = torch.zeros(programs, dtype=torch.int64, device=device)  # done so far
        # pinned: 1 + the rank that a program gave up waiting for, else 0
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.error_address = self._error.data_ptr()
        self._error_code = ctypes.c_int32.from_address(
            self.error_address
        )  # is read faster than the tensor
        self.plans: dict = {}  # of collectives.py, for calls to come

    def check(self) -> None:
        """Raise SymmetricMemoryError if an earlier call gave up waiting. Does not synchronise."""
        if code := self._error_code.value:
            raise SymmetricMemoryError(
                f"rank {self.rank} waited {self.timeout_ns / 1e9:g} s for rank {code - 1} of its group in a "
                "symmetric-memory collective and gave up: that rank has died, hangs, or made another call. "
                "All results since are lost; restart from a checkpoint"
            )
