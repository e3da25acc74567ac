"""Codecs between pipeline stages: normalised channels, random rounding, numbers that both ends agree on."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.compression.codecs import NormalizedMessage
from megatron.compression.pipeline_parallel.codecs import backward_codec, forward_codec
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
from megatron.compression.pipeline_parallel.in_flight import Send, SendsInFlight
from megatron.compression.pipeline_parallel.streams import MessageStreams
from taco_kernels import Stream

RANDOM = Stream(5, 3)


def early_activations(shape: tuple[int, ...] = (64, 4, 192)) -> torch.Tensor:
    """A mean that all tokens share, ten times what tells them apart; some channels far wider than others."""
    generator = torch.Generator().manual_seed(0)
    width = torch.logspace(-1, 1, shape[-1])[torch.randperm(shape[-1], generator=generator)]
    mean = 10 * width * torch.randn(shape[-1], generator=generator)
    return mean + width * torch.randn(shape, generator=generator)


def error(settings: dict, x: torch.Tensor) -> float:
    """Relative to the part that tells tokens apart."""
    codec = forward_codec(PipelineParallelCompression(**settings))
    wire = codec.encode(x, RANDOM)
    assert wire.dtype == torch.uint8 and wire.numel() == codec.wire_bytes(x.shape)
    decoded = codec.decode(wire, x.shape, x.dtype, RANDOM)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    return float((decoded - x).norm() / (x - x.mean((0, 1))).norm())


@pytest.mark.parametrize("codec", ("tah-quant", "int4"))
def test_normalized_channels_keep_what_tells_tokens_apart(codec: str) -> None:
    """4 bits of a large common part are worthless; centred they are not, and standardised better still."""
    x = early_activations()
    settings = dict(pp_compression=codec)
    plain = error(settings, x)
    centered = error({**settings, "pp_normalize": "center"}, x)
    standardized = error({**settings, "pp_normalize": "standardize"}, x)
    assert plain > 4 * centered and centered > 1.3 * standardized
    assert standardized < 0.15


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((7, 3, 100), (5,), (), (0, 2, 64), (1, 1, 1)), ids=str)
def test_any_shape_and_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Sizes that divide nothing, strides; channels that never change come back as their mean."""
    settings = dict(pp_compression="int8", pp_normalize="standardize")
    codec = forward_codec(PipelineParallelCompression(**settings))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wire = codec.encode(x)
    assert wire.numel() == codec.wire_bytes(shape)
    decoded = codec.decode(wire, shape, dtype)
    assert decoded.dtype == dtype and decoded.shape == x.shape
    assert torch.allclose(decoded, x, atol=0.05)
    if len(shape) == 3 and x.numel():
        assert torch.equal(wire, codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1)))
        same = torch.full_like(x, 3.0)
        assert torch.equal(codec.decode(codec.encode(same), shape, dtype), same)


