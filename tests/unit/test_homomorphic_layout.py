"""How the sketch's kernels compile for sm_90: which lanes hold what decides how many sectors they touch."""

import re

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.count_sketch import encode_kernels, launch, peel_kernels

POINTERS = {
    "cells": "*i32",
    "pairs": "*i64",
    "words": "*i32",
    "exponents": "*u8",
    "hashes": "*i32",
    "values": "*fp32",
    "counters": "*i32",
    "estimates": "*fp32",
    "x": "*fp32",
    "thresholds": "*fp32",
    "heads": "*i64",
    "links": "*i64",
}
GRID = {"MANTISSA": 22, "FLOOR": 32, "WIDTH": 1024}


def compiled(kernel, warps: int, constants: dict[str, int], aligned: tuple[str, ...] = ()):
    """The kernel as a launch with sizes that divide by 16 compiles it."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS or n in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def test_peeling_keeps_an_element_a_thread_and_a_row_a_warp() -> None:
    """Of a tile of rows Triton gives a warp 32 rows where columns are permuted: 32 lines an instruction."""
    shape = {"ROWS": launch.PEEL_ROWS, "CELLS": launch.PEEL_CELLS}
    kernel = compiled(peel_kernels.peel_kernel, launch.PEEL_WARPS, {**GRID, **shape, "BITS": 32, "SHIFT": 20})
    text = kernel.asm["ttgir"]
    one = re.search(r"(#\w+) = #ttg.blocked<\{sizePerThread = \[1\], threadsPerWarp = \[32\]", text)[1]
    atomics = re.findall(r"atomic_rmw.*\(tensor<\d+x!tt.ptr<i64>, (#\w+)>", text)
    assert len(atomics) == 3 + 2 * 3, "three to count the members, two each that peeling takes off"
    assert set(atomics) == {one}
    loop = text[text.rindex("gpu.barrier", 0, text.index("atomic_rmw add, relaxed, cta, %before")) :]
    assert "convert_layout" not in loop.split("tt.atomic_rmw add, relaxed, gpu")[0]


@pytest.mark.parametrize("bits", [16, 32])
def test_a_sketch_row_is_summed_in_registers(bits: int, monkeypatch) -> None:
    """Columns move in fours, loaded at once, and inside a four: nothing through shared memory."""
    monkeypatch.setitem(POINTERS, "cells", f"*i{bits}")
    warps = GRID["WIDTH"] // launch.SKETCH_COLUMNS
    aligned = ("numel", "x_stride", "cells_stride")
    kernel = compiled(encode_kernels.sketch_kernel, warps, GRID, aligned)
    assert kernel.metadata.shared == 0
    fours = GRID["WIDTH"] // (32 * warps * 4)
    assert len(re.findall(r"ld\.global\.v4\.b32", kernel.asm["ptx"])) == 2 * fours, "before and in the loop"
