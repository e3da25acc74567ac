"""Codecs between pipeline stages: normalised channels, odd shapes, payloads that outlive their sending."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import Work
from megatron.compression.pipeline_parallel.in_flight import SendsInFlight


def early_activations(shape: tuple[int, ...] = (64, 4, 192)) -> torch.Tensor:
    """A mean that all tokens share, ten times what tells them apart; some channels far wider than others."""
    generator = torch.Generator().manual_seed(0)
    width = torch.logspace(-1, 1, shape[-1])[torch.randperm(shape[-1], generator=generator)]
    mean = 10 * width * torch.randn(shape[-1], generator=generator)
    return mean + width * torch.randn(shape, generator=generator)


def decoded(spec: str, x: torch.Tensor) -> torch.Tensor:
    """What a stage receives for ``x``."""
    codec = parse_codec(spec)
    payload = codec.encode(x[None])
    assert payload.dtype == torch.uint8 and payload.shape == (1, codec.payload_bytes(x.shape))
    (y,) = codec.decode(payload, x.shape, x.dtype)
    assert y.shape == x.shape and y.dtype == x.dtype
    return y


def test_normalized_channels_keep_what_tells_tokens_apart() -> None:
    """4 bits of a large common part are worthless; standardised they are not."""
    x = early_activations()
    plain, standardized = (
        float((decoded(f"int4:group=64,{more}", x) - x).norm() / (x - x.mean((0, 1))).norm())
        for more in ("hadamard=off", "normalize=standardize")
    )
    assert plain > 5 * standardized
    assert standardized < 0.15


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((7, 3, 96), (32,), (0, 2, 64), (1, 1, 32)), ids=str)
def test_any_shape_and_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Strides, one token, none; channels that never change come back as their mean."""
    spec = "int8:group=32,normalize=standardize"
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.allclose(decoded(spec, x), x, atol=0.05)
    if len(shape) == 3 and x.numel():
        codec = parse_codec(spec)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(codec.encode(x[None]), codec.encode(strided[None]))
        same = torch.full_like(x, 3.0)
        assert torch.equal(decoded(spec, same), same)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_stays_so(value: float) -> None:
    """Its channel is not finite for any token, and channels of other groups do not notice."""
    x = early_activations()
    x[3, 1, 5] = value
    y = decoded("int4:group=64,normalize=standardize", x)
    assert not y[..., 5].isfinite().any()
    assert y[..., 64:].isfinite().all()


@pytest.mark.parametrize("bits", (4, 5, 6))
def test_bits(bits: int) -> None:
    """So many bits and a bf16 scale for 64; the channels' statistics are few beside many tokens."""
    codec = parse_codec(f"int{bits}:group=64,normalize=standardize")
    assert codec.bits_per_value((512, 8, 512)) == bits + 16 / 64 + 32 / 4096
    assert codec.backward.bits_per_value((512, 8, 512)) == bits + 16 / 64
    assert parse_codec("tah-quant").backward.bits_per_value((512, 8, 512)) == 6.5


def test_finer_integers_for_the_same_bytes_and_for_a_quarter_of_a_bit_more() -> None:
    """Signed scales and groups of 32: each lowers the error as it should."""
    x = torch.randn(64, 4, 256, generator=torch.Generator().manual_seed(8))
    specs = [f"int4:hadamard=off,{more}" for more in ("group=64,scales=single", "group=64", "group=32")]
    error = [float((decoded(spec, x) - x).square().mean()) for spec in specs]
    assert [parse_codec(spec).bits_per_value(x.shape) for spec in specs] == [4.25, 4.25, 4.5]
    assert error[1] < 0.81 * error[0] and error[2] < 0.85 * error[1]


def test_sends_in_flight_are_waited_for_in_order() -> None:
    """The oldest one when there are too many; all at the end; payloads are alive until then."""
    waited = []
    requests = [SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(5)]
    payloads = [torch.zeros(1) for _ in requests]
    alive = [weakref.ref(payload) for payload in payloads]
    sends = SendsInFlight(limit=2)
    for request in requests:
        sends.add(Work(request, [payloads.pop(0)].clear))
    assert waited == [0, 1, 2] and [one() is not None for one in alive] == [False] * 3 + [True] * 2
    sends.flush()
    assert waited == [0, 1, 2, 3, 4] and len(sends) == 0 and not any(one() is not None for one in alive)