@pytest.mark.parametrize("normalize", ("center", "standardize"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_stays_so(normalize: str, value: float) -> None:
    """Its channel is not finite for any token, and channels of other groups do not notice."""
    codec = forward_codec(PipelineParallelCompression(pp_compression="int4", pp_normalize=normalize))
    x = early_activations()
    x[3, 1, 5] = value
    decoded = codec.decode(codec.encode(x), x.shape, x.dtype)
    assert not decoded[..., 5].isfinite().any()
    assert decoded[..., 64:].isfinite().all()


@pytest.mark.parametrize("payload", (4, 5, 6))
def test_bits(payload: int) -> None:
    """So many bits and a bf16 scale for 64; the channels' statistics are few beside many tokens."""
    name = f"int{payload}"
    settings = dict(pp_compression=name, pp_normalize="standardize", pp_backward_compression="tah-quant")
    config = PipelineParallelCompression(**settings)
    shape = (512, 8, 512)
    bits = 8 * forward_codec(config).wire_bytes(shape) / (512 * 8 * 512)
    assert bits == payload + 16 / 64 + 32 / 4096
    assert 8 * backward_codec(config).wire_bytes(shape) / (512 * 8 * 512) == 6.5


def test_dither_is_unbiased_and_needs_its_numbers() -> None:
    """Over many streams the mean of what is decoded is the value; nearest always errs alike."""
    x = early_activations((8, 1, 64))
    mean = {}
    for rounding in ("nearest", "dither"):
        settings = dict(pp_compression="int4", pp_normalize="center", pp_rounding=rounding)
        codec = forward_codec(PipelineParallelCompression(**settings))
        assert codec.rounds_randomly == (rounding == "dither")
        streams = [Stream(1, number) for number in range(200)]
        decoded = [codec.decode(codec.encode(x, s), x.shape, x.dtype, s) for s in streams]
        mean[rounding] = (sum(decoded) / len(decoded) - x).norm()
    assert mean["dither"] < 0.2 * mean["nearest"]
    with pytest.raises(ValueError, match="needs a Stream"):
        codec.encode(x)


def test_finer_integers_for_the_same_bytes_and_for_a_quarter_of_a_bit_more() -> None:
    """Signed scales and groups of 32 reach both directions, and each lowers the error as it should."""
    x = torch.randn(64, 4, 256, generator=torch.Generator().manual_seed(8))
    error, bits = [], []
    for more in ({}, {"pp_scales": "signed"}, {"pp_scales": "signed", "pp_group_size": 32}):
        settings = PipelineParallelCompression(pp_compression="int4", **more)
        assert backward_codec(settings).name == forward_codec(settings).name
        codec = forward_codec(settings)
        error.append(float((codec.decode(codec.encode(x), x.shape, x.dtype) - x).square().mean()))
        bits.append(8 * codec.wire_bytes(x.shape) / x.numel())
    assert bits == [4.25, 4.25, 4.5]
    assert error[1] < 0.81 * error[0] and error[2] < 0.85 * error[1]
    assert codec.name == "fixed point int4 tile 32, signed scales"


def test_both_ends_count_alike() -> None:
    """A sender and its receiver name a message alike; no two messages of a run have one name."""
    first, second = MessageStreams(11), MessageStreams(11)
    names = set()
    for iteration in (4, 5):
        first.restart(), second.restart()
        for _ in range(3):
            down = first.next(iteration, False, sender=0, sent=True)
            up = second.next(iteration, True, sender=1, sent=True)
            assert down == second.next(iteration, False, sender=0, sent=False)
            assert up == first.next(iteration, True, sender=1, sent=False)
            names |= {down, up}
    assert len(names) == 12
    assert first.next(5, False, sender=0, sent=True) not in names
    first.restart()
    assert first.next(5, False, sender=0, sent=True) in names, "a repeated pass"
    resumed = MessageStreams(11)
    assert resumed.next(5, False, sender=0, sent=True) == MessageStreams(11).next(5, False, 0, False)
    assert (
        resumed.next(5, False, 0, True) in names and MessageStreams(12).next(5, False, 0, True) not in names
    )


def test_names() -> None:
    """The log says what is normalised and how it is rounded."""
    codec = NormalizedMessage(forward_codec(PipelineParallelCompression(pp_compression="tah-quant")), False)
    assert codec.name == "tah-quant int3/int4 by token, tile 64, centered channels"
    config = PipelineParallelCompression(pp_compression="int4", pp_rounding="dither")
    assert forward_codec(config).name == "fixed point int4 tile 64, dither rounding"


def test_data_parallel_replicas_round_on_their_own() -> None:
    """Errors that replicas share would not average out of the gradient."""
    first, second = MessageStreams(11), MessageStreams(11)
    ours = first.next(5, False, sender=0, sent=True, replica=1)
    assert ours == second.next(5, False, sender=0, sent=False, replica=1), "both ends of one pipeline"
    assert ours.key != MessageStreams(11).next(5, False, sender=0, sent=True).key


def test_put_off_sends_are_waited_for_in_order() -> None:
    """The oldest one when there are too many; all at the end; payloads live until then."""
    waited = []
    requests = [SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(5)]
    payloads = [torch.zeros(1) for _ in requests]
    alive = [weakref.ref(payload) for payload in payloads]
    sends = SendsInFlight(limit=2)
    while payloads:
        sends.add(Send(requests[5 - len(payloads)], [payloads.pop(0)]))
    assert waited == [0, 1, 2] and [one() is not None for one in alive] == [False] * 3 + [True] * 2
    sends.flush()
    assert waited == [0, 1, 2, 3, 4] and len(sends) == 0 and not any(one() is not None for one in alive)
    send = Send(requests[0], [])
    send.wait(), send.wait()
    assert waited == [0, 1, 2, 3, 4, 0], "the transport's request is waited for once"
