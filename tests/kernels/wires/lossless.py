"""Tensors on which the lossless layout is tried, equality that looks at bits, and kernels by both."""

from collections.abc import Iterator

import torch

from taco_kernels.lossless import FLAG_AT, LosslessLayout, reference


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integers that floating-point values are, so that NaNs compare as what they are."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Every pattern of bits alike: NaNs with payloads, infinities, denormals."""
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(words).min, torch.iinfo(words).max + 1
    return torch.randint(low, high, shape, generator=generator, dtype=words).view(dtype)


def cases(
    rows: int, numel: int, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of many kinds, by name."""
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
    first = gaussian().to(dtype)
    first[-1] = random_bits((numel,), dtype, generator)
    yield "one row does not fit", first


def check_every_bit(
    kernels, name: str, x: torch.Tensor, layout: LosslessLayout, device: str = "cpu"
) -> None:
    """Encode and decode by ``kernels`` on ``device`` and by the reference, crosswise; and sums of senders."""
    exact, payloads = reference.encode(x, layout), kernels.encode(x.to(device), layout)
    assert torch.equal(payloads[:, FLAG_AT].cpu(), exact[:, FLAG_AT]), name
    expected = bits(torch.where(exact[:, FLAG_AT, None] == 1, torch.zeros_like(x), x))
    senders = torch.stack((payloads, exact.to(device), payloads))
    for one in senders[:2]:
        assert torch.equal(bits(kernels.decode(one, layout)).cpu(), expected), name
        assert torch.equal(bits(reference.decode(one.cpu(), layout)), expected), name
    (rows, numel), like = x.shape, dict(dtype=x.dtype, device=device)
    shifted, into = torch.empty(rows, 2 * numel + 1, **like), torch.empty(rows, numel + 3, **like)
    shifted[:, 1 : numel + 1] = x
    kernels.decode(kernels.encode(shifted[:, 1 : numel + 1], layout), layout, into[:, 3:])
    assert torch.equal(bits(into[:, 3:]).cpu(), expected), (name, "strides")
    # bf16 is not asked for: the interpreter cuts fp32 off to it, where devices round
    total = kernels.decode_sum(senders, layout, torch.float32, 0.5).cpu()
    expected = reference.decode_sum(senders.cpu(), layout, torch.float32, 0.5)
    assert torch.equal(total.nan_to_num(9.0), expected.nan_to_num(9.0)), (name, "sums")
