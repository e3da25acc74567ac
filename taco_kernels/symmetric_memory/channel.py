"""A channel: the memory through which one stream of collectives runs, laid out the same on every
rank.

::

    data flags   uint64[W, PROGRAMS]               row w is written by rank w
    ack flags    uint64[W, PROGRAMS]               row w is written by rank w
    padding      up to a multiple of 1024 bytes
    arrivals     uint8[PROGRAMS, DEPTH, W, SLOT]   what each rank sends here
    returned     uint8[PROGRAMS, DEPTH, W, SLOT]   the sums that each owner sends back

Between two ranks, where an all-reduce is one exchange, the second area takes each sender's second
tile.

*Steps.* Program p of a rank talks to program p of its peers only, step after step, and counts its
steps from the channel's creation on (int64 in device memory: nothing to reset, nothing for the host
to know). In step n it uses slot n % DEPTH.

*Flags.* A flag holds the number of steps that one program of a peer has published. It only grows,
and it lies in the memory of the rank that waits for it::

    data flag n + 1 from a peer   its tiles of step n have arrived here
    ack flag n + 1 from a peer    it has read the tiles of step n that were sent to it, and in an all-reduce its
                                  sums of step n have arrived here

*Reuse of slots.* A sender waits for the acks of step n - DEPTH before it fills a slot again, also
across calls, so a peer never finds a slot overwritten that it still reads. Returned sums are
protected by the data flags of the rank that reads them instead, which second tiles do not wait for:
so between two ranks an all-reduce in two exchanges ends with an empty step, for whose acks both
wait. ``kernels.all_reduce_kernel`` has the proof, step by step.

Flags are PTX, because a spin needs a loop with acquire loads and a clock. Every thread of a program
calls them.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
import triton
import triton.language as tl

from taco_kernels.common import aligned
from taco_kernels.common.device import Constants, Device
from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, CodecConfig
from taco_kernels.taco.outliers import BLOCK, LIST_BYTES
from taco_kernels.taco.spec import STEP_BYTES, largest_tile, tuning_for

WARPS = 4
"""Warps of a program of every kernel here; see ``tile_of``."""
DEPTH = 3
"""Slots a sender: one is being filled, one on its way, one being read."""
FLAG_BYTES = tl.constexpr(8)
"""Bytes of a flag, a uint64."""
SLOTS_ALIGNMENT = 1024
"""Bytes: the areas of slots begin at a multiple of it."""


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory is not available, or a peer stopped answering."""


@dataclass(frozen=True, repr=False, eq=False)
class ChannelShape(Constants):
    """Compile-time shape of a channel."""

    W: tl.constexpr
    """Ranks of the channel."""
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
def arrival(program, step, sender, CHANNEL: tl.constexpr):
    """Offset in bytes, int64, of the slot for what a rank sends to a program in a step.

    Args:
        program: number of the program, int32.
        step: since the channel's creation, int64.
        sender: the rank that sends.
        CHANNEL: ``ChannelShape``.
    """
    slot = (program.to(tl.int64) * CHANNEL.DEPTH + step % CHANNEL.DEPTH) * CHANNEL.W + sender
    return slot * CHANNEL.SLOT + CHANNEL.SLOTS_AT


@triton.jit
def returned(program, step, owner, CHANNEL: tl.constexpr):
    """Offset in bytes of the slot for the sum that ``owner`` sends back. Arguments as for
    ``arrival``.

    Args:
        owner: the rank that sums the piece.
    """
    return arrival(program, step, owner, CHANNEL) + CHANNEL.AREA


@triton.jit
def data_flag(program, sender, CHANNEL: tl.constexpr):
    """Offset in bytes of the flag by which a rank tells a program that its tiles have arrived.

    Args:
        program: number of the program.
        sender: the rank that writes the flag.
        CHANNEL: ``ChannelShape``.
    """
    return (program + sender * CHANNEL.PROGRAMS).to(tl.int64) * FLAG_BYTES


@triton.jit
def ack_flag(program, sender, CHANNEL: tl.constexpr):
    """Offset in bytes of the flag by which a rank tells a program that it has read the tiles sent
    to it.

    Arguments as for ``data_flag``.

    Args:
        sender: the rank that writes the flag.
    """
    return data_flag(program, sender, CHANNEL) + CHANNEL.W * CHANNEL.PROGRAMS * FLAG_BYTES


# Thread t < W: release what the program has written, then set both flags in the memory of rank t.
#
#     $1  table of the ranks' addresses    $6  W
#     $2  offset of the data flag          $3  its value
#     $4  offset of the ack flag           $5  its value
#
# The fence is at system scope, as peers on other devices read; after it the stores of the flags may
# be relaxed. $0 is a result that Triton asks for and nobody reads.
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

