"""The error meter: errors of codecs, and what --compression-error-bound stops compressing."""

import pytest
import torch

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.grouped import TacoCodec
from megatron.compression.communication import meter
from megatron.compression.communication.meter import ErrorMeter

GROUP = 128
SITE = ("decoder.layers.0.mlp.linear_fc1", "tp.forward")


def _codec(number_format: str = "fp8-e4m3") -> Codec:
    return parse_codec(f"taco:format={number_format}")


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error_of(tensor: torch.Tensor, codec: Codec | None = None) -> float:
    """Return the error that a bound which stops everything names for one tensor."""
    errors = ErrorMeter(1e-9, 1)
    errors.measure(*SITE, tensor, codec or _codec())
    return errors.decide()[SITE]


@pytest.mark.parametrize("shape", [(8, 2, 64), (3, 128), (50,), (300, 7)])
def test_small_tensor_is_measured_in_whole_groups(shape) -> None:
    """The error is the codec's on the same values; what is left over after the last group is not seen."""
    x = _values(*shape)
    codec = _codec()
    seen = x.reshape(-1)[: x.numel() // GROUP * GROUP or None]
    decoded = codec.decode(codec.encode(seen[None]), seen.shape, seen.dtype)[0]
    expected = float((decoded - seen).norm() / seen.norm())
    assert _error_of(x) == pytest.approx(expected, rel=1e-5)
    assert 0.015 < expected < 0.04


@pytest.mark.parametrize("hidden", [1024, 4096, 5120])
def test_sample_reaches_every_column(hidden: int, monkeypatch) -> None:
    """A large tensor is sampled at equal distances, and not always in the same columns."""
    monkeypatch.setattr(meter, "SAMPLE_VALUES", 2**15)
    rows = 2**22 // hidden
    sample = meter._sample(torch.arange(hidden).float().expand(rows, hidden), GROUP)
    assert 2**14 <= sample.numel() <= 2**15
    assert set(sample[:, 0].long().tolist()) == set(range(0, hidden, GROUP))


def test_an_outlier_does_not_hide_what_its_group_loses() -> None:
    """At 1000 times the others: 1 % of error over all values, most of the group's others lost."""
    x = _values(4, GROUP)
    x[1, 7] = 1000.0
    plain = parse_codec("int6")
    assert _error_of(x, plain) > 0.3
    assert _error_of(x, parse_codec("int6:outliers=on")) < 0.03
    errors = ErrorMeter(interval=1)
    errors.measure(*SITE, x, plain)
    errors.measure("zeros", "tp.forward", torch.zeros(300), plain)
    row, zeros = errors.rows()
    assert row["relative_error"] < 0.02 and row["ordinary_error"] > 0.3 and row["peak"] > 1000
    assert zeros["ordinary_error"] == 0.0 and zeros["peak"] is None


def test_overflow_of_the_input_is_not_the_codecs_error() -> None:
    """Groups that come in with Inf or NaN (fp16, before the loss scaler has found its scale) are left out."""
    x = _values(16, GROUP)
    clean = _error_of(x[2:])
    x[0, 3] = float("inf")
    x[1, 5] = float("nan")
    assert _error_of(x) == pytest.approx(clean, rel=1e-6)
    one_row = _values(4, 256).index_fill(0, torch.tensor(1), float("nan"))
    assert _error_of(one_row, parse_codec("sdp4bit:group=256")) < 1
    errors = ErrorMeter(0.01, 1)
    for value in (float("nan"), 0.0):
        errors.measure(*SITE, torch.full((4, GROUP), value), _codec())
        assert errors.decide() == {}


def test_the_worse_of_two_hops_counts() -> None:
    """An all-reduce in int8,int4 is as wrong as its second hop, not as its first."""
    x = _values(64, GROUP)
    int8, int4 = (_error_of(x, _codec(number_format)) for number_format in ("int8", "int4"))
    assert int4 > 10 * int8
    for both in ("taco:format=int8/taco:format=int4", "taco:format=int4/taco:format=int8"):
        assert _error_of(x, parse_codec(both)) == pytest.approx(int4, rel=1e-6)


def test_codec_that_makes_nan_of_finite_values_passes_any_bound() -> None:
    class Broken(TacoCodec):
        def decode(self, *args):
            return super().decode(*args) * float("nan")

    errors = ErrorMeter(1e9, 1)
    errors.measure(*SITE, _values(4, GROUP), Broken())
    assert list(errors.decide()) == [SITE]


def test_only_what_passes_the_bound_goes_uncompressed() -> None:
    """int4 passes a bound of 0.05, fp8 does not; each decision is told once and kept; nor does what has no
    bound."""
    errors = ErrorMeter(0.05, 10)
    backward = (SITE[0], "tp.backward")
    errors.measure(*SITE, _values(4, GROUP), _codec())
    errors.measure(*backward, _values(4, GROUP), _codec("int4"))
    errors.measure("tokens", "ep.forward", _values(4, GROUP), _codec("int4"), bounded=False)
    new = errors.decide()
    assert list(new) == [backward] and 0.05 < new[backward] < 0.5
    assert errors.decide() == {} and errors.tripped == new
    restored = ErrorMeter(0.05, 10)
    restored.restore(errors.state())
    assert restored.tripped == errors.tripped


def test_measures_once_before_each_log_line() -> None:
    """The last iteration of an interval, its first message; never without an interval. Samples add up, and
    can be forgotten."""
    errors = ErrorMeter(interval=5)
    assert [i for i in range(12) if errors.due(*SITE, i)] == [4, 9]
    assert not errors.due(*SITE, 9) and errors.due(SITE[0], "tp.backward", 9)
    assert not ErrorMeter().due(*SITE, 0)
    errors.measure(*SITE, 3 * _values(1, GROUP), _codec())
    forget = errors.snapshot()
    (first,) = errors.rows()
    errors.measure(*SITE, _values(1, GROUP, seed=1), _codec("int4"))
    assert (
        errors.rows()[0]["samples"] == 2
        and errors.rows()[0]["relative_error"] > first["relative_error"]
    )
    forget()
    assert errors.rows() == [first]
