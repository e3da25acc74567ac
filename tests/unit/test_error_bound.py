"""--compression-error-bound: what is measured of a codec's error, and what is taken out."""

import pytest
import torch

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.taco import TacoCodec
from megatron.compression.communication import error_bound
from megatron.compression.communication.error_bound import ErrorBound

GROUP = 128
SITE = ("decoder.layers.0.mlp.linear_fc1", "tp.forward")


def _codec(number_format: str = "fp8-e4m3") -> Codec:
    return parse_codec(f"taco:format={number_format}")


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error_of(tensor: torch.Tensor, codec=None, **settings) -> float:
    """What a bound that takes everything out says of one tensor."""
    bound = ErrorBound(**{"bound": 1e-9, "group_size": GROUP, "interval": 1, **settings})
    bound.measure(*SITE, tensor, codec or _codec())
    return bound.decide()[SITE]


@pytest.mark.parametrize("shape", [(8, 2, 64), (3, 128), (50,), (300, 7)])
def test_small_tensor_is_measured_in_whole_groups(shape) -> None:
    """The error is the codec's on the same values; what is left over behind the last group is not seen."""
    x, codec = _values(*shape), _codec()
    seen = x.reshape(-1)[: x.numel() // GROUP * GROUP or None]
    decoded = codec.decode(codec.encode(seen[None]), seen.shape, seen.dtype)[0]
    expected = float((decoded - seen).norm() / seen.norm())
    assert _error_of(x) == pytest.approx(expected, rel=1e-5)
    assert 0.015 < expected < 0.04


@pytest.mark.parametrize("hidden", [1024, 4096, 5120])
def test_sample_reaches_every_column(hidden: int, monkeypatch) -> None:
    """A large tensor is sampled at equal distances, and not always in the same columns."""
    monkeypatch.setattr(error_bound, "SAMPLE_VALUES", 2**15)
    rows = 2**22 // hidden
    columns = torch.arange(hidden).float().expand(rows, hidden)
    sample = ErrorBound(0.1, GROUP)._sample(columns)
    assert 2**14 <= sample.numel() <= 2**15
    assert set(sample[:, 0].long().tolist()) == set(range(0, hidden, GROUP))


def test_measuring_in_bf16_and_from_a_transposed_tensor() -> None:
    """dtype and strides are the codec's business."""
    assert 0.015 < _error_of(_values(64, 4, 128).bfloat16().transpose(0, 1)) < 0.04


def test_a_massive_value_does_not_hide_what_its_group_loses() -> None:
    """At 1000 times the others: 1 % of error over all values, most of the group's others lost."""
    x = _values(4, GROUP)
    x[1, 7] = 1000.0
    plain = parse_codec("int6")
    decoded = plain.decode(plain.encode(x[None]), x.shape, x.dtype)[0]
    assert (decoded - x).norm() < 0.015 * x.norm()
    assert _error_of(x, plain) > 0.3
    assert _error_of(x, parse_codec("int6:outliers=on")) < 0.03


def test_values_alone_in_their_group_are_no_massive_ones() -> None:
    """Of one-hot rows the error is that of the values that are there."""
    x = torch.zeros(8, GROUP)
    x[:, 3] = 5.0
    assert _error_of(x, parse_codec("int6")) < 0.05


def test_overflow_of_the_input_is_not_the_codecs_error() -> None:
    """Groups that come in with Inf or NaN (fp16, before the loss scaler has found its scale) are left out."""
    x = _values(16, GROUP)
    clean = _error_of(x[2:])
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    assert _error_of(x) == pytest.approx(clean, rel=1e-6)
    bound = ErrorBound(0.01, GROUP, 1)
    bound.measure(*SITE, torch.full((4, GROUP), float("nan")), _codec())
    assert bound.decide() == {}
    bound.measure(*SITE, torch.zeros(4, GROUP), _codec())
    assert bound.decide() == {}, "zeros have no error"


def test_the_worse_of_two_formats_counts() -> None:
    """An all-reduce in int8,int4 is as wrong as its second hop, not as its first."""
    x = _values(64, GROUP)
    int8, int4 = (_error_of(x, _codec(number_format)) for number_format in ("int8", "int4"))
    assert int4 > 10 * int8
    for both in ("taco:format=int8/taco:format=int4", "taco:format=int4/taco:format=int8"):
        assert _error_of(x, parse_codec(both)) == pytest.approx(int4, rel=1e-6)


def test_codec_that_makes_nan_of_finite_values_is_taken_out() -> None:
    """No bound is large enough for that."""

    class Broken(TacoCodec):
        def decode(self, *args):
            return super().decode(*args) * float("nan")

    bound = ErrorBound(1e9, GROUP, 1)
    bound.measure(*SITE, _values(4, GROUP), Broken())
    assert list(bound.decide()) == [SITE]


def test_only_what_passes_the_bound_goes() -> None:
    """int4 passes a bound of 0.05, fp8 does not; each decision is told once and kept."""
    bound = ErrorBound(0.05, GROUP, 10)
    other = (SITE[0], "tp.backward")
    bound.measure(*SITE, _values(4, GROUP), _codec())
    bound.measure(*other, _values(4, GROUP), _codec("int4"))
    new = bound.decide()
    assert list(new) == [other] and 0.05 < new[other] < 0.5
    assert bound.decide() == {} and bound.tripped == new
    restored = ErrorBound(0.05, GROUP, 10)
    restored.restore(bound.state())
    assert restored.tripped == bound.tripped


def test_measures_once_before_each_log_line() -> None:
    """The last iteration of an interval, its first message; never without an interval."""
    bound = ErrorBound(0.05, GROUP, interval=5)
    assert [i for i in range(12) if bound.due(*SITE, i)] == [4, 9]
    bound.measure(*SITE, _values(4, GROUP), _codec())
    assert not bound.due(*SITE, 4) and bound.due(SITE[0], "tp.backward", 4)
    bound.decide()
    assert bound.due(*SITE, 9)
    assert not ErrorBound(0.05, GROUP).due(*SITE, 0)
