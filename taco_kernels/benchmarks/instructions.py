"""Instructions a value in the codec kernels' loops, compiled ahead of time: no GPU, no times."""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.layout import FORMATS, ROUNDINGS, CodecConfig
from taco_kernels.triton import launch

KERNELS = {
    "encode": launch.encode_kernel,
    "decode": launch.decode_kernel,
    "decode_sum": launch.decode_sum_kernel,
    "decode_sum_encode": launch.decode_sum_encode_kernel,
}
# Pipes of a multiprocessor. IMAD.WIDE counts as two of the FMA pipe's; ALU instructions issue at half rate.
PIPES = {
    "ALU": "F2FP FMNMX FSEL FSETP I2FP IABS IADD3 IMNMX ISETP LEA LOP3 PLOP3 PRMT SEL SGXT SHF VIADD VIMNMX",
    "FMA": "FADD FFMA FMUL HADD2 HFMA2 HMUL2 IMAD",
    "wide": "IMAD.WIDE IMAD.HI",
    "dot": "IDP",
    "memory": "LDG LDGSTS LDL LDS LDSM SHFL STG STL STS STSM",
    "tensor": "HGMMA HMMA IMMA",
}
_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}


class Figures(NamedTuple):
    """What the compiler made of one kernel."""

    pipes: dict[str, float]
    """Instructions a value, by pipe and ``all``; of the loop over tiles, or of a kernel without one."""
    registers: int
    """A thread."""
    spills: int
    """Loads and stores of registers in local memory."""
    shared: int
    """Bytes of shared memory a program."""


def pipe_of(opcode: str) -> str:
    """``IMAD.WIDE.U32`` -> wide; ``other`` for what PIPES does not name."""
    first, _, rest = opcode.partition(".")
    return _PIPE_OF.get(f"{first}.{rest.partition('.')[0]}", _PIPE_OF.get(first, "other"))


def loop_of(sass: str) -> list[str]:
    """Opcodes of the longest loop, or of everything where no loop has 64 instructions."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    start, end = 0, lines[-1][0] if lines else 0
    longest = 64 * 16
    for at, text in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and at - int(target[1], 16) > longest:
            start, end = int(target[1], 16), at
            longest = end - start
    return [re.sub(r"^@\S+\s+", "", text).split()[0] for at, text in lines if start <= at <= end]


def compile_kernel(operation: str, config: CodecConfig, senders: int, capability: int) -> Figures:
    """Compile one kernel as a contiguous bf16 call of whole tiles would, for sm_``capability``."""
    device = launch.Device(132, capability >= 89, False)
    tuning = launch.tuning_of(operation, config)
    spec = launch.spec_of(config, device, tuning)
    flags = launch.make_flags(False, False, tuning.stages)
    function = KERNELS[operation]
    constants = dict(C=spec, D=spec, FLAGS=flags, W=senders, run=1, inner=1, chunks=1)
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        aligned = name in ("wires", "out", "x")
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif re.fullmatch("(key|stream|first_run)(_in|_out)?", name):
            signature[name] = "i64"
        else:
            signature[name] = ("*bf16" if name == "x" else "*u8") if aligned else "i32"
            attributes[i,] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=tuning.warps, maxnreg=tuning.registers, enable_fp_fusion=False),
    )
    return figures_of(compiled, tuning.tile / (32 * tuning.warps))


def figures_of(compiled: triton.compiler.CompiledKernel, per_thread: float) -> Figures:
    """Of a kernel whose loop handles ``per_thread`` values in each thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass, usage = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, flag, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for flag in ("-sass", "-res-usage")
        )
    opcodes = loop_of(sass)
    pipes = {pipe: count / per_thread for pipe, count in Counter(map(pipe_of, opcodes)).items()}
    spills = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    return Figures({**pipes, "all": len(opcodes) / per_thread}, registers, spills, compiled.metadata.shared)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--operations", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--roundings", nargs="+", default=list(ROUNDINGS), choices=ROUNDINGS)
    parser.add_argument("--group-size", type=int, default=128, help="values a group")
    parser.add_argument("--senders", type=int, default=4, help="wires that are summed")
    parser.add_argument("--capability", type=int, default=90, help="80, 89, 90, ...")


def run(options: argparse.Namespace) -> None:
    """Compile and print one line a kernel."""
    columns = ["all", *PIPES]
    print(f"sm_{options.capability}, instructions a value:", *columns, "| registers spills shared")
    for operation in options.operations:
        for format in options.formats:
            for rounding in options.roundings:
                if rounding == "dither" and format.startswith("fp8"):
                    continue
                config = CodecConfig(format, options.group_size, "dual", rounding)
                figures = compile_kernel(operation, config, options.senders, options.capability)
                counts = " ".join(f"{figures.pipes.get(column, 0.0):5.2f}" for column in columns)
                print(
                    f"{operation:18s}{format:10s}{rounding:11s}{counts} | {figures.registers} "
                    f"{figures.spills} {figures.shared}",
                    flush=True,
                )
