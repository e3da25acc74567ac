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
    """The error is the codec's on these values; those after the last whole group do not count."""
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


# One value of 1000 among normal ones: int6 has 1 % of error over all values, but the grid step of
# its group is so large that most of the other values of the group are lost.
@pytest.fixture
def with_outlier() -> torch.Tensor:
    x = _values(4, GROUP)
    x[1, 7] = 1000.0
    return x


def test_an_outlier_does_not_hide_what_its_group_loses(with_outlier) -> None:
    assert _error_of(with_outlier, parse_codec("int6")) > 0.3


def test_a_codec_that_keeps_outliers_loses_nothing_by_them(with_outlier) -> None:
    assert _error_of(with_outlier, parse_codec("int6:outliers=on")) < 0.03


def test_a_row_has_the_error_of_all_and_of_ordinary_values(with_outlier) -> None:
    errors = ErrorMeter(interval=1)
    errors.measure(*SITE, with_outlier, parse_codec("int6"))
    (row,) = errors.rows()
    assert row["relative_error"] < 0.02
    assert row["ordinary_error"] > 0.3
    assert row["peak"] > 1000


def test_zeros_have_no_error_and_no_peak() -> None:
    errors = ErrorMeter(interval=1)
    errors.measure("zeros", "tp.forward", torch.zeros(300), parse_codec("int6"))
    (row,) = errors.rows()
    assert row["ordinary_error"] == 0.0
    assert row["peak"] is None


def test_overflow_of_the_input_is_not_the_codecs_error() -> None:
    """Groups with Inf or NaN do not count: fp16 has them until the loss scaler has its scale."""
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


BACKWARD = (SITE[0], "tp.backward")


@pytest.fixture
def measured() -> ErrorMeter:
    """A meter with a bound of 0.05, under which fp8 is and over which int4 is.

    The forward is fp8, the backward int4, and so are tokens, which have no bound.
    """
    errors = ErrorMeter(0.05, 10)
    errors.measure(*SITE, _values(4, GROUP), _codec())
    errors.measure(*BACKWARD, _values(4, GROUP), _codec("int4"))
    errors.measure("tokens", "ep.forward", _values(4, GROUP), _codec("int4"), bounded=False)
    return errors


def test_only_what_passes_the_bound_goes_uncompressed(measured) -> None:
    decisions = measured.decide()
    assert list(decisions) == [BACKWARD]
    assert 0.05 < decisions[BACKWARD] < 0.5


def test_a_decision_is_told_once_and_stands(measured) -> None:
    decisions = measured.decide()
    assert measured.decide() == {}
    assert measured.tripped == decisions


def test_decisions_come_back_from_a_checkpoint(measured) -> None:
    measured.decide()
    restored = ErrorMeter(0.05, 10)
    restored.restore(measured.state())
    assert restored.tripped == measured.tripped


def test_the_last_iteration_of_an_interval_is_measured() -> None:
    errors = ErrorMeter(interval=5)
    assert [i for i in range(12) if errors.due(*SITE, i)] == [4, 9]


def test_of_an_iteration_the_first_message_of_each_direction_is_measured() -> None:
    errors = ErrorMeter(interval=5)
    assert errors.due(*SITE, 9)
    assert not errors.due(*SITE, 9)
    assert errors.due(*BACKWARD, 9)


def test_without_an_interval_nothing_is_measured() -> None:
    assert not ErrorMeter().due(*SITE, 0)


def test_samples_add_up_and_can_be_forgotten() -> None:
    errors = ErrorMeter(interval=5)
    errors.measure(*SITE, 3 * _values(1, GROUP), _codec())
    forget = errors.snapshot()
    (first,) = errors.rows()
    errors.measure(*SITE, _values(1, GROUP, seed=1), _codec("int4"))
    (both,) = errors.rows()
    assert both["samples"] == 2
    assert both["relative_error"] > first["relative_error"]
    forget()
    assert errors.rows() == [first]
