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


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32, with the replication of signs."""
    pieces = np.stack([(x >> np.uint32(8 * i)) & 0xFF for x in (a, b) for i in range(4)])
    result = np.zeros_like(a)
    for i in range(4):
        choice = int(selector.flat[0]) >> 4 * i
        piece = pieces[choice & 7]
        piece = np.where(piece >= 128, 0xFF, 0) if choice & 8 else piece
        result |= piece.astype(np.uint32) << np.uint32(8 * i)
    return result


def _singles_of_bf16(x: np.ndarray) -> np.ndarray:
    """fp32[32, 2] of bf16x2."""
    return np.stack((x << np.uint32(16), x & np.uint32(0xFFFF0000)), axis=1).view(np.float32)


def _largest_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.NaN.bf16x2."""
    high = np.maximum(_singles_of_bf16(a), _singles_of_bf16(b)).view(np.uint32) >> np.uint32(16)
    return high[:, 1] << np.uint32(16) | high[:, 0]


def _bf16(function):
    """An operation on bf16x2, in fp64 and rounded once."""

    def both(*operands: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            numbers = [_singles_of_bf16(x).astype(np.float64) for x in operands]
            result = function(*numbers).astype(np.float32).view(np.uint32)
        return _to_bf16(result[:, 1], result[:, 0])

    return both


def _half_towards(direction: float):
    """cvt.rm.f16.f32 or cvt.rp.f16.f32."""

    def function(x: np.ndarray) -> np.ndarray:
        x = x.view(np.float32)
        half = x.astype(np.float16)
        beyond = half.astype(np.float32) > x if direction < 0 else half.astype(np.float32) < x
        return np.where(beyond, np.nextafter(half, np.float16(direction)), half).view(np.uint16)

    return function


WARP_OPERATIONS = OPERATIONS | {
    "prmt.b32": _permute,
    "sub.u32": lambda a, b: a - b,
    "not.b32": lambda a: ~a,
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "bfind.u32": lambda a: np.array([int(x).bit_length() - 1 & 0xFFFFFFFF for x in a], dtype=np.uint32),
    "max.NaN.bf16x2": _largest_bf16,
    "abs.bf16x2": lambda a: a & np.uint32(0x7FFF7FFF),
    "fma.rn.bf16x2": _bf16(lambda a, b, c: a * b + c),
    "fma.rn.relu.bf16x2": _bf16(lambda a, b, c: np.maximum(a * b + c, 0)),
    "max.f32": _single(np.fmax),
    "min.f32": _single(np.fmin),
    "mul.rn.f32": _single(lambda a, b: a * b),
    "sub.rn.f32": _single(lambda a, b: a - b),
    "lg2.approx.ftz.f32": _single(np.log2),
    "rcp.approx.ftz.f32": _single(lambda a: 1 / a),
    "cvt.rm.f16.f32": _half_towards(-np.inf),
    "cvt.rp.f16.f32": _half_towards(np.inf),
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
    "setp.ne.u32": lambda a, b: a != b,
    "setp.gt.f32": lambda a, b: a.view(np.float32) > b.view(np.float32),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "mad.wide.s32": lambda a, b, c: a * b + c,
    "setp.eq.f32": lambda a, b: a.view(np.float32) == b.view(np.float32),
    "setp.lt.and.f32": lambda a, b, p: (a.view(np.float32) < b.view(np.float32)) & p,
    "setp.lt.f32": lambda a, b: a.view(np.float32) < b.view(np.float32),
    "mov.f32": lambda a: a,
    "mul.lo.u32": lambda a, b: a * b,
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.view(np.int32)).view(np.uint32),
    "popc.b32": lambda a: np.array([int(x).bit_count() for x in a], dtype=np.uint32),
    "fma.rn.f32": _single(lambda a, b, c: a * b + c),
    "add.rn.f32": _single(lambda a, b: a + b),
    "cvt.rn.bf16x2.f32": _to_bf16,
    "cvt.rn.f16x2.f32": _quiet_halves,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.s32": lambda a, b: a.view(np.int32) < b.view(np.int32),
    "setp.gt.and.s32": lambda a, b, p: (a.view(np.int32) > b.view(np.int32)) & p,
    "cvt.rn.f32.s32": lambda a: a.view(np.int32).astype(np.float32).view(np.uint32),
    "cvt.u64.u32": lambda a: a,
    "add.s64": lambda a, b: a + b,
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "setp.gt.s32": lambda a, b: a.view(np.int32) > b.view(np.int32),
}


def _product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], kind: str) -> list[np.ndarray]:
    """mma.m16n8k16 of fp16 or bf16 fragments, exact and rounded once."""

    def halves(word: np.ndarray) -> np.ndarray:
        return (_singles_of_bf16(word) if kind == "bf16" else word.view(np.float16).reshape(32, 2)).T

    group, thread = LANES >> 2, LANES & 3
    left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, word in enumerate(a):
        for j, half in enumerate(halves(word)):
            left[group + 8 * (i & 1), 2 * thread + j + 8 * (i >> 1)] = half
    for i, word in enumerate(b):
        for j, half in enumerate(halves(word)):
            right[2 * thread + j + 8 * i, group] = half
    for i, word in enumerate(c):
        total[group + 8 * (i >> 1), 2 * thread + (i & 1)] = word.view(np.float32)
    with np.errstate(all="ignore"):
        total = (left @ right + total).astype(np.float32)
    return [total[group + 8 * (i >> 1), 2 * thread + (i & 1)].view(np.uint32) for i in range(4)]


