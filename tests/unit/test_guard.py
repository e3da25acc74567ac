"""--taco-error-bound, --taco-layers, --taco-backward-format: what is measured and what is chosen."""

import pytest
import torch

from megatron.compression.codecs import TacoCodec, build_codec
from megatron.compression.config import (
    CompressionConfig,
    CompressionConfigError,
    TensorParallelCompression,
    parse_layers,
)
from megatron.compression.runtime import CompressionRuntime
from megatron.compression.tensor_parallel import guard as guard_module
from megatron.compression.tensor_parallel.guard import ErrorGuard

GROUP = 128
SITE = ("decoder.layers.0.mlp.linear_fc1", "tp.forward")


def _codec(number_format: str = "fp8-e4m3") -> TacoCodec:
    return build_codec("taco", format=number_format, group_size=GROUP)


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error_of(tensor: torch.Tensor, codec=None, **settings) -> float:
    """What a guard that takes everything out says of one tensor."""
    guard = ErrorGuard(**{"bound": 1e-9, "group_size": GROUP, "interval": 1, **settings})
    guard.measure(*SITE, tensor, codec or _codec())
    return guard.decide()[SITE]


@pytest.mark.parametrize("shape", [(8, 2, 64), (3, 128), (50,), (300, 7)])
def test_small_tensor_is_measured_in_whole_groups(shape) -> None:
    """The error is the codec's on the same values; what is left over behind the last group is not seen."""
    x, codec = _values(*shape), _codec()
    seen = x.reshape(-1)[: x.numel() // GROUP * GROUP or None]
    decoded = codec.decode(codec.encode(seen), seen.shape, seen.dtype)
    expected = float((decoded - seen).norm() / seen.norm())
    assert _error_of(x) == pytest.approx(expected, rel=1e-5)
    assert 0.015 < expected < 0.04


@pytest.mark.parametrize("hidden", [1024, 4096, 5120])
def test_sample_reaches_every_column(hidden: int, monkeypatch) -> None:
    """A large tensor is sampled at equal distances, and not always in the same columns."""
    monkeypatch.setattr(guard_module, "SAMPLE_VALUES", 2**15)
    rows = 2**22 // hidden
    columns = torch.arange(hidden).float().expand(rows, hidden)
    sample = ErrorGuard(0.1, GROUP)._sample(columns)
    assert 2**14 <= sample.numel() <= 2**15
    assert set(sample[:, 0].long().tolist()) == set(range(0, hidden, GROUP))


def test_measuring_in_bf16_and_from_a_transposed_tensor() -> None:
    """dtype and strides are the codec's business."""
    assert 0.015 < _error_of(_values(64, 4, 128).bfloat16().transpose(0, 1)) < 0.04


def test_overflow_of_the_input_is_not_the_codecs_error() -> None:
    """Groups that come in with Inf or NaN (fp16, before the loss scaler has found its scale) are left out."""
    x = _values(16, GROUP)
    clean = _error_of(x[2:])
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    assert _error_of(x) == pytest.approx(clean, rel=1e-6)
    guard = ErrorGuard(0.01, GROUP, 1)
    guard.measure(*SITE, torch.full((4, GROUP), float("nan")), _codec())
    assert guard.decide() == {}
    guard.measure(*SITE, torch.zeros(4, GROUP), _codec())
    assert guard.decide() == {}, "zeros have no error"


def test_the_worse_of_two_formats_counts() -> None:
    """An all-reduce in int8,int4 is as wrong as its second hop, not as its first."""
    x = _values(64, GROUP)
    int8, int4 = (_error_of(x, _codec(number_format)) for number_format in ("int8", "int4"))
    assert int4 > 10 * int8
    for both in ("int8,int4", "int4,int8"):
        assert _error_of(x, _codec(both)) == pytest.approx(int4, rel=1e-6)


def test_codec_that_makes_nan_of_finite_values_is_taken_out() -> None:
    """No bound is large enough for that."""

    class Broken(TacoCodec):
        def decode(self, *args):
            return super().decode(*args) * float("nan")

    guard = ErrorGuard(1e9, GROUP, 1)
    guard.measure(*SITE, _values(4, GROUP), Broken())
    assert list(guard.decide()) == [SITE]


def test_only_what_passes_the_bound_goes() -> None:
    """int4 passes a bound of 0.05, fp8 does not; each decision is told once and kept."""
    guard = ErrorGuard(0.05, GROUP, 10)
    other = (SITE[0], "tp.backward")
    guard.measure(*SITE, _values(4, GROUP), _codec())
    guard.measure(*other, _values(4, GROUP), _codec("int4"))
    new = guard.decide()
    assert list(new) == [other] and 0.05 < new[other] < 0.5
    assert guard.decide() == {} and guard.tripped == new
    restored = ErrorGuard(0.05, GROUP, 10)
    restored.restore(guard.state())
    assert restored.tripped == guard.tripped


def test_measures_once_before_each_log_line() -> None:
    """The last iteration of an interval, its first message; never without an interval."""
    guard = ErrorGuard(0.05, GROUP, interval=5)
    assert [i for i in range(12) if guard.due(*SITE, i)] == [4, 9]
    guard.measure(*SITE, _values(4, GROUP), _codec())
    assert not guard.due(*SITE, 4) and guard.due(SITE[0], "tp.backward", 4)
    guard.decide()
    assert guard.due(*SITE, 9)
    assert not ErrorGuard(0.05, GROUP).due(*SITE, 0)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", None),
        ("2-4", {2, 3, 4}),
        ("0,1,4-6", {0, 1, 4, 5, 6}),
        ("0, embedding ,output", {0, "embedding", "output"}),
        ("3-3", {3}),
    ],
)
def test_layers(text: str, layers) -> None:
    """Numbers, ranges and the two names."""
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "4-2", "1,,2", "-1", "1-", "0x1", "99999", "all,1"])
def test_bad_layers_name_the_flag(text: str) -> None:
    """One line with the flag and what is understood."""
    with pytest.raises(CompressionConfigError, match=r"--taco-layers .* is not a layer; give numbers"):
        TensorParallelCompression(tp_compression="taco", taco_layers=text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taco_backward_format": "fp9"}, "--taco-backward-format fp9 is unknown; choose one of"),
        (
            {"taco_format": "int8", "taco_backward_format": "fp8-e5m2", "taco_rounding": "dither"},
            "not --taco-backward-format fp8-e5m2",
        ),
        ({"taco_error_bound": 0.0}, "--taco-error-bound 0.0 must be"),
        ({"taco_error_bound": float("nan")}, "--taco-error-bound nan must be"),
        ({"tp_compression": "none", "taco_error_bound": 0.1}, "add --taco"),
        ({"tp_compression": "none", "taco_layers": "0"}, "add --taco"),
        ({"tp_compression": "none", "taco_backward_format": "int8"}, "add --taco"),
    ],
)
def test_bad_settings_name_the_flag(settings, message: str) -> None:
    """As for every flag."""
    with pytest.raises(CompressionConfigError, match=message):
        TensorParallelCompression(**{"tp_compression": "taco", **settings})


