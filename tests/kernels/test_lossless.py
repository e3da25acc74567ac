"""The lossless layout: every bit of every input comes back; sizes; what does not fit.

In plain torch, and the kernels under Triton's CPU interpreter.
"""

import pytest
import torch

from taco_kernels import lossless
from taco_kernels.lossless import FLAG_AT, layout_of
from taco_kernels.lossless.reference import HEADER
from tests.kernels.interpreter import interpreted
from tests.kernels.wires.lossless import (
    bits,
    cases,
    check_every_bit,
    expected_values,
    in_order_of_tiles,
)

SHARE = 0.07
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 5, 8, 127, 128, 129, 1000, 2048, 2056, 4096, 20_000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_comes_back_or_zeros_do(numel: int, dtype: torch.dtype) -> None:
    """Bits of rows that fit; zeros of those that overflow, whose flag and the first row's tell."""
    layout = layout_of(numel, dtype, SHARE)
    for name, x in cases(3, numel, dtype, seed=numel):
        before = x.clone()
        payloads = lossless.encode(x, layout)
        assert payloads.shape == (3, layout.payload_bytes) and payloads.dtype == torch.uint8
        flags = payloads[:, FLAG_AT].tolist()
        assert flags[0] == max(flags), name
        assert not (layout.raw and any(flags)), "a row that is stored as it is never overflows"
        decoded = lossless.decode(payloads, layout)
        assert torch.equal(bits(decoded), bits(expected_values(x, payloads))), name
        assert torch.equal(bits(x), bits(before)), "encoding leaves its input alone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_decode_fills_the_rows_it_is_given_and_nothing_beside_them(
    numel: int, dtype: torch.dtype
) -> None:
    layout = layout_of(numel, dtype, SHARE)
    for name, x in cases(3, numel, dtype, seed=numel):
        payloads = lossless.encode(x, layout)
        wide = torch.full((3, 2 * numel), 7.0, dtype=dtype)
        result = lossless.decode(payloads, layout, wide[:, :numel])
        assert result.data_ptr() == wide.data_ptr()
        assert torch.equal(bits(wide[:, :numel]), bits(expected_values(x, payloads))), name
        assert (wide[:, numel:] == 7).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_like_those_of_training_fit(dtype: torch.dtype) -> None:
    """Trained tensors look like Gaussian ones, with outliers, zeros and what is not finite now and then."""
    layout = layout_of(20_000, dtype, SHARE)
    fitting = set()
    for name, x in cases(2, 20_000, dtype):
        if not lossless.encode(x, layout)[0, FLAG_AT]:
            fitting.add(name)
    ordinary = {
        "gaussian",
        "zeros",
        "negative zeros",
        "one value",
        "some zeros",
        "outliers",
        "tiny",
    }
    assert ordinary | {"inf", "-inf", "nan"} <= fitting
    assert {"every exponent", "random bits", "one row does not fit"}.isdisjoint(fitting)


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 1.40), (torch.float32, 1.16)])
def test_large_rows_shrink(dtype: torch.dtype, least: float) -> None:
    layout = layout_of(2**22, dtype, SHARE)
    assert dtype.itemsize * layout.numel / layout.payload_bytes > least


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_grows_by_more_than_the_header_and_padding(dtype: torch.dtype) -> None:
    """16 bytes and up to 15, whatever it holds: a payload's size depends on the row's length alone."""
    for numel in (*range(1, 3000, 7), 2**20 + 1):
        layout = layout_of(numel, dtype, SHARE)
        assert layout.payload_bytes <= dtype.itemsize * numel + 31
        assert layout.payload_bytes % 16 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_whose_tiles_came_in_another_order_is_brought_into_theirs(
    dtype: torch.dtype,
) -> None:
    """Two tiles' words of escapes change places; what the kernels are compared by undoes it."""
    layout = layout_of(4096, dtype, SHARE)
    [x] = [x for name, x in cases(1, 4096, dtype) if name == "gaussian"]
    [exact] = lossless.encode(x, layout)
    needed = int(exact[:4].view(torch.int32))
    starts = slice(layout.offsets.starts, layout.offsets.starts + 8)
    second = int(exact[starts].view(torch.int32)[1])
    words = second // 2
    assert 0 < words < needed

    swapped = exact.clone()
    area = exact[HEADER : layout.offsets.starts].view(torch.int32)
    swapped_area = swapped[HEADER : layout.offsets.starts].view(torch.int32)
    swapped_area.fill_(-1)  # what nobody reads
    swapped_area[: needed - words] = area[words:needed]
    swapped_area[needed - words : needed] = area[:words]
    first = int(exact[starts].view(torch.int32)[0])
    swapped[starts].view(torch.int32)[0] = first + 2 * (needed - words)
    swapped[starts].view(torch.int32)[1] = second - 2 * words
    assert torch.equal(bits(lossless.decode(swapped[None], layout)), bits(x))
    assert torch.equal(in_order_of_tiles(swapped[None], layout)[0], exact)


@pytest.mark.slow
def test_kernels_keep_every_bit() -> None:
    """Every case of INTERPRETED is tried in both dtypes, in Triton's interpreter.

    Payloads have the definition's bits, too, once tiles are in order.
    """
    assert interpreted(main) == "18"


INTERPRETED = {
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
"""Names of cases by the length of their rows: less than a tile, and more; neither is whole groups."""


def main() -> int:
    """Compare kernels and reference; exits with a traceback on a difference."""
    from taco_kernels.lossless import launch

    count = 0
    for dtype in DTYPES:
        for numel, names in INTERPRETED.items():
            for name, x in cases(2, numel, dtype, seed=numel):
                if name in names:
                    check_every_bit(launch, name, x, layout_of(numel, dtype, SHARE))
                    count += 1
    return count