def run(text: str, registers: dict[str, np.ndarray], memory: np.ndarray) -> dict[str, np.ndarray]:
    """Run straight-line PTX on 32 lanes.

    Args:
        text: the assembly.
        registers: uint32[32] by name, addresses too: bytes into ``memory``.
        memory: uint32 array that loads come from and stores go to.

    Returns:
        All registers.

    Raises:
        ValueError: an instruction that is not known here.
    """
    registers = dict(registers)

    def read(name: str) -> np.ndarray:
        if name == "-1":
            return np.full(32, 0xFFFFFFFF, np.uint32)
        if re.fullmatch(r"0[xf][0-9a-fA-F]+|[0-9]+", name):
            return np.full(32, int(name.replace("f", "x", 1) if name[1:2] == "f" else name, 0), np.uint32)
        return registers[name]

    # braces of scopes stand alone; those of vectors do not
    text = re.sub(r"^\s*[{}]\s*$|^\s*\{\s*(?=\.reg)|(?<=;)\s*\}\s*$", "", text, flags=re.MULTILINE)
    for line in (part.strip() for part in text.split(";")):
        if not line or line.startswith(".reg"):
            continue
        active = np.ones(32, dtype=bool)
        if line.startswith("@"):
            predicate, line = line[1:].split(maxsplit=1)
            active = registers[predicate]
        operation, rest = line.split(maxsplit=1)
        if operation.startswith("mma.sync.aligned.m16n8k16.row.col.f32."):
            kind = operation.split(".")[-2]
            targets, *operands = (
                [x.strip() for x in part.split(",")] for part in re.findall(r"{(.*?)}", rest)
            )
            registers.update(
                zip(targets, _product(*([read(x) for x in part] for part in operands), kind), strict=True)
            )
        elif operation.startswith("st.global.v4."):
            address, distance, values = re.fullmatch(r"\[(\S+?)\+(\d+)\], {(.*)}", rest).groups()
            word = (registers[address] + np.uint32(distance)) // 4
            for i, value in enumerate(values.split(", ")):
                memory[word[active] + i] = read(value)[active]
        elif operation == "st.global.f32" and "+" not in rest:
            address, value = re.fullmatch(r"\[(\S+)\], (\S+)", rest).groups()
            memory[registers[address][active] // 4] = read(value)[active]
        elif operation == "ld.global.f32":
            target, address = re.fullmatch(r"(\S+), \[(\S+)\]", rest).groups()
            registers[target] = memory[np.where(active, registers[address], 0) // 4]
        elif operation == "st.global.f32":
            address, distance, value = re.fullmatch(r"\[(\S+?)\+(\d+)\], (\S+)", rest).groups()
            memory[(registers[address] + np.uint32(distance))[active] // 4] = read(value)[active]
        elif operation == "ld.global.nc.s16":
            target, address, distance = re.fullmatch(r"(\S+), \[(\S+?)\+(\d+)\]", rest).groups()
            halves = memory.view(np.int16)[(registers[address] + np.uint32(distance)) // 2]
            registers[target] = halves.astype(np.int32).view(np.uint32)
        elif operation == "ld.global.b32":
            target, address, distance = re.fullmatch(r"(\S+), \[(\S+?)\+(\d+)\]", rest).groups()
            words = (registers[address] + np.uint32(distance)) // 4
            registers[target] = registers[target].copy()
            registers[target][active] = memory[words[active]]
        elif operation in ("st.global.b16", "st.global.b32"):
            address, value = re.fullmatch(r"\[(\S+)\], (\S+)", rest).groups()
            kind = np.uint16 if operation.endswith("16") else np.uint32
            memory.view(kind)[registers[address][active] // kind().itemsize] = read(value)[active].astype(
                kind
            )
        elif operation == "shfl.sync.up.b32":
            targets, source, distance, *_ = rest.replace(" ", "").split(",")
            target, predicate = targets.split("|")
            registers[predicate] = int(distance) <= LANES
            registers[target] = read(source)[np.maximum(LANES - int(distance), 0)]
        elif operation == "vote.sync.ballot.b32":
            target, predicate, _ = rest.replace(" ", "").split(",")
            registers[target] = np.full(32, (registers[predicate] << LANES).sum(), dtype=np.uint32)
        elif operation == "shfl.sync.idx.b32":
            target, source, lane, *_ = rest.replace(" ", "").split(",")
            registers[target] = read(source)[read(lane).astype(np.int64)]
        elif operation == "shfl.sync.bfly.b32":
            target, source, distance, *_ = rest.replace(" ", "").split(",")
            registers[target] = read(source)[LANES ^ int(distance)]
        elif operation.startswith("selp."):
            target, *sources, predicate = rest.replace(" ", "").split(",")
            registers[target] = np.where(registers[predicate], *(read(source) for source in sources))
        elif operation == "mov.b32" and rest.endswith("}"):
            target, low, high = re.fullmatch(r"(\S+), {(\S+), (\S+)}", rest).groups()
            registers[target] = registers[low] & 0xFFFF | registers[high] << np.uint32(16)
        elif operation == "mov.b32" and rest.startswith("{"):
            low, high, source = re.fullmatch(r"{(\S+), (\S+)}, (\S+)", rest).groups()
            registers[low], registers[high] = read(source) & 0xFFFF, read(source) >> np.uint32(16)
        elif operation in WARP_OPERATIONS:
            target, *sources = rest.replace(" ", "").split(",")
            result = WARP_OPERATIONS[operation](*(read(source) for source in sources))
            result = result if result.dtype == bool else result.astype(np.uint32)
            registers[target] = result if active.all() else np.where(active, result, registers[target])
        else:
            raise ValueError(f"{operation} is not known: {line}")
    return registers
