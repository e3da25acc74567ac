"""The lossless layout in plain torch: every bit of every input comes back; sizes; what does not fit;
and the kernels under Triton's CPU interpreter."""

import pytest
import torch

from taco_kernels import lossless
from taco_kernels.lossless import FLAG_AT, layout_of
from tests.kernels.interpreter import interpreted
from tests.kernels.wires.lossless import bits, cases, check_every_bit

SHARE = 0.07
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 5, 8, 127, 128, 129, 1000, 2048, 2056, 4096, 20_000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_comes_back_or_zeros_do(numel: int, dtype: torch.dtype) -> None:
    """Bits of rows that fit; zeros of those that overflow, whose flag and the first row's say so."""
    layout = layout_of(numel, dtype, SHARE)
    for name, x in cases(3, numel, dtype, seed=numel):
        before = x.clone()
        payloads = lossless.encode(x, layout)
        assert payloads.shape == (3, layout.payload_bytes) and payloads.dtype == torch.uint8
        flags = payloads[:, FLAG_AT].tolist()
        assert flags[0] == max(flags) <= (not layout.raw), name
        expected = torch.where(payloads[:, FLAG_AT, None] == 1, torch.zeros_like(x), x)
        assert torch.equal(bits(lossless.decode(payloads, layout)), bits(expected)), name
        assert torch.equal(bits(x), bits(before)), name
        into = torch.full((3, 2 * numel), 7.0, dtype=dtype)
        assert lossless.decode(payloads, layout, into[:, :numel]).data_ptr() == into.data_ptr()
        assert (
            torch.equal(bits(into[:, :numel]), bits(expected)) and (into[:, numel:] == 7).all()
        ), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fits(dtype: torch.dtype) -> None:
    """Trained tensors look like Gaussian ones, with outliers, zeros and what is not finite here and there."""
    layout = layout_of(20_000, dtype, SHARE)
    fitting = {
        name for name, x in cases(2, 20_000, dtype) if not lossless.encode(x, layout)[0, FLAG_AT]
    }
    wanted = {"gaussian", "zeros", "negative zeros", "one value", "some zeros", "outliers", "tiny"}
    assert wanted | {"inf", "-inf", "nan"} <= fitting
    assert {"every exponent", "random bits", "one row does not fit"}.isdisjoint(fitting)


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 1.40), (torch.float32, 1.16)])
def test_sizes(dtype: torch.dtype, least: float) -> None:
    """Large rows shrink; none grows by more than the header and 15 bytes of padding, whatever it holds."""
    layout = layout_of(2**22, dtype, SHARE)
    assert dtype.itemsize * layout.numel / layout.payload_bytes > least
    for numel in (*range(1, 3000, 7), 2**20 + 1):
        layout = layout_of(numel, dtype, SHARE)
        assert (
            layout.payload_bytes <= dtype.itemsize * numel + 31 and layout.payload_bytes % 16 == 0
        )


@pytest.mark.slow
def test_kernels_keep_every_bit() -> None:
    assert interpreted(main) == "18"


KINDS = {
    136: ("gaussian", "random bits", "negative zeros"),
    2051: (
        "gaussian",
        "heavy tails",
        "outliers",
        "some random bits",
        "nan",
        "one row does not fit",
    ),
}


def main() -> int:
    """Compare kernels and reference; exits with a traceback on a difference."""
    from taco_kernels.lossless import launch

    count = 0
    for dtype in DTYPES:
        for numel, kinds in KINDS.items():
            for name, x in cases(2, numel, dtype, seed=numel):
                if name in kinds:
                    check_every_bit(launch, name, x, layout_of(numel, dtype, SHARE))
                    count += 1
    return count
