"""Outliers, stored separately from the groups: what ``CodecConfig.outliers`` adds to a wire, in plain torch.

A value is an outlier if it is more than THRESHOLD times its group's mean magnitude. That is beyond 6.4 sigma
of a Gaussian group, and finds up to G / THRESHOLD - 1 equal values in one. It leaves a zero in its group, is
sent in a list of its block (BLOCK values: a fixed number of groups, whatever a kernel's tile), and is added
after the inverse transform to what that zero has become. So everything stays linear: senders' lists add up as
their groups do. A sum is not searched again: what is an outlier of no sender stays in its group, where it is
at most sqrt(W) times as far out.

Each block has a list of SLOTS words of 31 bits: exponent and upper 11 bits of the mantissa, sign, position in
the block; 0 where nothing is. bf16 and fp16 are exact in it, fp32 keeps 12 bits (2^-12). Of more outliers the
largest go into the list, of equal ones the negative, then the last; the others stay in their groups. A group
with a NaN or an infinity has no outlier, and stays what it was.
"""

import torch
import torch.nn.functional as F

from taco_kernels.common.reference import hadamard

THRESHOLD = 8.0
BLOCK = 2048
SLOTS = 8
LIST_BYTES = 4 * SLOTS

_MAGNITUDE, _SIGN, _PLACE = 0x7FFFF000, 0x800, BLOCK - 1


def is_outlier(groups: torch.Tensor) -> torch.Tensor:
    """bool[..., G]: which values of fp32 groups are outliers."""
    magnitude = groups.abs()
    return magnitude > magnitude.sum(-1, keepdim=True) * (THRESHOLD / groups.shape[-1])


def words_of(groups: torch.Tensor) -> torch.Tensor:
    """int32[blocks, BLOCK] of fp32[n, G]: each value as a list's word; they order as the magnitudes do."""
    flat = groups.reshape(-1)
    bits = F.pad(flat, (0, -flat.numel() % BLOCK)).view(torch.int32).view(-1, BLOCK)
    place = torch.arange(BLOCK, dtype=torch.int32, device=groups.device)
    words = ((bits & 0x7FFFFFFF) + 0x800 & _MAGNITUDE) | (bits >> 20 & _SIGN)
    return torch.where(bits << 1 == 0, 0, words | place)


def values_of(words: torch.Tensor) -> torch.Tensor:
    """fp32 values of words."""
    return ((words & _MAGNITUDE) | (words & _SIGN) << 20).view(torch.float32)


def split(
    groups: torch.Tensor, candidates: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists int32[blocks, SLOTS] of the largest ``candidates`` bool[n, G] (by default the outliers) of
    fp32[n, G], and the groups without those."""
    candidates = is_outlier(groups) if candidates is None else candidates
    words = words_of(groups.masked_fill(~candidates, 0.0))
    if not candidates.any():
        return words[:, :SLOTS].contiguous(), groups
    best = words.topk(SLOTS, dim=1)
    listed = torch.zeros_like(words, dtype=torch.bool).scatter_(1, best.indices, best.values > 0)
    return best.values, groups.masked_fill(listed.view(-1)[: groups.numel()].view_as(groups), 0.0)


def add(groups: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """fp32[n, G] plus the values of its blocks' lists, int32[blocks, SLOTS]."""
    if not words.any():
        return groups
    block = torch.arange(len(words), device=words.device)[:, None]
    used = words > 0
    places = (block * BLOCK + (words & _PLACE))[used]
    flat = groups.reshape(-1).clone()
    flat[places] += values_of(words)[used]
    return flat.view_as(groups)


def sum_lists(
    lists: list[torch.Tensor], h: torch.Tensor, rotated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One list a block of the senders' lists, int32[blocks, SLOTS] added in their order, and h with what
    found no slot there: fp32[n, G], the sum of the groups, in the Hadamard domain (of the mean) if
    ``rotated``."""
    total = torch.zeros_like(h)
    for words in lists:
        total = add(total, words)
    words, left = split(total, total != 0)
    waiting = words_of(left)
    while waiting.any():  # the largest of each block first
        best = waiting.amax(1, keepdim=True)
        hit = (waiting == best) & (waiting > 0)
        value = torch.where(hit, values_of(waiting), 0.0).view(-1)[: h.numel()].view_as(h)
        h = h + (hadamard(value / h.shape[-1]) if rotated else value)
        waiting = waiting.masked_fill(hit, 0)
    return words, h
