"""The contract that every codec keeps: sizes of payloads, rows, strides, sums, buffers, NaN."""

import functools
import math
from typing import NamedTuple

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
"""All codecs but lossless: its payloads depend on the dtype and may be cut (test_lossless.py)."""
SHAPES = [(1,), (128,), (1000,), (3, 2, 96), (6, 1, 257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORST = 0.6
"""Relative error of two and three bits on tiny rows. A row with another's values has more: 1.4."""


def shapes_of(codec) -> list[tuple[int, ...]]:
    """Return the shapes that a codec takes.

    One that sees shapes takes tokens and channels; normalised channels come in whole groups.
    """
    if not codec.sees_shape:
        return SHAPES
    if "normalize" in codec.name:
        return [(5, 64), (3, 2, 192)]
    return [shape for shape in SHAPES if len(shape) > 1]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(decoded: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error, in the Frobenius norm."""
    return float((decoded.double() - exact.double()).norm() / exact.double().norm())


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


class Encoded(NamedTuple):
    """Three rows of values and their payloads."""

    x: torch.Tensor
    shape: tuple[int, ...]
    """Of a row."""
    payloads: torch.Tensor
    before: torch.Tensor
    """A copy of ``x`` from before it was encoded."""


@functools.cache
def encoded(spec: str) -> list[Encoded]:
    """Return what a codec makes of rows of each shape and dtype; made once for all tests."""
    codec = parse_codec(spec)
    cases = []
    for shape in shapes_of(codec):
        for dtype in DTYPES:
            x = values(3, *shape, dtype=dtype)
            before = x.clone()
            cases.append(Encoded(x, shape, codec.encode(x), before))
    return cases


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_has_the_promised_size(spec: str) -> None:
    codec = parse_codec(spec)
    for x, shape, payloads, _ in encoded(spec):
        assert payloads.shape == (3, codec.payload_bytes(shape)), (shape, x.dtype)
        assert payloads.dtype == torch.uint8
        assert payloads.is_contiguous()


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_encoded_stays_as_it_was(spec: str) -> None:
    for x, shape, _, before in encoded(spec):
        assert torch.equal(x, before), (shape, x.dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_values_come_back_in_their_shape_and_dtype(spec: str) -> None:
    codec = parse_codec(spec)
    for x, shape, payloads, _ in encoded(spec):
        decoded = codec.decode(payloads, shape, x.dtype)
        assert decoded.shape == x.shape
        assert decoded.dtype == x.dtype
        assert error(decoded, x) < WORST, (shape, x.dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_encoded_and_decoded_apart(spec: str) -> None:
    codec = parse_codec(spec)
    for x, shape, payloads, _ in encoded(spec):
        decoded = codec.decode(payloads, shape, x.dtype)
        encoded_apart = torch.cat([codec.encode(row[None]) for row in x])
        assert torch.equal(decoded, codec.decode(encoded_apart, shape, x.dtype)), (shape, x.dtype)
        decoded_apart = [codec.decode(row[None], shape, x.dtype) for row in payloads]
        assert torch.equal(decoded, torch.cat(decoded_apart)), (shape, x.dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_strides_do_not_matter(spec: str) -> None:
    codec = parse_codec(spec)
    for x, shape, payloads, _ in encoded(spec):
        reversed_dimensions = range(len(shape), 0, -1)
        strided = torch.empty(3, *shape[::-1], dtype=x.dtype).permute(0, *reversed_dimensions)
        strided.copy_(x)
        assert torch.equal(codec.encode(strided), payloads), (shape, x.dtype)


class Addends(NamedTuple):
    """Two rows of each of three ranks."""

    payloads: torch.Tensor
    """[ranks, rows, bytes]."""
    shape: tuple[int, ...]
    """Of a row."""
    exact: torch.Tensor
    """The sum of what the payloads decode to, in fp64."""
    total: torch.Tensor
    """The codec's sum, in fp32."""


@functools.cache
def addends(spec: str) -> list[Addends]:
    """Return what ranks send of rows of each shape; made once for all tests."""
    codec = parse_codec(spec)
    cases = []
    for shape in shapes_of(codec):
        payloads = torch.stack([codec.encode(values(2, *shape, seed=seed)) for seed in range(3)])
        exact = sum(codec.decode(rows, shape, torch.float32).double() for rows in payloads)
        total = codec.decode_sum(payloads, shape, torch.float32)
        cases.append(Addends(payloads, shape, exact, total))
    return cases


@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_that_of_the_decoded_values(spec: str) -> None:
    for _, shape, exact, total in addends(spec):
        assert total.shape == (2, *shape)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_encoded_by_the_second_hop(spec: str) -> None:
    codec = parse_codec(spec)
    second = codec.hops[1]
    for payloads, shape, exact, _ in addends(spec):
        sums = codec.decode_sum_encode(payloads, shape, second)
        assert sums.shape == (2, second.payload_bytes(shape))
        assert sums.dtype == torch.uint8
        assert error(second.decode(sums, shape, torch.float32), exact) < WORST, shape


SUM_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@SUM_DTYPES
@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_scaled_in_fp32_and_rounded_once(spec: str, dtype: torch.dtype) -> None:
    codec = parse_codec(spec)
    for payloads, shape, _, total in addends(spec):
        scaled = codec.decode_sum(payloads, shape, dtype, scale=1 / 3)
        assert torch.equal(scaled, (total * (1 / 3)).to(dtype)), shape


def buffers(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return two buffers of a shape filled with sevens; the second one's values lie apart."""
    contiguous = torch.full(shape, 7.0, dtype=dtype)
    return [contiguous, torch.cat((contiguous, contiguous), -1)[..., ::2]]


@SUM_DTYPES
@pytest.mark.parametrize("spec", SPECS)
def test_values_are_decoded_into_a_buffer_of_any_strides(spec: str, dtype: torch.dtype) -> None:
    codec = parse_codec(spec)
    for payloads, shape, *_ in addends(spec):
        decoded = codec.decode(payloads[0], shape, dtype)
        for out in buffers((2, *shape), dtype):
            codec.decode_into(payloads[0], shape, dtype, out)
            assert torch.equal(out, decoded), (shape, out.stride())


@SUM_DTYPES
@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_written_into_a_buffer_of_any_strides(spec: str, dtype: torch.dtype) -> None:
    codec = parse_codec(spec)
    for payloads, shape, *_ in addends(spec):
        scaled = codec.decode_sum(payloads, shape, dtype, scale=1 / 3)
        for out in buffers((2, *shape), dtype):
            codec.decode_sum(payloads, shape, dtype, 1 / 3, out)
            assert torch.equal(out, scaled), (shape, out.stride())


DATA_PARALLEL = pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if not parse_codec(spec).sees_shape]
)
"""Codecs that data parallelism can use: gradients and weights have no tokens."""


@DATA_PARALLEL
def test_rows_of_a_grid_may_lie_apart(spec: str) -> None:
    codec = parse_codec(spec)
    grid = values(2, 3, 2 * 160)[..., :160]
    assert torch.equal(codec.encode_grid(grid), torch.stack([codec.encode(rows) for rows in grid]))


@DATA_PARALLEL
def test_a_change_of_weights_is_added_to_them(spec: str) -> None:
    codec = parse_codec(spec)
    old = values(200, dtype=torch.bfloat16)
    new = (old.float() + 1e-2 * values(200, seed=1)).to(torch.bfloat16)
    payload = codec.encode_difference(new, old)
    assert payload.shape == (codec.payload_bytes((200,)),)
    weights = old.clone()[None]
    assert codec.add_decoded(payload[None], weights) is weights
    if spec == "identity":
        assert torch.equal(weights[0], new)
    else:
        assert error(weights[0], new) < 0.01


MESSAGE = (4, 2, 128)
"""Shape of a row."""


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", SPECS)
def test_a_value_that_is_not_finite_arrives_in_its_row_alone(spec: str, bad: float) -> None:
    codec = parse_codec(spec)
    x = values(2, *MESSAGE)
    x[1, 2, 1, 5] = bad
    decoded = codec.decode(codec.encode(x), MESSAGE, torch.float32)
    assert decoded[0].isfinite().all()
    assert not decoded[1].isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_stay_zeros(spec: str) -> None:
    codec = parse_codec(spec)
    zeros = torch.zeros(1, *MESSAGE)
    assert torch.equal(codec.decode(codec.encode(zeros), MESSAGE, torch.float32), zeros)


@pytest.mark.parametrize("spec", SPECS)
def test_bits_a_value_are_those_of_the_payload(spec: str) -> None:
    codec = parse_codec(spec)
    assert codec.bits_per_value(MESSAGE) == 8 * codec.payload_bytes(MESSAGE) / math.prod(MESSAGE)
