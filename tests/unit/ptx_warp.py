"""PTX of a whole warp on numpy: what ptx.py does, and predicates, products of matrices and stores."""

import re

import numpy as np

from tests.unit.ptx import OPERATIONS, to_halves

LANES = np.arange(32)


def _single(function):
    """An fp32 operation, in fp64 and rounded once."""

    def rounded(*operands: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            result = function(*(x.view(np.float32).astype(np.float64) for x in operands))
            return result.astype(np.float32).view(np.uint32)

    return rounded


def _to_bf16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16x2.f32."""
    parts = []
    for x in (high, low):
        nan = np.isnan(x.view(np.float32))
        rounded = (x.astype(np.uint64) + 0x7FFF + ((x >> np.uint32(16)) & 1)) >> np.uint64(16)
        parts.append(np.where(nan, 0x7FFF, rounded).astype(np.uint32))
    return parts[0] << np.uint32(16) | parts[1]


def _quiet_halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return to_halves(high, low)


WARP_OPERATIONS = OPERATIONS | {
    "mov.f32": lambda a: a,
    "mul.lo.u32": lambda a, b: a * b,
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.view(np.int32)).view(np.uint32),
    "popc.b32": lambda a: np.array([int(x).bit_count() for x in a], dtype=np.uint32),
    "fma.rn.f32": _single(lambda a, b, c: a * b + c),
    "add.rn.f32": _single(lambda a, b: a + b),
    "cvt.rn.bf16x2.f32": _to_bf16,
    "cvt.rn.f16x2.f32": _quiet_halves,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.gt.s32": lambda a, b: a.view(np.int32) > b.view(np.int32),
}


def _product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k16 of fp16 fragments, exact and rounded once."""
    group, thread = LANES >> 2, LANES & 3
    left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, word in enumerate(a):
        for j, half in enumerate(word.view(np.float16).reshape(32, 2).T):
            left[group + 8 * (i & 1), 2 * thread + j + 8 * (i >> 1)] = half
    for i, word in enumerate(b):
        for j, half in enumerate(word.view(np.float16).reshape(32, 2).T):
            right[2 * thread + j + 8 * i, group] = half
    for i, word in enumerate(c):
        total[group + 8 * (i >> 1), 2 * thread + (i & 1)] = word.view(np.float32)
    total = (left @ right + total).astype(np.float32)
    return [total[group + 8 * (i >> 1), 2 * thread + (i & 1)].view(np.uint32) for i in range(4)]


def run(text: str, registers: dict[str, np.ndarray], memory: np.ndarray) -> dict[str, np.ndarray]:
    """Run straight-line PTX on 32 lanes.

    Args:
        text: the assembly.
        registers: uint32[32] by name, addresses too: bytes into ``memory``.
        memory: uint32 array that stores go to.

    Returns:
        All registers.

    Raises:
        ValueError: an instruction that is not known here.
    """
    registers = dict(registers)

    def read(name: str) -> np.ndarray:
        if re.fullmatch(r"0[xf][0-9a-fA-F]+|[0-9]+", name):
            return np.full(32, int(name.replace("f", "x", 1) if name[1:2] == "f" else name, 0), np.uint32)
        return registers[name]

    for line in (part.strip() for part in re.sub(r"^\s*\{|\}\s*$", "", text.strip()).split(";")):
        if not line or line.startswith(".reg"):
            continue
        active = np.ones(32, dtype=bool)
        if line.startswith("@"):
            predicate, line = line[1:].split(maxsplit=1)
            active = registers[predicate]
        operation, rest = line.split(maxsplit=1)
        if operation == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32":
            targets, *operands = (
                [x.strip() for x in part.split(",")] for part in re.findall(r"{(.*?)}", rest)
            )
            registers.update(
                zip(targets, _product(*([read(x) for x in part] for part in operands)), strict=True)
            )
        elif operation.startswith("st.global.v4."):
            address, distance, values = re.fullmatch(r"\[(\S+?)\+(\d+)\], {(.*)}", rest).groups()
            word = (registers[address] + np.uint32(distance)) // 4
            for i, value in enumerate(values.split(", ")):
                memory[word[active] + i] = read(value)[active]
        elif operation in WARP_OPERATIONS:
            target, *sources = rest.replace(" ", "").split(",")
            result = WARP_OPERATIONS[operation](*(read(source) for source in sources))
            result = result if result.dtype == bool else result.astype(np.uint32)
            registers[target] = result if active.all() else np.where(active, result, registers[target])
        else:
            raise ValueError(f"{operation} is not known: {line}")
    return registers
