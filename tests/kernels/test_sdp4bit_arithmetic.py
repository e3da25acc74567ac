"""What SDP4Bit's kernels compute another way on a GPU than in the interpreter, checked on the CPU."""

import numpy as np
import pytest

from tests.unit import ptx

pytest.importorskip("triton")
from taco_kernels.sdp4bit.blocks import masked_xor


@pytest.mark.parametrize(("bits", "shifts"), [(4, (0, 4, 8, 12, 16)), (8, (0, 8))])
def test_codes_are_read_where_they_lie(bits: int, shifts: tuple[int, ...]) -> None:
    """blocks.code: masked bits under a magic number's exponent, less the magic number and the offset."""
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    for shift in shifts:
        magic = 0x4B000000 - (shift << 23) + ((128 << shift) if bits == 8 else 0)
        constant = np.full_like(words, magic)
        mask, offset = 2**bits - 1 << shift, 2 ** (bits - 1)
        (number,) = ptx.run(masked_xor(mask), 1, [words, constant])
        value = number.view(np.float32) - np.float32(2.0 ** (23 - shift) + offset)
        code = (words >> shift & (2**bits - 1)).astype(np.int64)
        code = np.where(code < 128, code, code - 256) if bits == 8 else code - 8
        assert np.array_equal(value, code.astype(np.float32))


@pytest.mark.parametrize("qmax", [7.0, 127.0])
def test_the_step_is_a_correctly_rounded_quotient(qmax: float) -> None:
    """groups.steps_of multiplies by the constant's reciprocal and corrects once: every mantissa."""
    for exponent in (-100, 0, 100):
        amax = np.ldexp(np.arange(2**23, 2**24, dtype=np.float64), exponent - 23).astype(np.float32)
        reciprocal = np.float32(1 / qmax)
        estimate = amax * reciprocal
        rest = amax.astype(np.float64) - estimate.astype(np.float64) * qmax  # exact, in fp32 too
        assert np.array_equal(rest.astype(np.float32).astype(np.float64), rest)
        step = (rest * np.float64(reciprocal) + estimate.astype(np.float64)).astype(np.float32)
        assert np.array_equal(step, (amax.astype(np.float64) / qmax).astype(np.float32))
