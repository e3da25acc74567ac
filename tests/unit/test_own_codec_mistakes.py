"""The mistakes that a codec's author makes: each is named in one line before anything is sent."""

import math
from dataclasses import dataclass

import pytest
import torch

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.base import TwoHops
from megatron.compression.codecs.contract import check_contract
from megatron.compression.codecs.grouped import TacoCodec
from megatron.compression.data_parallel.codec_gradients import (
    CodecGradients,
    parse_gradient_compressor,
)
from megatron.compression.errors import CompressionConfigError
from megatron.compression.names import path_of_traffic


@dataclass(frozen=True)
class Halves(Codec):
    """A correct codec: values as bf16."""

    def payload_bytes(self, shape) -> int:
        return 2 * math.prod(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1).to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        return payloads.view(torch.bfloat16).view(len(payloads), *shape).to(dtype)


@dataclass(frozen=True)
class Longer(Halves):
    def payload_bytes(self, shape) -> int:
        return 1 + super().payload_bytes(shape)


@dataclass(frozen=True)
class Halfwords(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x).view(torch.bfloat16)


@dataclass(frozen=True)
class OneRow(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x).view(-1)


@dataclass(frozen=True)
class Strided(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x).t().contiguous().t()


@dataclass(frozen=True)
class InPlace(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x.mul_(2))


@dataclass(frozen=True)
class WholeGroups(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x.reshape(len(x), -1, 8))


@dataclass(frozen=True)
class NeedsCuda(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("my kernel needs CUDA\nand more lines")


@dataclass(frozen=True)
class Flat(Halves):
    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(payloads, shape, dtype).reshape(len(payloads), 1, -1)


@dataclass(frozen=True)
class Float32(Halves):
    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(payloads, shape, torch.float32)


@dataclass(frozen=True)
class NoReturn(Halves):
    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        super().decode(payloads, shape, dtype)


@dataclass(frozen=True)
class SwallowsNan(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(torch.nan_to_num(x))


@dataclass(frozen=True)
class Divides(Halves):
    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(payloads, shape, dtype) / 0


@dataclass(frozen=True)
class FloatSize(Halves):
    def payload_bytes(self, shape) -> int:
        return 16 * math.prod(shape) / 8


@dataclass(frozen=True)
class ClampsInfinity(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x.clamp(-1e4, 1e4))


@dataclass(frozen=True)
class DividesByScale(Halves):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(len(x), -1)
        scale = rows.abs().amax(dim=1, keepdim=True)
        return super().encode(rows / scale * scale)


@dataclass(frozen=True)
class Negates(Halves):
    def decode(self, payloads: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        return -super().decode(payloads, shape, dtype)


@dataclass(frozen=True)
class InheritsEncodeInto(TacoCodec):
    """It encodes twice its values, where the codec that it inherits from encodes into memory."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(2 * x)


MISTAKES = {
    InheritsEncodeInto: "encode_into writes other bytes than encode returns; write both",
    FloatSize: r"payload_bytes returns 2000\.0; return a whole number",
    ClampsInfinity: "inf that is encoded decodes to finite numbers",
    DividesByScale: "zeros do not decode to zeros; a scale of zero needs a case of its own",
    Negates: r"decode returns other values than were encoded \(cosine of the angle -1\.00\)",
    Longer: "encode returns 2000 bytes for a row of .*, "
    "payload_bytes says 2001; make both the same",
    Halfwords: r"encode returns torch.bfloat16, not torch.uint8; end it with \.view\(torch.uint8\)",
    OneRow: r"encode returns shape \[4000\] for 2 rows; return \[rows, bytes\]",
    Strided: r"not contiguous; end it with \.contiguous\(\)",
    InPlace: "encode changes its input; work on a copy",
    WholeGroups: r"encode of 2 rows of torch.bfloat16 values of shape \[37\] raises RuntimeError",
    NeedsCuda: r"encode of 2 rows .* raises RuntimeError: my kernel needs CUDA$",
    Flat: r"decode returns shape \[2, 1, 1000\], not \[rows, \*shape\] = \[2, 1000\]",
    Float32: r"decode returns torch.float32 where dtype=torch.bfloat16 .* \.to\(dtype\)",
    NoReturn: "decode returns NoneType where",
    SwallowsNan: "NaN that is encoded decodes to finite numbers",
    Divides: "decode returns NaN or infinities for finite values",
}


@pytest.mark.parametrize("codec", MISTAKES)
def test_a_mistake_is_named_with_its_codec(codec: type[Codec]) -> None:
    with pytest.raises(CompressionConfigError, match=MISTAKES[codec]) as error:
        check_contract([codec()])
    assert str(error.value).startswith(f"{__name__}:{codec.__name__}: ")
    assert "\n" not in str(error.value)


class Undecorated(Halves):
    """Its field is no setting: the decorator is missing."""

    group: int = 64


@dataclass(frozen=True)
class NeedsValue(Halves):
    group: int


def test_a_subclass_without_its_decorator_is_refused() -> None:
    with pytest.raises(CompressionConfigError, match=r"put @dataclass\(frozen=True\) above"):
        parse_codec(f"{__name__}:Undecorated")


def test_a_setting_without_a_value_is_named() -> None:
    spec = f"{__name__}:NeedsValue"
    with pytest.raises(
        CompressionConfigError, match=r"needs a value for group, as in .*:group=VALUE"
    ):
        parse_codec(spec)
    assert parse_codec(f"{spec}:group=8").group == 8


@pytest.mark.parametrize(
    ("traffic", "path"),
    [
        ("tp.forward", "tensor_parallel.compression"),
        ("tp.backward", "tensor_parallel.backward"),
        ("dp.gradient", "data_parallel.compression"),
        ("dp.weight", "data_parallel.weights"),
        ("dp.outer", "data_parallel.outer"),
        ("ep.backward", "expert_parallel.backward"),
    ],
)
def test_the_setting_of_a_traffic_class(traffic: str, path: str) -> None:
    """A mistake is told with the flag that has the codec."""
    assert path_of_traffic(traffic) == path


def test_the_codec_of_a_sum_is_checked() -> None:
    with pytest.raises(CompressionConfigError, match="payload_bytes says"):
        check_contract([TwoHops(Halves(), Longer())])


def test_the_codec_of_gradients_is_checked() -> None:
    with pytest.raises(CompressionConfigError, match="payload_bytes says"):
        check_contract([CodecGradients(Longer())])


def test_correct_codecs_pass() -> None:
    check_contract([Halves(), parse_codec("examples.paper.per_tensor_fp8:PerTensorFp8")])


def test_compressors_without_a_codec_and_our_own_codecs_pass() -> None:
    check_contract([parse_gradient_compressor("tagc"), parse_codec("lossless")])
