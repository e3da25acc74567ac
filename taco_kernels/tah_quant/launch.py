"""Launching the kernels: scratch memory, sections, grid sizes. Same signatures as reference.py."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton

from taco_kernels.common.device import Device, Tuning, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.sizes import ALIGNMENT, ceil_div
from taco_kernels.tah_quant.kernels import decode_kernel, encode_kernel
from taco_kernels.tah_quant.layout import Layout, TahConfig, layout_of
from taco_kernels.tah_quant.reference import check_wire, section
from taco_kernels.tah_quant.select import choose_kernel, compact_kernel, entropy_kernel, slots_kernel
from taco_kernels.tah_quant.spec import spec_of

TUNING = {"encode": Tuning(64, 4, 3, 4, 128), "decode": Tuning(64, 4, 2, 4, 128)}
"""Their ``tile`` counts tiles, not values: the tensor cores take 64 rows."""
CHOSEN = 16384
"""Most units that a program of choose_kernel holds at a time."""
MOVED = 512
"""Tiles of a program of compact_kernel."""
LOADED = 16
"""Bytes of a load of the encoder's."""
SLOTTED = 1024
"""Most units of a program of slots_kernel."""


@lru_cache
def tuning_for(operation: str, config: TahConfig, dtype: torch.dtype, device: Device) -> Tuning:
    """TUNING, with more registers where tiles of other than 64 values or the encoding of fp32 need them.

    Where tensor cores take registers alone (Device.small) 64 tiles of 128 would spill; compiled, not timed.
    """
    tuning = TUNING[operation]
    fp32_encode = operation == "encode" and dtype == torch.float32
    if device.small and config.tile_size == 128:
        return Tuning(16, 8, tuning.stages, 1) if operation == "encode" else Tuning(32, 4, tuning.stages, 1)
    if device.small and config.tile_size == 64 and operation == "decode":
        return tuning._replace(programs=3, registers=168)
    if device.small and config.tile_size == 64 and fp32_encode:
        return tuning._replace(programs=2, registers=255)
    if config.tile_size != 64:
        tuning = tuning._replace(programs=2, registers=255)
    elif fp32_encode:
        tuning = tuning._replace(programs=3, registers=168)
    if device.capability[0] == 10 and operation == "decode" and config.low_bits == 4:
        tuning = tuning._replace(tile=tuning.tile // 2)  # Triton 3.6 does not compile it for sm_100
    return tuning


def _part(wire: torch.Tensor, layout: Layout, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A section as a kernel takes it; any valid pointer where the layout has no such section."""
    if not layout.sizes.get(name):
        return wire
    part = section(wire, name, layout)
    return part if dtype is None else part.view(dtype)


def check_tiles(layout: Layout) -> None:
    """Kernels number tiles, and the four words of a tile, with 32 bits."""
    if layout.tiles >= 2**30 - 2**20:
        raise ValueError(f"{layout.tiles} tiles in one call; use a larger tile_size or smaller messages")


def slots_of(wire: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int32[units]: numbers of the high units, -1 for the others, from the widths on the wire."""
    slots = torch.empty(layout.units, dtype=torch.int32, device=wire.device)
    units = min(SLOTTED, max(32, triton.next_power_of_2(layout.population)))
    start(
        slots_kernel,
        (ceil_div(layout.population, units), layout.populations),
        (_part(wire, layout, "widths", torch.int32), slots),
        ((layout.population, layout.populations, layout.high_units), layout.units),
        W=triton.next_power_of_2(layout.words),
        U=units,
        BY_TOKEN=layout.by_token,
    )
    return slots


def select(wire: torch.Tensor, sums: torch.Tensor, extra: torch.Tensor, layout: Layout, spec) -> None:
    """Choose the high units by ``sums`` fp32[2 * tiles], write their widths and their part of ``extra``."""
    keys = sums
    if layout.by_token:
        keys = torch.empty(layout.units, dtype=torch.int32, device=wire.device)
        padded = triton.next_power_of_2(layout.tiles_per_unit)
        units = max(1, 1024 // padded)
        start(
            entropy_kernel,
            (ceil_div(layout.units, units),),
            (sums, keys),
            (layout.units, layout.tiles_per_unit, layout.population, layout.populations),
            U=units,
            T=padded,
            C=spec,
        )
    words = layout.config.tile_size * layout.config.extra_bits // 32
    moved = 0 if layout.by_token or not layout.high_tiles else words  # tiles, where they are chosen
    slots = torch.empty(0 if moved else layout.units, dtype=torch.int32, device=wire.device)
    counts = (
        layout.population,
        layout.populations,
        layout.high_units,
        layout.last_population,
        layout.last_high_units,
    )
    held = min(CHOSEN, max(32, triton.next_power_of_2(layout.population)))
    start(
        choose_kernel,
        (layout.populations,),
        (
            keys,
            sums,
            _part(wire, layout, "widths", torch.int32),
            keys if moved else slots,
            extra.view(torch.int32) if moved else keys,
            _part(wire, layout, "extra", torch.int32) if moved else keys,
        ),
        (counts, layout.units),
        N=held,
        STEPS=ceil_div(layout.population, held),
        FUSED=not layout.by_token,
        BY_TOKEN=layout.by_token,
        P=moved,
        num_warps=max(1, held // 512),
    )
    if moved or not layout.high_tiles:
        return
    start(
        compact_kernel,
        (ceil_div(layout.tiles, MOVED),),
        (extra.view(torch.int32), _part(wire, layout, "extra", torch.int32), slots),
        (layout.tiles, layout.tiles_per_unit),
        P=words,
        R=MOVED,
    )


def encode(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """reference.encode in four kernels (tokens) or two (tiles)."""
    layout = layout_of(config, tuple(x.shape))
    whole = all(size % ALIGNMENT == 0 for size in layout.sizes.values())
    make = torch.empty if whole else torch.zeros  # zeros: the sections' padding
    wire = make(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    if not layout.numel:
        return wire
    check_tiles(layout)
    x = x.contiguous()
    if x.data_ptr() % LOADED:
        x = x.clone()
    device = device_for(x)
    tuning = tuning_for("encode", config, x.dtype, device)
    spec = spec_of(layout, tuning.tile, tuning.stages, device.interpret)
    mixed = config.extra_bits > 0
    sums = torch.empty(2 * layout.tiles if mixed else 0, dtype=torch.float32, device=x.device)
    extra_bytes = layout.tiles * config.tile_size * config.extra_bits // 8
    extra = torch.empty(extra_bytes, dtype=torch.uint8, device=x.device)
    start(
        encode_kernel,
        device.grid(ceil_div(layout.tiles, tuning.tile), tuning),
        (
            x,
            wire,
            extra if mixed else wire,
            _part(wire, layout, "scales", torch.int32),
            _part(wire, layout, "pivots"),
            sums.view(torch.int32) if mixed else wire,
        ),
        (layout.tiles, layout.tiles_per_row, layout.channels),
        C=spec,
        **tuning.options | {"enable_fp_fusion": True},  # of the entropies' sums: all else is written fused
    )
    if mixed:
        select(wire, sums, extra, layout, spec)
    return wire


def decode(wire: torch.Tensor, config: TahConfig, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """reference.decode in two kernels."""
    layout = layout_of(config, tuple(shape))
    check_wire(wire, layout)
    x = torch.empty(tuple(shape), dtype=dtype, device=wire.device)
    if not layout.numel:
        return x
    check_tiles(layout)
    if wire.data_ptr() % ALIGNMENT or not wire.is_contiguous():
        wire = wire.clone(memory_format=torch.contiguous_format)
    device = device_for(wire)
    tuning = tuning_for("decode", config, dtype, device)
    spec = spec_of(layout, tuning.tile, tuning.stages, device.interpret)
    slots = slots_of(wire, layout) if config.extra_bits else wire
    start(
        decode_kernel,
        device.grid(ceil_div(layout.tiles, tuning.tile), tuning),
        (
            x,
            wire,
            _part(wire, layout, "extra"),
            _part(wire, layout, "scales", torch.int32),
            _part(wire, layout, "pivots"),
            slots,
        ),
        (layout.tiles, layout.high_tiles, layout.tiles_per_unit, layout.tiles_per_row, layout.channels),
        C=spec,
        **tuning.options,
    )
    return x
