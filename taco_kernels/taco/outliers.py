"""Outliers, stored separately from the groups: what ``CodecConfig.outliers`` adds to a wire, in
plain torch.

A value is an outlier if it is more than THRESHOLD times its group's mean magnitude. That is beyond
6.4 sigma of a Gaussian group, and finds up to G / THRESHOLD - 1 equal values in one. It leaves a
zero in its group, is sent in a list of its block (BLOCK values: a fixed number of groups, whatever
a kernel's tile), and is added after the inverse transform to what that zero has become. So
everything stays linear: senders' lists add up as their groups do. A sum is not searched again: what
is an outlier of no sender stays in its group, where it is at most sqrt(W) times as far out.

Each block has a list of SLOTS words of 31 bits::

    30              12   11   10           0
    exponent, mantissa  sign  position in the block      0 stands for no value

The mantissa is the upper 11 bits of fp32's: bf16 and fp16 are exact in it, fp32 keeps 12 bits
(2^-12). Of more outliers the largest go into the list, of equal ones the negative, then the last;
the others stay in their groups. A group with a NaN or an infinity has no outlier, and stays what it
was.
"""

import torch
import torch.nn.functional as F

from taco_kernels.common.reference import hadamard

THRESHOLD = 8.0
"""Times the mean magnitude of a group."""
BLOCK = 2048
"""Values that share a list."""
SLOTS = 8
"""Words of a list."""
LIST_BYTES = 4 * SLOTS
"""Bytes of a list on the wire."""

# Fields of a word.
_MAGNITUDE = 0x7FFFF000
_SIGN = 0x800
_POSITION = BLOCK - 1


def is_outlier(groups: torch.Tensor) -> torch.Tensor:
    """Return bool[..., G]: which values of fp32 groups are outliers."""
    magnitude = groups.abs()
    return magnitude > magnitude.sum(-1, keepdim=True) * (THRESHOLD / groups.shape[-1])


def words_of(groups: torch.Tensor) -> torch.Tensor:
    """Return int32[blocks, BLOCK] of fp32[n, G]: each value as a list's word, 0 for zeros.

    Words order as the magnitudes of their values do. The mantissa is rounded to nearest.
    """
    flat = groups.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    bits = blocks.view(torch.int32)
    position = torch.arange(BLOCK, dtype=torch.int32, device=groups.device)
    # To nearest: half of the last bit that is kept is added, and the bits below are cut.
    words = ((bits & 0x7FFFFFFF) + 0x800 & _MAGNITUDE) | (bits >> 20 & _SIGN)
    return torch.where(bits << 1 == 0, 0, words | position)


def values_of(words: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of words."""
    return ((words & _MAGNITUDE) | (words & _SIGN) << 20).view(torch.float32)


def split(
    groups: torch.Tensor, candidates: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lists of the largest candidates, and the groups without those.

    ``groups`` are fp32[n, G]; ``candidates`` bool[n, G], what may be listed, by default the
    outliers. The lists are int32[blocks, SLOTS].
    """
    candidates = is_outlier(groups) if candidates is None else candidates
    words = words_of(groups.masked_fill(~candidates, 0.0))
    if not candidates.any():
        return words[:, :SLOTS].contiguous(), groups
    # Words differ in their positions, so which are the largest does not depend on the device.
    best = words.topk(SLOTS, dim=1)
    listed = torch.zeros_like(words, dtype=torch.bool).scatter_(1, best.indices, best.values > 0)
    # The last block may be longer than what there is of the groups.
    listed = listed.view(-1)[: groups.numel()].view_as(groups)
    return best.values, groups.masked_fill(listed, 0.0)


def add(groups: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return fp32[n, G] plus the values of its blocks' lists, int32[blocks, SLOTS]."""
    if not words.any():
        return groups
    block = torch.arange(len(words), device=words.device)[:, None]
    used = words > 0
    indices = (block * BLOCK + (words & _POSITION))[used]
    flat = groups.reshape(-1).clone()
    flat[indices] += values_of(words)[used]
    return flat.view_as(groups)


def sum_lists(
    lists: list[torch.Tensor], h: torch.Tensor, rotated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one list a block of the senders' lists, and h with what found no slot there.

    Args:
        lists: int32[blocks, SLOTS] of each sender, added in this order.
        h: fp32[n, G], the sum of the groups.
        rotated: whether h is in the Hadamard domain (of the mean).
    """
    total = torch.zeros_like(h)
    for words in lists:
        total = add(total, words)
    words, rest = split(total, total != 0)
    pending = words_of(rest)
    while pending.any():
        # One value of each block at a time, the largest first: the order decides how sums are
        # rounded.
        best = pending.amax(1, keepdim=True)
        hit = (pending == best) & (pending > 0)
        value = torch.where(hit, values_of(pending), 0.0)
        value = value.view(-1)[: h.numel()].view_as(h)
        if rotated:
            value = hadamard(value / h.shape[-1])
        h = h + value
        pending = pending.masked_fill(hit, 0)
    return words, h