def _runtime(**settings) -> CompressionRuntime:
    settings = {"tp_compression": "taco", "taco_min_message_mb": 1.0, **settings}
    return CompressionRuntime(CompressionConfig(tensor_parallel=TensorParallelCompression(**settings)))


def test_choice_follows_layer_guard_iteration_and_size() -> None:
    """The ledger's kind says why a message went uncompressed."""
    runtime = _runtime(taco_layers="1,output", taco_error_bound=0.05, taco_start_iteration=3)
    large = 2**21

    def kind(site="site", layer=1, channel="tp.forward", size=large) -> str:
        codec, kind = runtime.choose_tensor_parallel_codec(site, layer, channel, size)
        assert (codec is not None) == (kind == "compressed")
        return kind

    assert kind() == "warmup"
    runtime.iteration = 3
    assert kind() == kind(layer="output") == "compressed"
    assert kind(size=100) == "small" and kind(size=None) == "compressed"
    assert kind(layer=0) == kind(layer="embedding") == kind(layer=None) == "excluded"
    runtime.guard.tripped["site", "tp.backward"] = 0.1
    assert kind(channel="tp.backward") == "guarded"
    assert kind() == kind(site="other", channel="tp.backward") == "compressed"


def test_backward_has_its_own_format() -> None:
    """Only tp.backward, and only where asked for."""
    runtime = _runtime(taco_backward_format="int6", taco_group_size=64)
    forward, backward = (
        runtime.choose_tensor_parallel_codec("site", 0, channel, None).codec.config
        for channel in ("tp.forward", "tp.backward")
    )
    assert (forward.format, backward.format) == ("fp8-e4m3", "int6")
    assert forward.group_size == backward.group_size == 64
    same = _runtime()
    assert (
        same.choose_tensor_parallel_codec("site", 0, "tp.backward", None).codec is same.tensor_parallel_codec
    )
