"""What a message costs an iteration, and an iteration in all.

The model: an iteration is its computation, and of each message what does not run behind computation. A
message that ``t`` seconds are needed for, behind ``hidden`` seconds of GEMMs, holds up the iteration for
``t - hidden``, and slows the GEMMs that it hides behind. At TP 4 (docs/results/iterations.md, "where an
iteration goes") this gives 494 ms where 499 were measured in pcie, 25 where 22.5 were on NVLink.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

COMPUTATION_OVER_GEMMS = 1.6
"""Norms, activations, the optimizer and gaps between kernels. At TP 4 on NVLink it is 1.75 (all less exposed
communication, over GEMMs, docs/results/iterations.md); with larger GEMMs a GPU less, by estimate."""
OVERLAP_LOSS = 0.09
"""Of the time that a message hides behind computation, what the computation takes longer: 5 of 57 ms at TP 4
through host memory (docs/cost_model.md); on NVLink it is more."""


@dataclass(frozen=True)
class Message:
    """One kind of message of an iteration."""

    dimension: str
    """Such as tensor_parallel."""
    traffic: str
    """The ledger's class."""
    operation: str
    """all_reduce, reduce_scatter, all_gather; exchange (between stages); gradients, weights (a bucket's);
    all_to_all, gather_tokens, sum_tokens (of an expert layer's dispatcher)."""
    shape: tuple[int, ...]
    """Of the whole tensor over all ranks: what an all-gather makes, what a reduce-scatter takes. Of an
    all-to-all what a rank sends."""
    dtype: torch.dtype
    count: float
    """How many of them follow each other on the critical path of an iteration."""
    hidden: float = 0.0
    """Seconds of computation that one of them may run behind."""
    least: float = 0.0
    """How many of them nothing can hide."""
    unequal: bool = False
    """Of tokens: the router decides how many each rank sends, and their numbers go along."""

    @property
    def nbytes(self) -> int:
        """Uncompressed."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def exposed(self, seconds: float) -> float:
        """Seconds by which these messages lengthen an iteration.

        Args:
            seconds: that one of them takes by itself.
        """
        waited = max(self.count * (seconds - self.hidden), self.least * seconds, 0.0)
        return waited + OVERLAP_LOSS * (self.count * seconds - waited)


def iteration_seconds(
    computation: float, messages: Iterable[Message], times: Mapping[Message, float]
) -> float:
    """An iteration whose messages take ``times`` (seconds one by one)."""
    return computation + sum(message.exposed(times[message]) for message in messages)


def computation_seconds(flops: float, rate: float, bubble: float) -> float:
    """An iteration without communication.

    Args:
        flops: of one rank.
        rate: FLOP/s of a GEMM of the model's shape.
        bubble: how much longer a pipeline's schedule makes it, 1 without one.
    """
    return flops / rate * COMPUTATION_OVER_GEMMS * bubble
