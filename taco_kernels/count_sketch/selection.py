"""Which values to send: a threshold a shard, chosen on the device, that the union of the senders
can afford.

How much larger the union of W senders' largest values is than each sender's share depends on how
alike they are (TAGC, arXiv 2504.05638). Each sender therefore puts a sample of its values into
classes of magnitude (``candidates``); the maximum of the classes over the senders tells how large
the union of every choice would be, and all take the largest share whose union fits the sketch
(``choose``). No synchronisation with the host, the same on every device.

::

    thresholds     t_0 > t_1 > ... > t_249      t_k keeps keep * 2^(-(249 - k) / 24) of the values
    class of v     250 - k, where t_k is the first threshold that |v| reaches; 0 if it reaches none
    union of t_k   samples whose largest class over the senders is 250 - k or more
"""

import functools
import math

import torch

CLASSES = 250
"""Candidate shares: ``keep * 2^(-i / 24)``, i from 0 to CLASSES - 1, so down to keep / 1300."""
STEPS_AN_OCTAVE = 24
"""Candidate shares from one to half of it."""
MOST_SAMPLES = 16384
"""Most samples of a shard that are sent."""
MOST_LOCAL_SAMPLES = 65536
"""Most samples of a shard that are not sent."""
CONFIDENCE = 3.0
"""Standard deviations of the sampled density that are held back."""


def sample_count(numel: int) -> int:
    """Sampled values of a shard: a 64th, at least 1024, at most 16384."""
    return min(numel, MOST_SAMPLES, max(1024, numel // 64))


@functools.lru_cache(maxsize=64)
def sample_positions(numel: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 ``[count]``: a position in each of ``count`` equal strata, scattered to avoid any
    period.

    Args:
        numel: values in the shard.
        count: samples, at most numel.
        device: of the result.
    """
    stratum = torch.arange(count, dtype=torch.int64)
    begin = stratum * numel // count
    end = (stratum + 1) * numel // count
    scattered = (stratum * 0x9E3779B1 & 0xFFFFFFFF) >> 8  # multiplicative hashing, 24 bits
    return (begin + scattered % (end - begin)).to(device)


@functools.lru_cache(maxsize=64)
def _ranks(numel: int, keep: float, device: torch.device | str) -> torch.Tensor:
    """int64[CLASSES]: indices of the candidates' thresholds among the samples in falling order."""
    count = sample_count(numel)
    ranks = []
    for k in range(CLASSES):
        share = keep * 2 ** (-(CLASSES - 1 - k) / STEPS_AN_OCTAVE)
        ranks.append(max(1, math.floor(share * count)) - 1)
    return torch.tensor(ranks, device=device)


def candidates(x: torch.Tensor, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds that keep candidate shares, up to ``keep``, of the rows of x fp32 ``[S, numel]``.

    Returns:
        fp32 ``[S, CLASSES]``, falling; uint8 ``[S, samples]``: how many of them each sampled value
        reaches.
    """
    numel = x.shape[1]
    sample = x[:, sample_positions(numel, sample_count(numel), x.device)].abs()
    ordered = sample.sort(dim=1, descending=True).values
    thresholds = ordered[:, _ranks(numel, keep, x.device)]
    # Thresholds fall with their number, so a value reaches all from the first that is not above it.
    first = torch.searchsorted(-thresholds, -sample)
    return thresholds, (CLASSES - first).to(torch.uint8)


def choose(thresholds: torch.Tensor, union_classes: torch.Tensor, density: float) -> torch.Tensor:
    """Choose the largest candidate share whose union stays below ``density``.

    CONFIDENCE standard deviations of the sampling are kept to spare; if no candidate fits, it is
    the smallest.

    Args:
        thresholds: fp32 ``[S, CLASSES]``, of ``candidates``.
        union_classes: uint8 ``[S, samples]``, the senders' maximum of ``candidates``' classes.
        density: share of the values that the union may have, in (0, 1].

    Returns:
        fp32 ``[S]``: each shard's threshold.
    """
    shards, samples = union_classes.shape
    counts = torch.zeros((shards, CLASSES + 1), dtype=torch.int64, device=thresholds.device)
    counts.scatter_add_(1, union_classes.long(), torch.ones_like(union_classes, dtype=torch.int64))
    # share k is kept by values of class CLASSES - k and above
    union = counts.flip(1)[:, :CLASSES].cumsum(1).double() / samples
    # of the share of a binomial sample
    deviation = (union * (1 - union) / samples).sqrt()
    fits = union + CONFIDENCE * deviation <= density  # true, then false, as the union grows with k
    chosen = (fits.sum(1) - 1).clamp(min=0)
    return thresholds.gather(1, chosen[:, None])[:, 0]


def share_threshold(x: torch.Tensor, share: float) -> torch.Tensor:
    """The magnitude that the largest ``share`` of a row of x fp32 ``[S, numel]`` reaches, or a
    little fewer.

    From a sample, CONFIDENCE standard deviations on the safe side; exact where the sample is
    everything. NaN counts as larger than infinity.

    Returns:
        fp32 ``[S]``.
    """
    numel = x.shape[1]
    count = min(numel, MOST_LOCAL_SAMPLES)
    deviation = 0.0
    if count < numel:
        deviation = math.sqrt(share * (1 - share) / count)
    # A little fewer than asked for: what does not fit a wire would have to wait.
    reached = max(1, math.floor((share - CONFIDENCE * deviation) * count))
    sample = x[:, sample_positions(numel, count, x.device)].abs()
    return sample.sort(dim=1, descending=True).values[:, reached - 1]
