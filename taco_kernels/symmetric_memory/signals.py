"""Flags between ranks: 64-bit counters in the memory of the rank that waits, written by its peers.

A flag holds the number of steps that one program of a peer has published; it only grows. All functions are
called by every thread of a program. PTX, because a spin needs a loop with acquire loads and a clock.
"""

import triton
import triton.language as tl

from taco_kernels.symmetric_memory.ring import ack_flag, data_flag

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

# Thread t < $4: spin until the flag at $1 + t * $2 is at least $3. After $6 nanoseconds leave t + $7 at $5,
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
    add.u32 thread, thread, $7;
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
def wait(flags, value, error, timeout, first, COUNT: tl.constexpr, E: tl.constexpr):
    """Until the program's flags from COUNT ranks, the flag of rank ``first`` at address ``flags``, are at
    least ``value``."""
    stride = tl.full((), E.PROGRAMS * 8, tl.int32)
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,r,l,r,l,l,r",
        [
            flags,
            stride,
            value,
            tl.full((), COUNT, tl.int32),
            error,
            timeout,
            tl.full((), 1, tl.int32) + first,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
