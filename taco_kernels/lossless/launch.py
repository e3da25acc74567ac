"""Launching the lossless kernels. Same signatures as reference.py.

Escapes lie in the order in which programs come by, so the bytes of a payload may differ from the reference's
and between runs; what they decode to does not.
"""

import torch

from taco_kernels.common.fast_launch import start
from taco_kernels.common.sizes import ALIGNMENT
from taco_kernels.lossless import reference
from taco_kernels.lossless.kernels import decode_kernel, decode_sum_kernel, encode_kernel
from taco_kernels.lossless.layout import BLOCK, GROUP, HEADER, TILE, LosslessLayout

WARPS = 2
"""Measured on an H200."""


def encode(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """See reference.encode."""
    layout.check_values(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = len(x)
    payloads = torch.empty((rows, layout.payload_bytes), dtype=torch.uint8, device=x.device)
    if layout.raw:
        return reference.store_raw(x, payloads.zero_())
    payloads[:, :HEADER] = 0
    x = x.view(_bits(layout))
    start(
        encode_kernel,
        (layout.tiles, rows),
        (x, payloads),
        (*_counts(layout), x.stride(0), payloads.stride(0), *_places(layout)),
        FP32=layout.itemsize == 4,
        WHOLE=_whole(x, layout),
        TILE=TILE,
        num_warps=WARPS,
    )
    return payloads


def decode(payloads: torch.Tensor, layout: LosslessLayout, out: torch.Tensor | None = None) -> torch.Tensor:
    """See reference.decode."""
    layout.check_payloads(payloads)
    if layout.raw:
        return reference.decode(payloads, layout, out)
    payloads = _addressable(payloads)
    shape = (len(payloads), layout.numel)
    if out is None:
        out = torch.empty(shape, dtype=layout.dtype, device=payloads.device)
    into = (
        out if _takes(out, shape, layout.dtype) else torch.empty(shape, dtype=layout.dtype, device=out.device)
    )
    bits = into.view(_bits(layout))
    start(
        decode_kernel,
        (layout.tiles, len(payloads)),
        (payloads, bits),
        (*_counts(layout), payloads.stride(0), bits.stride(0), *_places(layout)),
        **_decoding(layout, bits),
    )
    return out if into is out else out.copy_(into)


def decode_sum(
    payloads: torch.Tensor,
    layout: LosslessLayout,
    dtype: torch.dtype,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.decode_sum, as one kernel."""
    layout.check_payloads(payloads)
    if layout.raw:
        return reference.decode_sum(payloads, layout, dtype, scale, out)
    payloads = _addressable(payloads)
    senders, *shape = *payloads.shape[:2], layout.numel
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=payloads.device)
    into = (
        out
        if _takes(out, tuple(shape), out.dtype)
        else torch.empty(shape, dtype=out.dtype, device=out.device)
    )
    start(
        decode_sum_kernel,
        (layout.tiles, shape[0]),
        (payloads, into),
        (
            *_counts(layout),
            *(payloads.stride(0), payloads.stride(1), into.stride(0), *_places(layout)),
            *(senders, float(scale)),
        ),
        **_decoding(layout, into),
        enable_fp_fusion=False,
    )
    return out if into is out else out.copy_(into)


def _bits(layout: LosslessLayout) -> torch.dtype:
    return torch.int32 if layout.itemsize == 4 else torch.int16


def _counts(layout: LosslessLayout) -> tuple[int, ...]:
    return layout.numel, layout.blocks * (BLOCK // GROUP), layout.blocks, layout.words


def _places(layout: LosslessLayout) -> tuple[int, ...]:
    before = layout.starts_at, layout.bases_at, layout.codes_at
    return *before, layout.more_at, layout.high_at, layout.low_at


def _whole(x: torch.Tensor, layout: LosslessLayout) -> bool:
    """Whether rows are whole tiles that can be loaded and stored in words."""
    stride = x.stride(0) * x.element_size() if len(x) > 1 else 0
    return not (layout.numel % TILE or stride % ALIGNMENT or x.data_ptr() % ALIGNMENT)


def _decoding(layout: LosslessLayout, out: torch.Tensor) -> dict[str, object]:
    """The decoding kernels' constants."""
    return dict(FP32=layout.itemsize == 4, WHOLE=_whole(out, layout), TILE=TILE, num_warps=WARPS)


def _addressable(payloads: torch.Tensor) -> torch.Tensor:
    """Payloads whose rows kernels can load in words, copied if need be."""
    strides = payloads.stride()
    if (
        strides[-1] == 1
        and not any(s % ALIGNMENT for s in strides[:-1])
        and not payloads.data_ptr() % ALIGNMENT
    ):
        return payloads
    return payloads.clone(memory_format=torch.contiguous_format)


def _takes(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether kernels can store rows of ``shape`` in ``out``."""
    return out.shape == shape and out.dtype == dtype and out.stride(1) == 1
