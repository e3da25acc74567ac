"""A product summed over the ranks in chunks of the sequence: an exchange runs behind the next GEMM."""

import torch

from megatron.compression.communication import Work, join
from megatron.compression.communication.site import CommSite


def product_in_chunks(
    x: torch.Tensor,
    matrix: torch.Tensor,
    site: CommSite,
    traffic: str,
    sequence_parallel: bool,
    chunks: int,
) -> Work:
    """Start to sum ``x @ matrix`` over the ranks, each chunk as soon as its product is under way.

    Args:
        x: ``[s, b, n]``.
        matrix: ``[n, h]``.
        sequence_parallel: reduce-scatter along the sequence instead of all-reduce.
        chunks: pieces of the sequence, each a message of its own; 1 sends the product whole.
    Returns: A handle; ``wait`` gives ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
    """
    start = site.reduce_scatter if sequence_parallel else site.all_reduce
    if chunks == 1:
        return start(torch.matmul(x, matrix), traffic)
    ranks = site.group.size() if sequence_parallel else 1
    result = x.new_empty(x.shape[0] // ranks, *x.shape[1:-1], matrix.shape[1])
    works = [
        start(torch.matmul(part, matrix), traffic, out=destination)
        for part, destination in zip(
            sequence_chunks(x, chunks, ranks), result.tensor_split(chunks), strict=True
        )
        if part.shape[0]
    ]
    return join(works, result) if works else start(torch.matmul(x, matrix), traffic)


def sequence_chunks(x: torch.Tensor, chunks: int, ranks: int) -> list[torch.Tensor]:
    """Cut ``[s, b, h]`` so that each chunk holds the same part of every rank's slice of the sequence."""
    slices = x.view(ranks, x.shape[0] // ranks, *x.shape[1:])
    return [part.reshape(-1, *x.shape[1:]) for part in slices.tensor_split(chunks, dim=1)]
