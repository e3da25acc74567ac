"""Launching the sketch kernels. Same signatures as reference.py."""

import torch

from taco_kernels.homomorphic.encode_kernels import encode_kernel, exponent_kernel, hash_kernel, narrow_kernel
from taco_kernels.homomorphic.hashing import ROUNDS, STREAM
from taco_kernels.homomorphic.layout import COUNT_SHIFT, EXPONENT_FLOOR, Layout
from taco_kernels.homomorphic.peel_kernels import combine_kernel, peel_kernel
from taco_kernels.homomorphic.reference import Decoded
from taco_kernels.layout import ceil_div
from taco_kernels.triton.fast_launch import start

TILE = 4096
"""Values a program holds at a time in the streaming kernels."""
PEEL_ROWS, PEEL_CELLS, PEEL_WARPS = 16, 512, 16
"""One element a thread: with more Triton moves them between layouts, through shared memory. 56 registers."""
PEEL_REGISTERS = 64
"""Most a thread, so that a multiprocessor holds two programs of sixteen warps."""


def row_hashes(layout: Layout, seed: int, device: torch.device) -> torch.Tensor:
    """See hashing.row_hashes."""
    hashes = torch.empty((layout.rows, 4), dtype=torch.int32, device=device)
    wrapped = (seed + 2**63) % 2**64 - 2**63
    grid = (ceil_div(layout.rows, 256),)
    start(
        hash_kernel,
        grid,
        (hashes,),
        (layout.rows, layout.blocks, layout.third),
        (wrapped,),
        STREAM=STREAM,
        ROUNDS=ROUNDS,
        WIDTH=layout.width,
        T=256,
    )
    return hashes


def row_exponents(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """See reference.row_exponents."""
    exponents = torch.empty((len(x), layout.rows), dtype=torch.uint8, device=x.device)
    tile = TILE // layout.width
    start(
        exponent_kernel,
        (ceil_div(layout.rows, tile), len(x)),
        (x, exponents),
        (layout.numel, layout.rows, x.stride(0)),
        WIDTH=layout.width,
        T=tile,
    )
    return exponents


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    exponents: torch.Tensor,
    layout: Layout,
    senders: int,
    seed: int,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.encode."""
    shards, narrow = len(x), layout.config.cell_bits == 16
    thresholds, exponents = thresholds.contiguous(), exponents.contiguous()
    wires = torch.zeros((shards, layout.wire_bytes), dtype=torch.uint8, device=x.device)
    words = wires[:, layout.cell_bytes : layout.cell_bytes + 4 * layout.words].view(torch.int32)
    if narrow:
        cells = torch.zeros((shards, layout.cells), dtype=torch.int32, device=x.device)
    else:
        cells = wires[:, : layout.cell_bytes].view(torch.int32)
    tile = TILE // layout.width
    start(
        encode_kernel,
        (ceil_div(layout.rows, tile), shards),
        (
            x,
            x if remainder is None else remainder,
            thresholds,
            exponents,
            row_hashes(layout, seed, x.device),
            cells,
            words,
        ),
        (
            layout.numel,
            layout.rows,
            x.stride(0),
            0 if remainder is None else remainder.stride(0),
            cells.stride(0),
            words.stride(0),
        ),
        MANTISSA=layout.config.mantissa(senders),
        FLOOR=EXPONENT_FLOOR,
        KEEP_REMAINDER=remainder is not None,
        WIDTH=layout.width,
        T=tile,
        num_warps=8,
    )
    if narrow:
        start(
            narrow_kernel,
            (ceil_div(layout.cells, TILE), shards),
            (cells, wires.view(torch.int16)),
            (layout.cells, layout.wire_bytes // 2),
            T=TILE,
        )
    return wires


def combine(wires: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.combine."""
    typed = wires.view(torch.int32 if layout.config.cell_bits == 32 else torch.int16)
    cells = torch.empty(layout.cells, dtype=torch.int32, device=wires.device)
    words = torch.empty(layout.words, dtype=torch.int32, device=wires.device)
    start(
        combine_kernel,
        (ceil_div(max(layout.cells, layout.words), TILE),),
        (typed, cells, words),
        (layout.cells, typed.stride(0), layout.cell_bytes // 4, layout.words),
        W=len(wires),
        T=TILE,
        num_warps=8,
    )
    return cells, words


def decode(
    cells: torch.Tensor,
    words: torch.Tensor,
    exponents: torch.Tensor,
    layout: Layout,
    senders: int,
    seed: int,
) -> Decoded:
    """See reference.decode. ``cells`` is used up."""
    device = cells.device
    values = torch.empty(layout.numel, dtype=torch.float32, device=device)
    counters, estimates = torch.zeros((2, 2), dtype=torch.int32, device=device)
    estimates = estimates.view(torch.float32)
    start(
        peel_kernel,
        (layout.blocks * (layout.width // 32),),
        (
            cells,
            torch.empty_like(cells, dtype=torch.int64),
            words,
            exponents,
            row_hashes(layout, seed, device),
            values,
            counters,
            estimates,
        ),
        (layout.numel, layout.rows, layout.blocks, layout.third),
        MANTISSA=layout.config.mantissa(senders),
        FLOOR=EXPONENT_FLOOR,
        BITS=layout.config.cell_bits,
        SHIFT=COUNT_SHIFT,
        WIDTH=layout.width,
        ROWS=PEEL_ROWS,
        CELLS=PEEL_CELLS,
        num_warps=PEEL_WARPS,
        maxnreg=PEEL_REGISTERS,
    )
    return Decoded(values, counters, estimates)
