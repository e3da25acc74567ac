"""Tensors on which the lossless layout is tried, equality of bits, and kernels tested by both."""

from collections.abc import Iterator

import torch

from taco_kernels.lossless import FLAG_AT, LosslessLayout, reference
from taco_kernels.lossless.reference import HEADER, TILE, WINDOW

INTEGERS = {2: torch.int16, 4: torch.int32}
"""By bytes of a value: the integers that have its bits."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integers that floating-point values are, so that NaNs compare as what they are."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Values of all patterns of bits, equally likely: NaNs with payloads, infinities, denormals."""
    integers = INTEGERS[dtype.itemsize]
    low = torch.iinfo(integers).min
    high = torch.iinfo(integers).max + 1
    return torch.randint(low, high, shape, generator=generator, dtype=integers).view(dtype)


def cases(
    rows: int, numel: int, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor ``[rows, numel]``): ordinary, extreme, and values that do not fit."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian() -> torch.Tensor:
        return torch.randn(rows, numel, generator=generator)

    yield "gaussian", gaussian().to(dtype)
    yield "heavy tails", (gaussian() / gaussian().abs().clamp_min(1e-3)).to(dtype)
    yield "zeros", torch.zeros(rows, numel, dtype=dtype)
    yield "negative zeros", -torch.zeros(rows, numel, dtype=dtype)
    yield "one value", torch.full((rows, numel), -1e-3, dtype=dtype)
    sparse = gaussian()
    sparse[torch.rand(sparse.shape, generator=generator) < 0.02] = 0
    yield "some zeros", sparse.to(dtype)
    outliers = gaussian()
    outliers[:, ::131] *= 2.0**60
    yield "outliers", outliers.to(dtype)
    yield "tiny", (gaussian() * 2.0**-130).to(dtype)
    scattered = gaussian() * torch.exp2(200 * torch.rand(rows, numel, generator=generator) - 100)
    yield "every exponent", scattered.to(dtype)
    yield "random bits", random_bits((rows, numel), dtype, generator)
    special = gaussian().to(dtype)
    special[:, ::301] = random_bits(special[:, ::301].shape, dtype, generator)
    yield "some random bits", special
    for value in (float("inf"), float("-inf"), float("nan")):
        special = gaussian().to(dtype)
        special.view(-1)[:: max(1, numel // 3)] = value
        yield str(value), special
    last_random = gaussian().to(dtype)
    last_random[-1] = random_bits((numel,), dtype, generator)
    yield "one row does not fit", last_random


def expected_values(x: torch.Tensor, payloads: torch.Tensor) -> torch.Tensor:
    """The values that payloads of x must decode to: x, and zeros in rows that overflowed."""
    return torch.where(payloads[:, FLAG_AT, None] == 1, torch.zeros_like(x), x)


def in_order_of_tiles(payloads: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Return payloads as the definition writes them: tiles' escapes in the order of the tiles, zeros elsewhere.

    Kernels take words of escapes in the order in which their programs come, and leave bytes as they were that
    nobody reads: words that no tile has, padding, and all but the header of a row that overflowed.

    Args:
        payloads: uint8[rows, payload_bytes] on the host.
        layout: of a row.
    """
    ordered = torch.zeros_like(payloads)
    if layout.raw:
        used = HEADER + layout.dtype.itemsize * layout.numel
        ordered[:, :used] = payloads[:, :used]
        return ordered
    for payload, result in zip(payloads, ordered, strict=True):
        result[:HEADER] = payload[:HEADER]
        if int(payload[:4].view(torch.int32)) <= layout.sizes.escape_words:
            _order_row(payload, result, layout)
    return ordered


def _order_row(payload: torch.Tensor, result: torch.Tensor, layout: LosslessLayout) -> None:
    """Write a payload that did not overflow to zeros, its tiles' escapes in order."""
    offsets = layout.offsets
    bases = slice(offsets.bases, offsets.bases + layout.blocks)
    result[bases] = payload[bases]
    result[offsets.codes_low :] = payload[offsets.codes_low :]

    # A tile's words, by its escapes and their width.
    codes = reference.codes_of(payload, layout)
    in_tiles = torch.nn.functional.pad((codes == WINDOW).view(-1), (0, -codes.numel() % TILE))
    escapes = in_tiles.view(-1, TILE).sum(1).tolist()
    starts = payload[offsets.starts : offsets.starts + 4 * layout.tiles].view(torch.int32)
    area = payload[HEADER : offsets.starts].view(torch.int32)
    ordered_area = result[HEADER : offsets.starts].view(torch.int32)
    ordered_starts = result[offsets.starts : offsets.starts + 4 * layout.tiles].view(torch.int32)
    end = 0
    for tile, start in enumerate(starts.tolist()):
        first, far = divmod(start, 2)
        words = (escapes[tile] * 4 * (1 + far) + 31) // 32
        ordered_area[end : end + words] = area[first : first + words]
        ordered_starts[tile] = 2 * end + far
        end += words


def check_every_bit(
    kernels, name: str, x: torch.Tensor, layout: LosslessLayout, device: str = "cpu"
) -> None:
    """Encode and decode by ``kernels`` and by the reference, crosswise; and sums of senders.

    Args:
        kernels: module with ``encode``, ``decode`` and ``decode_sum``.
        name: of the case, for messages.
        x: ``[rows, numel]`` on the host.
        layout: of a row.
        device: that the kernels run on.
    """
    exact = reference.encode(x, layout)
    payloads = kernels.encode(x.to(device), layout)
    assert torch.equal(in_order_of_tiles(payloads.cpu(), layout), exact), name
    expected = bits(expected_values(x, exact))
    for encoded in (payloads, exact.to(device)):
        assert torch.equal(bits(kernels.decode(encoded, layout)).cpu(), expected), name
        assert torch.equal(bits(reference.decode(encoded.cpu(), layout)), expected), name
    _check_strides(kernels, name, x, layout, expected, device)
    senders = torch.stack((payloads, exact.to(device), payloads))
    for dtype in (torch.float32, torch.bfloat16):
        total = kernels.decode_sum(senders, layout, dtype, 0.5).cpu()
        expected_sum = reference.decode_sum(senders.cpu(), layout, dtype, 0.5)
        assert torch.equal(total.nan_to_num(9.0), expected_sum.nan_to_num(9.0)), (name, dtype)


def _check_strides(
    kernels,
    name: str,
    x: torch.Tensor,
    layout: LosslessLayout,
    expected: torch.Tensor,
    device: str,
) -> None:
    """Rows of larger tensors, at addresses that 16-byte accesses cannot reach."""
    rows, numel = x.shape
    source = torch.empty(rows, 2 * numel + 1, dtype=x.dtype, device=device)[:, 1 : numel + 1]
    source.copy_(x)
    target = torch.empty(rows, numel + 3, dtype=x.dtype, device=device)[:, 3:]
    kernels.decode(kernels.encode(source, layout), layout, target)
    assert torch.equal(bits(target).cpu(), expected), (name, "strides")
