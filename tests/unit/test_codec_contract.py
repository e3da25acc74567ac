"""The contract over rows, for every codec in one test: sizes, strides, sums, buffers that are given."""

import math

import pytest
import torch

from megatron.compression.codecs import CODECS, parse_codec

MORE = (
    "int6:scales=single",
    "int5/int6",
    "int6:outliers=on",
    "int4:group=32,hadamard=off,outliers=on",
    "int4:group=32,normalize=standardize,outliers=on",
    "int4:group=32,normalize=standardize",
    "int6:group=32,scales=single,hadamard=off",
    "taco:format=int8,scales=single,group=64",
    "taco:format=fp8-e5m2",
    "sdp4bit:intra=4,group=2048,hadamard=off",
    "tah-quant:allocation=tile,tile=32",
    "tah-quant:low=2",
    "examples.paper.per_tensor_fp8:PerTensorFp8",
)
SPECS = sorted({*CODECS.names(), *MORE} - {"lossless"})
"""All but lossless, whose payloads are of the dtype that is encoded, and may be cut: test_lossless.py."""
SHAPES = [(1,), (128,), (1000,), (3, 2, 96), (6, 1, 257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORST = 0.6
"""Relative error of two and three bits on tiny rows; what matters is that no row gets another's values."""


def shapes_of(codec) -> list[tuple[int, ...]]:
    """Those that see shapes take tokens and channels; normalised channels come in whole groups."""
    if not codec.sees_shape:
        return SHAPES
    if "normalize" in codec.name:
        return [(5, 64), (3, 2, 192)]
    return [shape for shape in SHAPES if len(shape) > 1]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


FLAT = [spec for spec in (*SPECS, "lossless") if not parse_codec(spec).hops[0].sees_shape]
"""Codecs of any values; the others encode whole tokens."""


@pytest.mark.parametrize("spec", FLAT)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_one_value_with_any_stride(spec: str, rows: int) -> None:
    """torch calls such a tensor contiguous, but has no view of its bytes."""
    codec = parse_codec(spec).hops[0]
    x = torch.empty_strided((rows, 1), (7, 5), dtype=torch.bfloat16).copy_(values(rows, 1))
    contiguous = x.clone(memory_format=torch.contiguous_format)
    assert torch.equal(codec.encode(x), codec.encode(contiguous))
    decoded = codec.decode(codec.encode(x), (1,), torch.bfloat16)
    assert torch.equal(decoded, codec.decode(codec.encode(contiguous), (1,), torch.bfloat16))


@pytest.mark.parametrize("spec", SPECS)
def test_rows(spec: str) -> None:
    """Payloads have the size that was said, rows do not touch each other, and strides do not matter."""
    codec = parse_codec(spec)
    for shape in shapes_of(codec):
        for dtype in DTYPES:
            x = values(3, *shape, dtype=dtype)
            before = x.clone()
            payloads = codec.encode(x)
            assert payloads.shape == (3, codec.payload_bytes(shape)), (shape, dtype)
            assert payloads.dtype == torch.uint8 and payloads.is_contiguous()
            assert torch.equal(x, before)
            alone = torch.cat([codec.encode(row[None]) for row in x])
            decoded = codec.decode(payloads, shape, dtype)
            assert decoded.shape == x.shape and decoded.dtype == dtype
            assert torch.equal(decoded, codec.decode(alone, shape, dtype)), "rows are apart"
            one = torch.cat([codec.decode(row[None], shape, dtype) for row in payloads])
            assert torch.equal(decoded, one)
            assert error(decoded, x) < WORST, (shape, dtype)

            strided = torch.empty(3, *shape[::-1], dtype=dtype).permute(
                0, *range(len(shape), 0, -1)
            )
            strided.copy_(x)
            assert torch.equal(codec.encode(strided), payloads), "any strides"


@pytest.mark.parametrize("spec", SPECS)
def test_sums_and_buffers_that_are_given(spec: str) -> None:
    """Sums of what is decoded: in fp32, scaled, rounded once; the same bits in an ``out`` of any strides."""
    codec = parse_codec(spec)
    second = codec.hops[1]
    for shape in shapes_of(codec):
        payloads = torch.stack([codec.encode(values(2, *shape, seed=seed)) for seed in range(3)])
        exact = sum(codec.decode(rows, shape, torch.float32).double() for rows in payloads)
        total = codec.decode_sum(payloads, shape, torch.float32)
        assert total.shape == (2, *shape)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
        again = codec.decode_sum_encode(payloads, shape, second)
        assert again.shape == (2, second.payload_bytes(shape)) and again.dtype == torch.uint8
        assert error(second.decode(again, shape, torch.float32), exact) < WORST
        for dtype in (torch.float32, torch.bfloat16):
            third = codec.decode_sum(payloads, shape, dtype, scale=1 / 3)
            assert torch.equal(third, (total * (1 / 3)).to(dtype)), "rounded once, after the scale"
            decoded = codec.decode(payloads[0], shape, dtype)
            whole = torch.full((2, *shape), 7.0, dtype=dtype)
            for given in (whole, torch.cat((whole, whole), -1)[..., ::2]):
                codec.decode_into(payloads[0], shape, dtype, given)
                assert torch.equal(given, decoded)
                codec.decode_sum(payloads, shape, dtype, 1 / 3, given)
                assert torch.equal(given, third)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not parse_codec(spec).sees_shape])
def test_grids_and_differences(spec: str) -> None:
    """What data parallelism asks for: rows that lie apart, the change of weights added to them."""
    codec = parse_codec(spec)
    grid = values(2, 3, 2 * 160)[..., :160]
    assert torch.equal(codec.encode_grid(grid), torch.stack([codec.encode(rows) for rows in grid]))
    old, change = values(200, dtype=torch.bfloat16), 1e-2 * values(200, seed=1)
    new = (old.float() + change).to(torch.bfloat16)
    payload = codec.encode_difference(new, old)
    assert payload.shape == (codec.payload_bytes((200,)),)
    weights = old.clone()[None]
    assert codec.add_decoded(payload[None], weights) is weights
    assert torch.equal(weights[0], new) if spec == "identity" else error(weights[0], new) < 0.01


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_and_what_is_not_finite(spec: str) -> None:
    """Zeros come back; a NaN or an infinity reaches the other side, and no other row."""
    codec, shape = parse_codec(spec), (4, 2, 128)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = values(2, *shape)
        x[1, 2, 1, 5] = bad
        decoded = codec.decode(codec.encode(x), shape, torch.float32)
        assert decoded[0].isfinite().all() and not decoded[1].isfinite().all(), bad
    zeros = torch.zeros(1, *shape)
    assert torch.equal(codec.decode(codec.encode(zeros), shape, torch.float32), zeros)
    assert codec.bits_per_value(shape) == 8 * codec.payload_bytes(shape) / math.prod(shape)
