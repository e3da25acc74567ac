"""The inline assembly of the codec kernels against the reference, instruction by instruction on the CPU.

Triton's interpreter runs other code in its place, so without a GPU this is what checks it.
"""

import numpy as np
import pytest
import torch

from taco_kernels import FORMATS, CodecConfig, Stream, reference
from taco_kernels.count_sketch.philox import uniform_nibbles
from tests.unit import ptx

pytest.importorskip("triton")
from taco_kernels.taco import packing, unpacking

RUNS = 512  # of 16 elements
STREAM = Stream(key=11, stream=5, offset=0)
CASES = [(f, r) for f in FORMATS for r in ("nearest", "stochastic") if r != "nearest" or f[:3] == "int"]
INTEGERS = [f for f in FORMATS if f.startswith("int")]


def random_words(nibbles: torch.Tensor) -> list[np.ndarray]:
    """The two registers of random bits of each run, from int32[runs, 16] in element order."""
    parts = nibbles.view(-1, 2, 2, 4).numpy().astype(np.uint32)  # p, q, k
    shift = np.array([[0, 8, 16, 24], [4, 12, 20, 28]], dtype=np.uint32)
    return [np.bitwise_or.reduce(parts[:, :, q] << shift, axis=(1, 2)) for q in range(2)]


def numbers_of(h: torch.Tensor, inverse: float, config: CodecConfig) -> np.ndarray:
    """What rounding.fixed_point and rounding.scaled make of h fp32[runs, 16]."""
    if config.is_float:
        scale = 2.0**-8 if config.format == "fp8-e4m3" else 1.0
        return (h * (torch.tensor(inverse) * scale)).numpy()
    bias = 0 if config.bits == 8 else 2 ** (config.bits - 1)
    magic = 12582912.0 + bias if config.rounding == "nearest" else 49152.0 + bias + 248 / 256
    fused = h.double() * float(np.float32(inverse)) + magic  # exact, so that it is rounded once
    return fused.float().numpy().view(np.uint32)


def words_of_plane(plane: torch.Tensor, width: int) -> list[np.ndarray]:
    """uint32 registers from the ``width`` bytes of each run (2 bytes: sign-extended, as they are loaded)."""
    data = plane.contiguous().numpy()
    if width == 2:
        return [data.view(np.int16).reshape(-1).astype(np.int32).view(np.uint32)]
    return list(data.view(np.uint32).reshape(-1, width // 4).T)


@pytest.mark.parametrize(("format", "rounding"), CASES)
def test_encode(format: str, rounding: str) -> None:
    config = CodecConfig(format, 32, rounding=rounding)
    g = torch.Generator().manual_seed(1)
    h = torch.randn(RUNS, 16, generator=g) * torch.logspace(-6, 0, RUNS)[:, None]
    inverse = float(np.float32(config.qmax / float(h.abs().max())))
    h[0, :3] = torch.tensor([0.0, -0.0, -float(h.abs().max())])
    r = None if rounding == "nearest" else uniform_nibbles(STREAM, 0, h.numel(), "cpu").view(RUNS, 16)
    codes = reference.round_to_grid(h, torch.tensor([[inverse]]), config, r)
    planes = [
        words_of_plane(p, 2 * b) for p, b in zip(reference.pack(codes, config), config.planes, strict=True)
    ]
    expected = [word for plane in planes for word in plane]

    inputs = list(numbers_of(h, inverse, config).T)
    inputs += [] if r is None else random_words(r)
    text = packing.assembly(format, config.bits, rounding == "nearest")
    assert (
        packing.constraints(format, config.bits, rounding == "nearest").count(",")
        == len(expected + inputs) - 1
    )
    result = ptx.run(text, len(expected), [np.ascontiguousarray(x) for x in inputs])
    if format == "int5":  # two bytes are stored
        result[2], expected[2] = result[2] & 0xFFFF, expected[2] & 0xFFFF
    for got, wanted in zip(result, expected, strict=True):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("dithered", [False, True])
@pytest.mark.parametrize("format", INTEGERS)
def test_decode(format: str, dithered: bool) -> None:
    config = CodecConfig(format, 32)
    qmax, bias = int(config.qmax), 0 if config.bits == 8 else 2 ** (config.bits - 1)
    q = torch.randint(-qmax, qmax + 1, (RUNS, 16), generator=torch.Generator().manual_seed(2))
    q[0, 0], q[0, 1], q[0, 9], q[0, 15] = -qmax, qmax, -qmax, qmax
    r = uniform_nibbles(STREAM, 0, q.numel(), "cpu").view(RUNS, 16)
    planes = reference.pack((q + bias).to(torch.uint8), config)
    inputs = [w for p, b in zip(planes, config.planes, strict=True) for w in words_of_plane(p, 2 * b)]
    inputs += random_words(r) if dithered else []
    text = unpacking.assembly(config.bits, dithered)
    assert unpacking.constraints(config.bits, dithered).count(",") == 16 + len(inputs) - 1
    result = ptx.run(text, 16, [np.ascontiguousarray(x) for x in inputs])
    values = np.stack(result, axis=1).astype(np.uint16).view(np.float16).astype(np.float64)
    values = torch.from_numpy(values) - unpacking.offset(config.bits, dithered)
    expected = 16 * (q.double() + reference.dither(r).double()) if dithered else q.double()
    assert torch.equal(values, expected)


@pytest.mark.parametrize("format", INTEGERS)
def test_numbers_of_a_sum_of_senders(format: str) -> None:
    config = CodecConfig(format, 32)
    qmax, bias = int(config.qmax), 2 ** (config.bits - 1)
    q = torch.randint(-qmax, qmax + 1, (RUNS, 4), generator=torch.Generator().manual_seed(3))
    r = uniform_nibbles(STREAM, 0, q.numel(), "cpu").view(RUNS, 4)
    q[0], r[0] = torch.tensor([-qmax, qmax, -qmax, qmax]), torch.tensor([0, 15, 15, 0])
    words, randoms = (np.ascontiguousarray(x.to(torch.uint8)).view(np.uint32)[:, 0] for x in (q + bias, r))
    expected = q.float() + reference.dither(r)
    for byte in range(4):
        (bits,) = ptx.run(unpacking.dot_products(byte), 1, [words, randoms])
        values = torch.from_numpy(bits.view(np.float32).copy()) - (262144.0 + bias + 7.5 / 16)
        assert torch.equal(values, expected[:, byte])
