"""Keeps parameters alike that every tensor-parallel rank holds in whole: norms, biases, position embeddings.

Their gradients and weights are equal on tensor-parallel ranks as long as data parallelism is exact. A lossy
codec quantises them in groups with their neighbours, which differ from rank to rank, and so the copies would
drift apart, and a checkpoint, which saves one of them, would not resume the run. The first tensor-parallel
rank's values go to the others, exactly; next to the matrices they are few.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron.compression.communication.ledger import Ledger
from megatron.compression.data_parallel.compressor import ParameterSpan


class Replicas:
    """The replicated values of one flat buffer.

    Args:
        flat: ``[n]``, laid out alike on all ranks of the group.
        ranges: (start, end) of the replicated values.
    """

    def __init__(
        self, flat: torch.Tensor, ranges: list[tuple[int, int]], group: dist.ProcessGroup, ledger: Ledger
    ) -> None:
        self.parts = [flat[start:end] for start, end in ranges]
        self.group = group
        self.ledger = ledger

    def align(self) -> None:
        """Give all ranks the first one's values. Collective, in the same order on every rank."""
        if not self.parts or self.group.size() == 1:
            return
        with torch.no_grad():
            values = torch.cat(self.parts)
            first = self.group.rank() == 0
            dist.broadcast(values, src=dist.get_global_rank(self.group, 0), group=self.group)
            if first:
                size = self.group.size()
                self.ledger.record_uncompressed("tp.other", "exact", "broadcast", values.nbytes, size)
                return
            sizes = [part.numel() for part in self.parts]
            for part, value in zip(self.parts, values.split(sizes), strict=True):
                part.copy_(value)


def replicated_ranges(
    spans: Iterable[ParameterSpan], first: int = 0, last: int | None = None, gradients: bool = False
) -> list[tuple[int, int]]:
    """Where the parameters that are not split over tensor-parallel ranks lie, inside [first, last).

    Args:
        gradients: leave out those whose gradients differ until CAAT-Net sums them, which comes later.
    Returns: (start, end), counted from ``first``.
    """
    ranges = []
    for span in spans:
        split = getattr(span.parameter, "tensor_model_parallel", False)
        if split or (gradients and getattr(span.parameter, "sees_rank_local_data", False)):
            continue
        start, end = max(span.start, first), span.end if last is None else min(span.end, last)
        if start < end:
            ranges.append((start - first, end - first))
    return ranges


def align_gradients(chunks: Iterable) -> None:
    """Align the reduced gradients of DDP-wrapped chunks, after all reductions and sums over TP ranks."""
    for chunk in chunks:
        for group in getattr(chunk, "bucket_groups", ()):
            for replicas in getattr(group, "gradient_replicas", ()):
                replicas.align()
