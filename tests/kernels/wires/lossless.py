"""Tensors on which the lossless layout is tried, equality of bits, and kernels tested by both."""

from collections.abc import Iterator

import torch

from taco_kernels.lossless import FLAG_AT, LosslessLayout, reference

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
    assert torch.equal(payloads[:, FLAG_AT].cpu(), exact[:, FLAG_AT]), name
    expected = bits(expected_values(x, exact))
    for encoded in (payloads, exact.to(device)):
        assert torch.equal(bits(kernels.decode(encoded, layout)).cpu(), expected), name
        assert torch.equal(bits(reference.decode(encoded.cpu(), layout)), expected), name
    _check_strides(kernels, name, x, layout, expected, device)
    # A sum in bf16 is not asked for: the interpreter cuts fp32 off to it, where devices round.
    senders = torch.stack((payloads, exact.to(device), payloads))
    total = kernels.decode_sum(senders, layout, torch.float32, 0.5).cpu()
    expected_sum = reference.decode_sum(senders.cpu(), layout, torch.float32, 0.5)
    assert torch.equal(total.nan_to_num(9.0), expected_sum.nan_to_num(9.0)), (name, "sums")


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
