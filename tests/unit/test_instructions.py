"""Counting a kernel's instructions by pipe, and what random rounding may add to them."""

import pytest

pytest.importorskip("triton")
from taco_kernels import CodecConfig
from taco_kernels.benchmarks.instructions import compile_kernel, loop_of, pipe_of


def test_pipes() -> None:
    opcodes = ["IMAD.WIDE.U32", "IMAD.MOV.U32", "IDP.4A.U8.S8", "LOP3.LUT", "HADD2", "LDS.128", "BRA"]
    assert [pipe_of(o) for o in opcodes] == ["wide", "FMA", "dot", "ALU", "FMA", "memory", "other"]


def test_the_longest_loop_counts() -> None:
    lines = [f"/*{16 * i:04x}*/   @P0 FADD R0, R1, R2 ;" for i in range(200)]
    lines[20] = "/*0140*/   LOP3.LUT R0, R1, R2 ;"
    lines[150] = "/*0960*/   @P1 BRA 0x140 ;"
    lines[160] = "/*0a00*/   BRA 0x9f0 ;"
    assert loop_of("\n".join(lines)) == ["LOP3.LUT", *["FADD"] * 129, "BRA"]


def test_random_rounding_stays_cheap() -> None:
    """Random rounding costs few instructions, no spill, and no program that fits a multiprocessor."""
    figures = {
        (operation, rounding): compile_kernel(operation, CodecConfig("int6", rounding=rounding), 4, 90)
        for operation in ("encode", "decode")
        for rounding in ("nearest", "dither")
    }
    for operation, most, registers in (("encode", 2.9, 255), ("decode", 1.5, 168)):
        nearest, dither = figures[operation, "nearest"], figures[operation, "dither"]
        assert dither.pipes["all"] - nearest.pipes["all"] < most
        assert dither.spills == 0 and dither.registers <= registers
