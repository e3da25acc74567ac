"""One call of a user's own codec before training, against the contract of ``Codec``.

A codec that breaks its contract fails late and elsewhere: a payload of another size hangs or
garbles a collective, a result of another dtype raises inside autograd without the codec's name, a
swallowed NaN trains on. So each codec that does not come with this package encodes and decodes a
few small tensors when compression is attached, and what is wrong is said in one line.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from megatron.compression.codecs.base import Codec, Shape
from megatron.compression.errors import CompressionConfigError, first_line

OWN_PACKAGE = "megatron.compression."
ROWS = 2
FLAT_SHAPES: tuple[Shape, ...] = ((1000,), (37,), (1,))
"""Rows without a shape: a codec pads inside, so any number of values must do."""
TOKEN_SHAPES: tuple[Shape, ...] = ((16, 256), (3, 2, 256))
"""(tokens, ..., channels) for codecs whose payload depends on the row's shape."""
DTYPES = (torch.bfloat16, torch.float32)


def check_contract(compressors: Iterable[object]) -> None:
    """Try every codec of a run that was written outside of this package.

    Args:
        compressors: codecs, and gradient compressors that may hold one as ``codec``.

    Raises:
        CompressionConfigError: a codec breaks the contract; the line names codec and mistake.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codecs: dict[Codec, None] = {}  # in order, each once
    for compressor in compressors:
        codec = getattr(compressor, "codec", compressor)
        codecs.update(dict.fromkeys(getattr(codec, "hops", ())))
    for codec in codecs:
        if not type(codec).__module__.startswith(OWN_PACKAGE):
            _check_codec(codec, device)


def _check_codec(codec: Codec, device: str) -> None:
    """Try one codec on tensors of several shapes and dtypes.

    Raises:
        CompressionConfigError: its first mistake.
    """
    for shape in TOKEN_SHAPES if codec.sees_shape else FLAT_SHAPES:
        for dtype in DTYPES:
            # The same values on every rank: all of them refuse the codec, or none.
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(ROWS, *shape, generator=generator).to(device, dtype)
            if mistake := _mistake(codec, x):
                raise CompressionConfigError(f"{codec.name}: {mistake}")


def _mistake(codec: Codec, x: torch.Tensor) -> str | None:
    """Return what is wrong with a codec's payloads of ``x [rows, *shape]``, and how to mend it, or
    None."""
    rows = len(x)
    shape = x.shape[1:]
    dtype = x.dtype
    values = f"{dtype} values of shape {[*shape]}"
    # ``step`` goes along, so that whatever the codec raises is told with what it was doing.
    before = x.clone()
    step = f"payload_bytes of shape {[*shape]}"
    try:
        payload_bytes = codec.message_bytes(shape, dtype)
        if not isinstance(payload_bytes, int):
            return f"payload_bytes returns {payload_bytes!r}; return a whole number, an int"
        step = f"encode of {rows} rows of {values}"
        payloads = codec.encode(x)
        if mistake := _payload_mistake(payloads, rows, payload_bytes, values):
            return mistake
        if not torch.equal(x, before):
            return "encode changes its input; work on a copy, since the tensor is used afterwards"
        step = f"encode_into of {values}"
        out = payloads.new_zeros(1, payload_bytes)
        # A codec that inherits from one of this package may have inherited the other's.
        if not torch.equal(codec.encode_into(x[:1], out), codec.encode(x[:1])):
            return "encode_into writes other bytes than encode returns; write both, or neither"
        step = f"decode of {rows} payloads of {values}"
        decoded = codec.decode(payloads, shape, dtype)
        if mistake := _decoded_mistake(decoded, x):
            return mistake
        step = f"encode and decode of zeros, {values}"
        zeros = torch.zeros_like(x)
        if not torch.equal(codec.decode(codec.encode(zeros), shape, dtype), zeros):
            return "zeros do not decode to zeros; a scale of zero needs a case of its own"
        for name in ("NaN", "inf", "-inf"):
            step = f"encode and decode of {name} among {values}"
            # In the last row, so that a codec that looks at the first one alone is noticed.
            damaged = x.clone()
            damaged.view(rows, -1)[-1, 0] = float(name)
            if codec.decode(codec.encode(damaged), shape, dtype)[-1].isfinite().all():
                return (
                    f"{name} that is encoded decodes to finite numbers, so that a broken run would "
                    "train on; let NaN and infinities through, as a scale of their group for example"
                )
    except CompressionConfigError:
        raise
    except Exception as error:  # a codec raises what it likes
        return f"{step} raises {type(error).__name__}: {first_line(error)}"
    return None


def _payload_mistake(payloads: object, rows: int, payload_bytes: int, values: str) -> str | None:
    """Return what is wrong with what ``encode`` returned, or None."""
    if not isinstance(payloads, torch.Tensor) or payloads.dtype != torch.uint8:
        returned = payloads.dtype if isinstance(payloads, torch.Tensor) else type(payloads).__name__
        return f"encode returns {returned}, not torch.uint8; end it with .view(torch.uint8)"
    if payloads.dim() != 2 or len(payloads) != rows:
        return (
            f"encode returns shape {[*payloads.shape]} for {rows} rows; return [rows, bytes], a "
            "payload a row"
        )
    if payloads.shape[1] != payload_bytes:
        return (
            f"encode returns {payloads.shape[1]} bytes for a row of {values}, payload_bytes says "
            f"{payload_bytes}; make both the same"
        )
    if not payloads.is_contiguous():
        return "encode returns a tensor that is not contiguous; end it with .contiguous()"
    return None


def _decoded_mistake(decoded: object, x: torch.Tensor) -> str | None:
    """Return what is wrong with what ``decode`` returned for finite ``x [rows, *shape]``, or
    None."""
    if not isinstance(decoded, torch.Tensor) or decoded.dtype != x.dtype:
        returned = decoded.dtype if isinstance(decoded, torch.Tensor) else type(decoded).__name__
        return (
            f"decode returns {returned} where dtype={x.dtype} is asked for; end it with .to(dtype)"
        )
    if decoded.shape != x.shape:
        return (
            f"decode returns shape {[*decoded.shape]}, not [rows, *shape] = {[*x.shape]}; end it "
            "with .view(len(payloads), *shape)"
        )
    if not decoded.isfinite().all():
        return "decode returns NaN or infinities for finite values"
    # Even one bit a value keeps half of the direction of Gaussian values.
    cosine = F.cosine_similarity(decoded.double().flatten(), x.double().flatten(), dim=0)
    if cosine <= 0:
        return (
            f"decode returns other values than were encoded (cosine of the angle {cosine:.2f}); "
            "check the sign and the order of values"
        )
    return None
