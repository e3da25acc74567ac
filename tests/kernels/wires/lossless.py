"""Tensors on which the lossless layout is tried, and equality that looks at bits."""

from collections.abc import Iterator

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integers that floating-point values are, so that NaNs compare as what they are."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every pattern of bits alike: NaNs with payloads, infinities, denormals."""
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(words).min, torch.iinfo(words).max + 1
    return torch.randint(low, high, shape, generator=generator, dtype=words).view(dtype)


def cases(rows: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
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
