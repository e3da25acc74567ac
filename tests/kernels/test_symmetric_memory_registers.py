"""The all-reduce over symmetric memory, compiled ahead of time: two programs must fit on a multiprocessor."""

import re
import subprocess

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.common.device import Device
from taco_kernels.symmetric_memory.all_reduce import two_shot_kernel
from taco_kernels.symmetric_memory.collectives import OPTIONS
from taco_kernels.symmetric_memory.group import PROGRAMS_PER_MULTIPROCESSOR
from taco_kernels.symmetric_memory.lane import exchange, tile_of
from taco_kernels.taco import CodecConfig
from taco_kernels.taco.spec import make_flags, make_spec

H200 = Device(132, (9, 0), False)
INT64 = ("memory", "error", "timeout")
POINTERS = dict(x="*bf16", out="*bf16", to_wire="*bf16", from_wire="*fp16", table="*i64", steps_done="*i64")
SHARED_MEMORY = 227 * 1024  # of a multiprocessor, for all its programs


def compile_two_shot(config: CodecConfig):
    """As for a contiguous bf16 tensor of whole tiles, four ranks and sm_90."""
    kernel, tile, flags = two_shot_kernel, tile_of(config, H200), make_flags(False, False, 1)
    full, half = (make_spec(config, size // config.group_size, H200, True) for size in (tile, tile // 2))
    constants = dict(C=full, D=full, HALF=half, DHALF=half, FLAGS=flags, OUT_FLAGS=flags, run=1, inner=1)
    constants |= dict(E=exchange(4, 264, 1))
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        else:
            signature[name] = POINTERS.get(name, "i64" if name in INT64 else "i32")
        if name in POINTERS or name in ("numel", "stride", "length"):
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


def test_two_programs_fit(tmp_path) -> None:
    """Registers and shared memory of one leave room for another, and nothing is spilled."""
    compiled, cubin = compile_two_shot(CodecConfig("int8")), tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 255
    assert compiled.metadata.shared * PROGRAMS_PER_MULTIPROCESSOR <= SHARED_MEMORY
