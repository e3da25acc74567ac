"""Scaled sums of payloads, also of a single sender: every codec, in and out of given memory.

An average over ranks is a sum with a scale. With one sender a codec may only decode, which must not
lose the scale.
"""

import pytest
import torch

from megatron.compression.codecs import CODECS, parse_codec
from tests.unit.test_codec_contract import MORE, values

SPECS = sorted({*CODECS.names(), *MORE})
SCALE = 0.375
"""A power of two times three: exact in bf16, so that scaling rounds as little as possible."""
ROWS = {"one row": 1, "three rows": 3}
NUMELS = {"whole groups": 256, "a padded group": 200}


def message_shape(codec, numel: int) -> tuple[int, ...]:
    """The shape of a row of about ``numel`` values that the codec can encode."""
    if not codec.sees_shape:
        return (numel,)
    return (4, 192) if "normalize" in codec.name else (4, numel)


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_scaled(spec: str, numel: str, rows: str, senders: int) -> None:
    codec = parse_codec(spec)
    shape = message_shape(codec, NUMELS[numel])
    inputs = [values(ROWS[rows], *shape, seed=seed) for seed in range(senders)]
    payloads = torch.stack([codec.encode(x) for x in inputs])
    decoded = [codec.decode(payload, shape, torch.float32) for payload in payloads]
    expected = SCALE * sum(decoded)
    assert expected.norm() > 0

    total = codec.decode_sum(payloads, shape, torch.float32, SCALE)

    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_scaled_sum_fills_given_memory(spec: str, senders: int) -> None:
    codec = parse_codec(spec)
    shape = message_shape(codec, 200)
    payloads = torch.stack([codec.encode(values(2, *shape, seed=seed)) for seed in range(senders)])
    expected = codec.decode_sum(payloads, shape, torch.float32, SCALE)
    memory = torch.full((2, *shape), 7.0)

    codec.decode_sum(payloads, shape, torch.float32, SCALE, memory)

    assert torch.equal(memory, expected)


@pytest.mark.parametrize(
    "spec",
    [
        "int5/int6",
        "int6/int4",
        "taco/int8",
        "int6:outliers=on/int6",
        "int6/int6:outliers=on",
        "int6/int6:hadamard=off",
    ],
)
def test_a_sum_is_encoded_by_the_second_codec(spec: str) -> None:
    """Two codecs: parts travel in the first one's payloads, the sum in the second one's."""
    codec = parse_codec(spec)
    first, second = codec.hops
    shape = (512,)
    parts = torch.stack([first.encode(values(1, *shape, seed=seed)) for seed in range(3)])
    exact_sum = first.decode_sum(parts, shape, torch.float32)

    payload = first.decode_sum_encode(parts, shape, second)

    assert payload.shape == (1, second.payload_bytes(shape))
    decoded = second.decode(payload, shape, torch.float32)
    reference = second.decode(second.encode(exact_sum), shape, torch.float32)
    # Sums inside the Hadamard domain are not rotated back and forth: they are nearly the same.
    assert (decoded - reference).norm() < 0.05 * exact_sum.norm()


DIFFERENCES = [
    spec
    for spec in SPECS
    if spec not in ("identity", "lossless") and not parse_codec(spec).sees_shape
]
"""Codecs that send the difference of weights; the exact ones send the new values."""


def updated_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights ``[n]`` before and after a step of a hundredth, which bf16 rounds coarsely."""
    before = values(1, 1024, seed=0)[0]
    after = before + 0.01 * values(1, 1024, seed=1)[0]
    return before.bfloat16(), after.bfloat16()


@pytest.mark.parametrize("spec", DIFFERENCES)
def test_a_difference_is_formed_in_fp32(spec: str) -> None:
    """bf16 would round what two weights of different magnitudes differ by."""
    codec = parse_codec(spec)
    weights, new = updated_weights()
    difference = new.float() - weights.float()
    assert not torch.equal(difference, (new - weights).float())

    payload = codec.encode_difference(new, weights)

    assert torch.equal(payload, codec.encode(difference[None])[0])


@pytest.mark.parametrize("spec", DIFFERENCES)
def test_a_difference_is_added_in_fp32_and_rounded_once(spec: str) -> None:
    codec = parse_codec(spec)
    weights, new = updated_weights()
    payload = codec.encode_difference(new, weights)
    change = codec.decode(payload[None], new.shape, torch.float32)[0]
    expected = (weights.float() + change).bfloat16()
    assert not torch.equal(expected, weights + change.bfloat16())

    codec.add_decoded(payload[None], weights[None])

    assert torch.equal(weights, expected)
