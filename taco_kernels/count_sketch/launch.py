"""Launching the sketch kernels. Same signatures as reference.py."""

import torch

from taco_kernels.common.fast_launch import start
from taco_kernels.common.magnitudes import EXPONENT_FLOOR
from taco_kernels.common.sizes import ceil_div
from taco_kernels.count_sketch.encode_kernels import encode_kernel, exponent_kernel, hash_kernel
from taco_kernels.count_sketch.hashing import ROUNDS, STREAM
from taco_kernels.count_sketch.layout import COUNT_SHIFT, Layout
from taco_kernels.count_sketch.peel_kernels import combine_kernel, peel_kernel
from taco_kernels.count_sketch.reference import Decoded, check_encoded

TILE = 4096
"""Values a program holds at a time in the streaming kernels."""
CELLS = {16: torch.int16, 32: torch.int32}
"""Of a wire, by ``cell_bits``."""
PEEL_ROWS, PEEL_CELLS, PEEL_WARPS = 16, 512, 16
"""One element a thread: with more Triton moves them between layouts, through shared memory. 60 registers."""
PEEL_REGISTERS = 64
"""Most a thread, so that a multiprocessor holds two programs of sixteen warps."""


def row_hashes(layout: Layout, seed: int, device: torch.device) -> torch.Tensor:
    """See hashing.row_hashes."""
    hashes = torch.empty((layout.rows, 4), dtype=torch.int32, device=device)
    wrapped = (seed + 2**63) % 2**64 - 2**63
    start(
        hash_kernel,
        (ceil_div(layout.rows, 256),),
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
    layout.check("x", x, torch.float32, layout.numel)
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
    check_encoded(x, exponents, remainder, layout)
    shards, mantissa = len(x), layout.config.mantissa(senders)
    thresholds, exponents = thresholds.contiguous(), exponents.contiguous()
    wires = torch.empty((shards, layout.wire_bytes), dtype=torch.uint8, device=x.device)
    cells = torch.zeros((shards, layout.cells), dtype=torch.int32, device=x.device)
    words = wires[:, layout.cell_bytes :].view(torch.int32)
    rest = x if remainder is None else remainder
    tile = TILE // layout.width
    start(
        encode_kernel,
        (ceil_div(words.shape[1] * 32, TILE), shards),
        (x, rest, thresholds, exponents, row_hashes(layout, seed, x.device), cells, words),
        (
            *(layout.numel, layout.rows, words.shape[1]),
            *(x.stride(0), rest.stride(0), cells.stride(0), words.stride(0)),
        ),
        MANTISSA=mantissa,
        FLOOR=EXPONENT_FLOOR,
        KEEP_REMAINDER=remainder is not None,
        WIDTH=layout.width,
        T=tile,
        num_warps=8,
    )
    wires.view(CELLS[layout.config.cell_bits])[:, : layout.cells] = (
        cells  # modulo 2^16 where cells are narrow
    )
    return wires


def combine(wires: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.combine."""
    layout.check("wires", wires, torch.uint8, layout.wire_bytes)
    typed = wires.view(CELLS[layout.config.cell_bits])
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
    cells: torch.Tensor, words: torch.Tensor, exponents: torch.Tensor, layout: Layout, senders: int, seed: int
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