# Thread t < W: spin until the flag of rank t is at least as large as asked for, or until the time
# is up.
#
#     $1  address of rank 0's flag    $2  bytes from one rank's flag to the next
#     $3  least value                 $4  W
#     $5  address of the error code   $6  nanoseconds until the program gives up
#
# The first look costs no clock. A program that gives up leaves t + 1 at $5, in pinned memory that
# the host can read afterwards, and traps, which ends the process's use of the device.
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
def publish(table, program, rank, sent, read, CHANNEL: tl.constexpr):
    """Make all earlier accesses of the program visible, then set its data and ack flags on every
    rank.

    A fence waits for every store on its way: best some time after the last one, and one for both
        flags.

    Args:
        table: int64[W], the address of every rank's memory.
        program: number of the program.
        rank: of this process.
        sent: int64 value of the data flag: steps whose tiles have been sent.
        read: int64 value of the ack flag: steps whose tiles have been read, and whose sums have
            been sent.
        CHANNEL: ``ChannelShape``.
    """
    # Every thread's accesses come before the fence of the threads that write flags.
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _PUBLISH,
        "=r,l,l,l,l,l,r",
        [
            table.to(tl.int64),
            data_flag(program, rank, CHANNEL),
            sent,
            ack_flag(program, rank, CHANNEL),
            read,
            tl.full((), CHANNEL.W, tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(flags, value, error, timeout, CHANNEL: tl.constexpr):
    """Wait until the program's flags from all ranks are at least ``value``.

    Args:
        flags: address of the flag that rank 0 writes, int64.
        value: int64 number of steps.
        error: address of the pinned int32 for the rank that is given up, int64.
        timeout: nanoseconds, int64.
        CHANNEL: ``ChannelShape``.
    """
    stride = tl.full((), CHANNEL.PROGRAMS * FLAG_BYTES, tl.int32)
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,r,l,r,l,l",
        [flags, stride, value, tl.full((), CHANNEL.W, tl.int32), error, timeout],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    # Only W threads have waited; the others must not read before them.
    tl.debug_barrier()


def tile_of(config: CodecConfig, device: Device) -> int:
    """Values of a tile: as many as encode's and decode's own kernels hold.

    With as many warps too, sums over a group run in the same order here and there, and give the
    same bits.
    """
    return tuning_for("encode", config, device).tile


def tile_bytes(config: CodecConfig, tile: int) -> int:
    """Bytes that ``tile`` values are sent in; of dual scales the step alone, all that a decoder
    uses."""
    group_bytes = config.bytes_per_group()
    if config.scales == "dual":
        group_bytes -= STEP_BYTES
    size = tile // config.group_size * group_bytes
    if config.outliers:
        size += tile // BLOCK * LIST_BYTES
    return size


@lru_cache
def slot_bytes() -> int:
    """Bytes of a slot: the largest tile of any device in the largest wire format there is."""
    sizes = []
    for format, group_size in product(FORMATS, GROUP_SIZES):
        config = CodecConfig(format, group_size, outliers=True)
        sizes.append(tile_bytes(config, largest_tile("encode", config)))
    return max(sizes)


@lru_cache
def channel_shape(world_size: int, programs: int) -> ChannelShape:
    """Compile-time constants of a channel for ``programs`` programs."""
    # Slots are as large on every device: ranks of a host lay the memory out alike.
    slot = slot_bytes()
    flags = 2 * world_size * programs * FLAG_BYTES.value
    return ChannelShape.of(
        W=world_size,
        PROGRAMS=programs,
        DEPTH=DEPTH,
        SLOT=slot,
        SLOTS_AT=aligned(flags, SLOTS_ALIGNMENT),
        AREA=programs * DEPTH * world_size * slot,
    )


def channel_bytes(world_size: int, programs: int) -> int:
    """Bytes of a channel's memory on each rank."""
    shape = channel_shape(world_size, programs)
    return shape.SLOTS_AT.value + 2 * shape.AREA.value


class Channel:
    """One rank's end of a channel. Calls on it must not overlap; those on different channels may.

    Args:
        addresses: where each rank's ``channel_bytes`` of zeros start, as this rank's device sees
            it.
        rank: of the caller.
        device: of the caller.
        programs: that may run at once, the same on every rank.
        timeout: seconds that a program waits for a peer before it gives up.
    """

    def __init__(
        self, addresses: list[int], rank: int, device: torch.device, programs: int, timeout: float
    ) -> None:
        self.rank = rank
        self.world_size = len(addresses)
        self.programs = programs
        self.device = device
        self.memory = addresses[rank]
        self.timeout_ns = int(timeout * 1e9)
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Steps of each program since the channel's creation. Kernels read and write them; the host
        # never does.
        self.steps = torch.zeros(programs, dtype=torch.int64, device=device)
        # Pinned: 1 + the rank that a program gave up waiting for, else 0. Kernels write it, also
        # after a trap has made the device useless, and the host reads it without a synchronisation.
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.error_address = self._error.data_ptr()
        # The same number, read as a ctypes integer: a tensor's ``item()`` takes microseconds a
        # call.
        self._error_code = ctypes.c_int32.from_address(self.error_address)
        self.plans: dict = {}  # launches that collectives.py has prepared, for calls to come

    def check(self) -> None:
        """Fail if an earlier call gave up waiting. Does not synchronise.

        Raises:
            SymmetricMemoryError: a peer did not answer in time.
        """
        if code := self._error_code.value:
            raise SymmetricMemoryError(
                f"rank {self.rank} waited {self.timeout_ns / 1e9:g} s for rank {code - 1} of its group "
                "in a symmetric-memory collective and gave up: that rank has died, hangs, or made "
                "another call. All results since are lost; restart from a checkpoint"
            )
