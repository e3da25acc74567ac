"""A few PTX instructions on numpy arrays: what the kernels' inline assembly does, without a GPU."""

import re

import numpy as np


def run(text: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run straight-line PTX.

    Args:
        text: the assembly; operands ``$0``... are the outputs, then the inputs.
        outputs: number of outputs.
        inputs: uint32 arrays of one shape, or fp32 where the text reads an fp32 register.

    Returns:
        The outputs as uint32 arrays (16 bits of each where the text writes half a register).

    Raises:
        ValueError: an instruction that is not known here, or an output that was not written.
    """
    registers = {f"${outputs + i}": np.asarray(x).view(np.uint32) for i, x in enumerate(inputs)}

    def read(name: str) -> np.ndarray:
        if re.fullmatch(r"0x[0-9a-fA-F]+|[0-9]+", name):
            return np.full(np.asarray(inputs[0]).shape, int(name, 0) & 0xFFFFFFFF, dtype=np.uint32)
        return registers[name]

    for line in (part.strip() for part in re.sub(r"^\s*\{|\}\s*$", "", text.strip()).split(";")):
        if not line or line.startswith(".reg"):
            continue
        operation, rest = line.split(maxsplit=1)
        if operation == "mov.b32" and rest.startswith("{"):
            low, high, source = re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest).groups()
            registers[low], registers[high] = read(source) & 0xFFFF, read(source) >> 16
            continue
        target, *sources = rest.replace(" ", "").split(",")
        if operation not in OPERATIONS:
            raise ValueError(f"{operation} is not known: {line}")
        registers[target] = OPERATIONS[operation](*(read(source) for source in sources)).astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32 without sign replication."""
    assert not (selector & 0x8888).any()
    pieces = [(x >> np.uint32(8 * i)) & 0xFF for x in (a, b) for i in range(4)]
    stack, result = np.stack(pieces), np.zeros_like(a)
    for i in range(4):
        result |= np.choose((selector >> np.uint32(4 * i)) & 7, stack) << np.uint32(8 * i)
    return result


def lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3.b32: bit by bit, the table's entry number 4 a + 2 b + c."""
    result = np.zeros_like(a)
    for entry in range(8):
        if int(table.flat[0]) >> entry & 1:
            terms = (x if entry >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0)))
            result |= np.bitwise_and.reduce(list(terms))
    return result


def dot(signed: bool):
    """dp4a.u32.u32 or dp4a.u32.s32."""

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = c.astype(np.int64)
        for i in range(4):
            times = ((b >> np.uint32(8 * i)) & 0xFF).astype(np.int64)
            if signed:
                times = np.where(times >= 128, times - 256, times)
            total = total + ((a >> np.uint32(8 * i)) & 0xFF).astype(np.int64) * times
        return total & 0xFFFFFFFF

    return function


def halves(function):
    """An fp16x2 operation, in fp64 and rounded once, from one on numbers."""

    def both(*operands: np.ndarray) -> np.ndarray:
        result = np.zeros(operands[0].shape, dtype=np.uint32)
        for shift in (np.uint32(0), np.uint32(16)):
            numbers = [((x >> shift) & 0xFFFF).astype(np.uint16).view(np.float16) for x in operands]
            rounded = function(*(x.astype(np.float64) for x in numbers)).astype(np.float16)
            result |= rounded.view(np.uint16).astype(np.uint32) << shift
        return result

    return both


def to_halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.f16x2.f32."""
    high, low = (x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low))
    return high << np.uint32(16) | low


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": permute,
    "lop3.b32": lookup,
    "dp4a.u32.u32": dot(False),
    "dp4a.u32.s32": dot(True),
    "cvt.rn.f16x2.f32": to_halves,
    "fma.rn.f16x2": halves(lambda a, b, c: a * b + c),
    "add.rn.f16x2": halves(lambda a, b: a + b),
}
