"""Two halves of one sequence in turn: what the earlier one's attention leaves to the later one's.

Attention is causal, so the earlier half needs nothing of the later. The later one's queries also see the
earlier one's keys and values of the same layer, which are there: each layer runs the earlier half first. In
the backward the later half's attention comes first, and its gradients of those keys and values with it.

With sequence parallelism rank r of W (even) holds the parts 2r and 2r + 1 of 2W. Its part of the earlier half
is r, of the later one W + r: they are dealt anew before a stage's first layer, and back behind its last.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.communication.autograd import WithBackward
from megatron.compression.communication.site import CommSite


class HalfAttention:
    """Calls an attention for one half.

    Args:
        attention: the layer's, whose core is torch-native and causal.
        kept: shared by a layer's halves: keys and values ``[s, b, groups, head_dim]`` of the earlier.
        later: which half this is.
    """

    def __init__(self, attention: torch.nn.Module, kept: list[torch.Tensor], later: bool) -> None:
        self.attention, self.kept, self.later = attention, kept, later

    def __call__(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple:
        """As the attention's own ``forward``."""
        handle = self.attention.core_attention.register_forward_pre_hook(
            self._see_earlier if self.later else self._keep
        )
        try:
            return self.attention(hidden_states, **arguments)
        finally:
            handle.remove()

    def _keep(self, core: torch.nn.Module, inputs: tuple) -> None:
        self.kept[:] = inputs[1:3]

    def _see_earlier(self, core: torch.nn.Module, inputs: tuple) -> tuple:
        query, key, value, *others = inputs
        earlier_key, earlier_value = self.kept
        self.kept.clear()
        return query, torch.cat([earlier_key, key]), torch.cat([earlier_value, value]), *others


def arguments_by_half(arguments: dict[str, Any], first: int) -> list[dict[str, Any]]:
    """Of the attention in each half.

    Args:
        arguments: of the whole sequence: angles ``[s, 1, 1, d]`` (or one for queries and one for keys) and a
            mask ``[..., s, s]``, where there are any. The mask hides at least what comes later.
        first: tokens of the earlier half.
    """
    mask, by_half = arguments["attention_mask"], []
    for part in (slice(first), slice(first, None)):
        rows = {name: _rows(value, part) for name, value in arguments.items() if name.startswith("rotary")}
        if mask is not None:
            rows["attention_mask"] = mask[..., part, : part.stop]
        by_half.append(arguments | rows)
    return by_half


def _rows(angles: Any, part: slice) -> Any:
    if isinstance(angles, tuple):
        return tuple(_rows(one, part) for one in angles)
    return None if angles is None else angles[part]


def deal(parts: torch.Tensor, site: CommSite, back: bool = False) -> torch.Tensor:
    """A rank's parts of the two halves, one behind the other, from its parts of the whole sequence.

    Args:
        parts: ``[s / W, b, h]``; two, of equal length.
        site: one of the tensor-parallel group, an even number of ranks; counts.
        back: the other way round.
    """
    return WithBackward.apply(
        parts, lambda x: _exchange(x, site, back), lambda x: _exchange(x, site, not back)
    )


def _exchange(parts: torch.Tensor, site: CommSite, back: bool) -> torch.Tensor:
    ranks, rank = site.group.size(), site.group.rank()
    to, source = [0] * ranks, [0] * ranks
    for counts, others in ((to, (2 * rank, 2 * rank + 1)), (source, (rank // 2, (ranks + rank) // 2))):
        for other in others:
            counts[other % ranks] += parts.shape[0] // 2
    dealt, parts = torch.empty_like(parts, memory_format=torch.contiguous_format), parts.contiguous()
    sends, receives = (source, to) if back else (to, source)
    dist.all_to_all_single(dealt, parts, receives, sends, group=site.group)
    site.count_uncompressed("tp.other", "all_to_all", parts.nbytes, "exact")
    return dealt
