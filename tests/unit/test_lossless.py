"""The lossless codec: its part of the contract, sums, overflows, and where it is refused."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import overflow
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from tests.kernels.wires.lossless import bits, cases
from tests.unit.megatron_args import parsed

LOSSLESS = parse_codec("lossless")
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((1,), (1000,), (6, 1, 257), (64, 2, 96))


class Asked:
    """A transport that says what the flag is on this rank."""

    overflow = overflow.Overflow()

    @staticmethod
    def any_rank(flag: torch.Tensor) -> bool:
        return bool(flag)


def wild(rows: int, numel: int) -> torch.Tensor:
    """Values that do not fit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, numel, generator=generator)
    return x * torch.exp2(60 * torch.rand(rows, numel, generator=generator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_of_any_shape_and_stride(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Values that do not fit are coded by the codec that is taken instead."""
    numel = torch.Size(shape).numel()
    for name, flat in cases(3, numel, dtype):
        x = flat.view(3, *shape)
        codec, payloads = overflow.encode(LOSSLESS, x, Asked)
        assert payloads.shape[1] == codec.message_bytes(shape, dtype), name
        actual = codec.decode(payloads, shape, dtype)
        assert actual.shape == x.shape and torch.equal(bits(actual), bits(x)), name
        strided = torch.empty(3, *shape[::-1], dtype=dtype).permute(0, *range(len(shape), 0, -1))
        strided.copy_(x)
        assert torch.equal(codec.encode(strided), payloads), name
        assert codec.decode_into(payloads, shape, dtype, strided.zero_()) is strided
        assert torch.equal(bits(strided), bits(x)), name


def test_overflow_flag() -> None:
    """One row of a call is enough; with more escapes, or a message stored as it is, all fits."""
    generator = torch.Generator().manual_seed(0)
    fits = torch.randn(2, 4096, generator=generator)
    wide = fits * torch.exp2(10 * torch.rand(2, 4096, generator=generator))
    one_row = torch.cat((fits, wild(1, 4096)))
    for expected, x in ((0, fits), (1, wild(2, 4096)), (1, one_row), (0, wild(2, 8)), (1, wide)):
        assert LOSSLESS.overflow_flag(LOSSLESS.encode(x.bfloat16())) == expected
    grid = torch.stack((fits, wild(2, 4096))).bfloat16()
    assert LOSSLESS.overflow_flag(LOSSLESS.encode_grid(grid))
    roomy = parse_codec("lossless:escapes=0.7")
    assert not roomy.overflow_flag(roomy.encode(wide.bfloat16()))


@pytest.mark.parametrize("kind", ["fits", "overflows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_to_what_was_encoded(dtype: torch.dtype, kind: str) -> None:
    """An all-reduce sums in fp32 in rank order and rounds once; the sum travels with every bit."""
    x = torch.randn(3, 2, 640, generator=torch.Generator().manual_seed(1))
    x = (x if kind == "fits" else x * wild(1, 640)).to(dtype)
    codec = LOSSLESS if kind == "fits" else overflow.AsIs(dtype)
    payloads = torch.stack([codec.encode(rows) for rows in x])
    exact = ((x[0].float() + x[1].float()) + x[2].float()).to(dtype)
    last, encoded = overflow.sum_and_encode(codec, payloads, (640,), dtype, LOSSLESS, Asked)
    assert (last is LOSSLESS) == (kind == "fits")
    assert torch.equal(last.decode(encoded, (640,), dtype), exact)
    into = torch.empty(2, 640)
    assert codec.decode_sum(payloads, (640,), dtype, 0.5, into) is into
    assert torch.equal(into, ((x[0].float() + x[1].float()) + x[2].float()) * 0.5)


def test_weights_are_sent_themselves() -> None:
    """A difference of bf16 values need not be exact; and NaNs stay as they are."""
    generator = torch.Generator().manual_seed(2)
    for name, new in cases(2, 700, torch.bfloat16):
        old = torch.randn(2, 700, generator=generator).bfloat16()
        payloads = torch.stack(
            [LOSSLESS.encode_difference(*pair) for pair in zip(new, old, strict=True)]
        )
        flags = [bool(LOSSLESS.overflow_flag(payload)) for payload in payloads]
        expected = torch.where(torch.tensor(flags)[:, None], torch.zeros_like(new), new)
        assert torch.equal(bits(LOSSLESS.add_decoded(payloads, old)), bits(expected)), name


def test_refusals() -> None:
    """fp16, a lossy codec together with it, a share of nothing."""
    alone = "give it alone"
    for spec, message in (("lossless/int6", alone), ("lossless:escapes=0", "share=0")):
        with pytest.raises(CompressionConfigError, match=message):
            parse_codec(spec)
    with pytest.raises(ValueError, match="takes bf16 and fp32"):
        LOSSLESS.encode(torch.zeros(1, 128, dtype=torch.float16))
    for dimension in (TensorParallelConfig, PipelineParallelConfig, DataParallelConfig):
        config = dimension(compression="lossless")
        with pytest.raises(
            CompressionConfigError, match=r"exponents of 8 bits, and fp16 has 5; use --bf16"
        ):
            config.check(parsed(bf16=False, fp16=True, use_distributed_optimizer=True))
        config.check(parsed(use_distributed_optimizer=True, main_params_dtype=None))


def test_lossless_gradients_bring_lossless_weights() -> None:
    assert DataParallelConfig(compression="lossless").weight_codec == LOSSLESS
    assert DataParallelConfig(compression="lossless", weights="none").weight_codec is None
