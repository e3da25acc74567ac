"""The mistakes that a codec's author makes: each is named in one line before anything is sent."""

import math
from dataclasses import dataclass

import pytest
import torch

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.base import TwoHops
from megatron.compression.codecs.contract import check_contract
from megatron.compression.data_parallel.codec_gradients import (
    CodecGradients,
    parse_gradient_compressor,
)
from megatron.compression.errors import CompressionConfigError


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


MISTAKES = {
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
    SwallowsNan: "a NaN that is encoded decodes to finite numbers",
    Divides: "decode returns NaN or infinities for finite values",
}


@pytest.mark.parametrize("codec", MISTAKES)
def test_a_mistake_is_named_with_its_codec(codec: type[Codec]) -> None:
    with pytest.raises(CompressionConfigError, match=MISTAKES[codec]) as error:
        check_contract([codec()])
    assert str(error.value).startswith(f"{__name__}:{codec.__name__}: ")
    assert "\n" not in str(error.value)


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
