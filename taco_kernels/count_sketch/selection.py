"""Which values to send: a threshold a shard, found on the device, that the union of the senders can afford.

Each sender puts a sample of its values into classes of magnitude; the maximum of the classes over the senders
tells how large the union of every choice would be, and all take the largest share whose union fits the
sketch. No synchronisation with the host, the same on every device.
"""

import functools
import math

import torch

CLASSES = 250
"""Candidate shares: ``keep * 2^(-i / 24)``, i from 0 to CLASSES - 1, so down to keep / 1300."""
STEPS_AN_OCTAVE = 24
MOST_SAMPLES = 16384
"""Of those that are sent."""
MOST_LOCAL_SAMPLES = 65536
"""Of those that are not."""
CONFIDENCE = 3.0
"""Standard deviations of the sampled density that are held back."""


def sample_count(numel: int) -> int:
    """Sampled values of a shard: a 64th, at least 1024, at most 16384."""
    return min(numel, MOST_SAMPLES, max(1024, numel // 64))


@functools.lru_cache(maxsize=64)
def sample_positions(numel: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64: one position in each of ``count`` <= numel equal strata, scattered to avoid any period."""
    number = torch.arange(count, dtype=torch.int64)
    begin, end = number * numel // count, (number + 1) * numel // count
    scattered = (number * 0x9E3779B1 & 0xFFFFFFFF) >> 8  # multiplicative hashing, 24 bits
    return (begin + scattered % (end - begin)).to(device)


@functools.lru_cache(maxsize=64)
def _ranks(numel: int, keep: float, device: torch.device | str) -> torch.Tensor:
    """int64[CLASSES]: places of the candidates' thresholds among the sorted samples."""
    count = sample_count(numel)
    shares = [keep * 2 ** (-(CLASSES - 1 - k) / STEPS_AN_OCTAVE) for k in range(CLASSES)]
    return torch.tensor([max(1, math.floor(share * count)) - 1 for share in shares], device=device)


def candidates(x: torch.Tensor, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds, fp32 ``[S, CLASSES]``, falling, that keep candidate shares, up to ``keep``, of the rows of
    x fp32 ``[S, numel]``; and how many of them each sampled value reaches, uint8 ``[S, samples]``."""
    positions = sample_positions(x.shape[1], sample_count(x.shape[1]), x.device)
    sample = x[:, positions].abs()
    ordered = sample.sort(dim=1, descending=True).values
    thresholds = ordered[:, _ranks(x.shape[1], keep, x.device)]
    # thresholds fall with their number, so a value reaches all from the first that is not above it
    first = torch.searchsorted(-thresholds, -sample)
    return thresholds, (CLASSES - first).to(torch.uint8)


def choose(thresholds: torch.Tensor, union_classes: torch.Tensor, density: float) -> torch.Tensor:
    """The thresholds fp32 ``[S]`` of the largest candidate share whose union stays below ``density``, with
    CONFIDENCE standard deviations of the sampling to spare (else of the smallest), by the senders' maximum of
    ``candidates``' classes."""
    shards, samples = union_classes.shape
    counts = torch.zeros((shards, CLASSES + 1), dtype=torch.int64, device=thresholds.device)
    counts.scatter_add_(1, union_classes.long(), torch.ones_like(union_classes, dtype=torch.int64))
    # share k is kept by values of class CLASSES - k and above
    union = counts.flip(1)[:, :CLASSES].cumsum(1).double() / samples
    deviation = (union * (1 - union) / samples).sqrt()
    fits = union + CONFIDENCE * deviation <= density
    chosen = (fits.sum(1) - 1).clamp(min=0)
    return thresholds.gather(1, chosen[:, None])[:, 0]


def share_threshold(x: torch.Tensor, share: float) -> torch.Tensor:
    """What the largest ``share`` of a row of x fp32 ``[S, numel]`` reaches, or a little fewer: fp32 ``[S]``,
    from a sample, CONFIDENCE standard deviations on the safe side. NaN counts as larger than infinity."""
    numel = x.shape[1]
    count = min(numel, MOST_LOCAL_SAMPLES)
    spread = 0.0 if count == numel else math.sqrt(share * (1 - share) / count)
    reached = max(1, math.floor((share - CONFIDENCE * spread) * count))
    sample = x[:, sample_positions(numel, count, x.device)].abs()
    return sample.sort(dim=1, descending=True).values[:, reached - 1]
