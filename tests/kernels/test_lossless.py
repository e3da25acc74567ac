"""The lossless layout in plain torch: every bit of every input comes back; sizes; what does not fit."""

import pytest
import torch

from taco_kernels import lossless
from taco_kernels.lossless import CUT, FLAG_AT, LosslessLayout, layout_of
from tests.kernels.wires.lossless import bits, cases

SHARE = 0.07
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 5, 8, 127, 128, 129, 1000, 2048, 2056, 4096, 20_000)


def whole(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Payloads with their rest, where one is needed."""
    payloads = lossless.encode(x, layout)
    assert payloads.shape == (len(x), layout.head_bytes) and payloads.dtype == torch.uint8
    if bool((payloads[:, FLAG_AT] != CUT).all()):
        return payloads
    assert (payloads[:, FLAG_AT] == CUT).all(), "rows of one exchange agree"
    rest = lossless.rest(x, layout)
    assert rest.shape == (len(x), layout.rest_bytes)
    return torch.cat((payloads, rest), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_comes_back(numel: int, dtype: torch.dtype) -> None:
    layout = layout_of(numel, dtype, SHARE)
    for name, x in cases(3, numel, dtype, seed=numel):
        before = x.clone()
        payloads = whole(x, layout)
        found = lossless.decode(payloads, layout)
        assert torch.equal(bits(found), bits(x)), name
        assert torch.equal(bits(x), bits(before)), name
        into = torch.full((3, 2 * numel), 7.0, dtype=dtype)
        assert lossless.decode(payloads, layout, into[:, :numel]).data_ptr() == into.data_ptr()
        assert torch.equal(bits(into[:, :numel]), bits(x)) and (into[:, numel:] == 7).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fits(dtype: torch.dtype) -> None:
    """Trained tensors look like Gaussian ones, with outliers, zeros and what is not finite here and there."""
    layout = layout_of(20_000, dtype, SHARE)
    flags = {name: int(lossless.encode(x, layout)[0, FLAG_AT]) for name, x in cases(2, 20_000, dtype)}
    fitting = {name for name, flag in flags.items() if flag != CUT}
    wanted = {"gaussian", "zeros", "negative zeros", "one value", "some zeros", "outliers", "tiny"}
    assert wanted | {"inf", "-inf", "nan"} <= fitting
    assert {"every exponent", "random bits", "one row does not fit"}.isdisjoint(fitting)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_payloads_without_their_rest_are_zeros(dtype: torch.dtype) -> None:
    """In sums too; one that was cut counts for nothing there."""
    layout = layout_of(5000, dtype, SHARE)
    kinds = dict(cases(2, 5000, dtype))
    cut, coded = (lossless.encode(kinds[name], layout) for name in ("random bits", "gaussian"))
    assert torch.equal(bits(lossless.decode(cut, layout)), torch.zeros_like(bits(kinds["gaussian"])))
    total = lossless.decode_sum(torch.stack((coded, cut)), layout, dtype)
    assert torch.equal(total, kinds["gaussian"])


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 1.40), (torch.float32, 1.16)])
def test_sizes(dtype: torch.dtype, least: float) -> None:
    """Large rows shrink; none grows by more than the header and 15 bytes of padding, whatever it holds."""
    layout = layout_of(2**22, dtype, SHARE)
    assert dtype.itemsize * layout.numel / layout.head_bytes > least
    for numel in (*range(1, 3000, 7), 2**20 + 1):
        layout = layout_of(numel, dtype, SHARE)
        assert layout.head_bytes + layout.rest_bytes == layout.whole_bytes
        assert 16 <= layout.whole_bytes - dtype.itemsize * numel <= 31
        assert layout.head_bytes % 16 == 0 == layout.whole_bytes % 16


def test_sums_run_in_order_and_round_once() -> None:
    layout = layout_of(3000, torch.bfloat16, SHARE)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2, 3000, generator=generator).to(torch.bfloat16)
    payloads = torch.stack([whole(rows, layout) for rows in x])
    exact = x[0].float()
    for rows in x[1:]:
        exact = exact + rows.float()
    assert torch.equal(lossless.decode_sum(payloads, layout, torch.float32), exact)
    assert torch.equal(lossless.decode_sum(payloads, layout, torch.bfloat16, 0.3), (exact * 0.3).bfloat16())
    into = torch.empty(2, 3000)
    assert lossless.decode_sum(payloads, layout, torch.bfloat16, out=into) is into
    assert torch.equal(into, exact)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="takes bf16 and fp32"):
        layout_of(128, torch.float16, SHARE)
    with pytest.raises(ValueError, match="share"):
        layout_of(128, torch.bfloat16, 0.0)
    layout = layout_of(4096, torch.bfloat16, SHARE)
    with pytest.raises(ValueError, match=r"this layout needs torch\.bfloat16"):
        lossless.encode(torch.zeros(1, 4096), layout)
    with pytest.raises(ValueError, match=r"this layout needs uint8"):
        lossless.decode(torch.zeros(1, 100, dtype=torch.uint8), layout)
