"""PowerSGD (arXiv 1905.13727), a gradient compressor of one's own, in one file outside the packages.

    torchrun ... pretrain_gpt.py ... --dp-compression examples.powersgd:PowerSGD:rank=4

A matrix of gradients M [m, n] travels as P [m, rank] and Q [n, rank], whose product P Q^T is near it. Each
training iteration does one step of the power iteration, from the last one's Q:

    P = sum of M Q over the ranks, made orthonormal     Q = sum of M^T P over the ranks     sum of M ~ P Q^T

P and Q are sums over ranks, so two all-reduces do. What a rank's own P Q^T misses of its M it adds to its
next M (error feedback). Vectors go uncompressed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.compression.communication import Work
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
    NewFeedback,
)
from megatron.compression.data_parallel.error_feedback import ErrorFeedback


@dataclass(frozen=True)
class PowerSGD(GradientCompressor):
    """Matrices of gradients as products of thin ones (arXiv 1905.13727)."""

    rank: int = 4
    """Columns of the thin matrices: more of them send more and lose less."""

    default_error_feedback: ClassVar[str] = "fp32"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be a number >= 1")

    def build(self, bucket: GradientBucket, feedback: NewFeedback) -> GradientSync:
        """See ``GradientCompressor.build``."""
        return PowerSGDSync(bucket, self.rank, feedback())

    def describe(self) -> str:
        """See ``GradientCompressor.describe``."""
        return f"gradients as products of matrices of {self.rank} columns"


class PowerSGDSync:
    """A ``GradientSync``: sums the gradients of one bucket."""

    def __init__(self, bucket: GradientBucket, rank: int, memory: ErrorFeedback) -> None:
        self.bucket, self.memory = bucket, memory
        self.covering_ranks = bucket.topology.world_size  # every rank remembers some of every value
        device, generator = bucket.gradients.device, torch.Generator().manual_seed(rank)
        memory.allocate(1, [(0, bucket.numel)], device)
        self.matrices, self.vectors, self.right = [], [], []
        for span in bucket.spans:
            m, n = span.parameter.shape[0], span.parameter[0].numel()
            if rank * (m + n) < m * n:
                self.matrices.append(span)
                self.right.append(torch.randn(n, rank, generator=generator).to(device))  # alike on all ranks
            else:
                self.vectors.append(span)

    def start(self) -> Work:
        """See ``GradientSync.start``."""
        bucket, flat = self.bucket, self.bucket.gradients
        bucket.record_plain(sum(s.end - s.start for s in self.matrices) * flat.element_size())
        total = self.memory.compensated(0, flat[None])
        matrices = [total[0, s.start : s.end].view(s.parameter.shape[0], -1) for s in self.matrices]
        vectors = joined([flat[s.start : s.end] for s in self.vectors], flat)
        sending_vectors = bucket.all_reduce(vectors, "excluded")
        lefts = [matrix @ right for matrix, right in zip(matrices, self.right, strict=True)]
        left_sum = joined(lefts, total)
        sending_left = bucket.all_reduce(left_sum)

        def second_half() -> Work:
            bases = [torch.linalg.qr(left).Q for left in cut(left_sum, lefts)]
            rights = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
            right_sum = joined(rights, total)
            return Work(bucket.all_reduce(right_sum), lambda: finish(bases, rights, cut(right_sum, rights)))

        def finish(bases: list, rights: list, right_sums: list) -> torch.Tensor:
            sending_vectors.wait()
            for span, values in zip(
                self.vectors, cut(vectors, [s.parameter for s in self.vectors]), strict=True
            ):
                flat[span.start : span.end] = values.view(-1) * bucket.scale
            sent = total.clone()  # vectors, and the gaps between parameters: nothing of them is lost
            for span, basis, own, right in zip(self.matrices, bases, rights, right_sums, strict=True):
                flat[span.start : span.end] = (basis @ right.T).view(-1) * bucket.scale
                sent[0, span.start : span.end] = (basis @ own.T).view(-1)
            self.memory.remember(0, total, sent)
            # a NaN or infinity shows in the sum, whose step is skipped; the next one begins with the last Q
            self.right = [
                torch.where(new.isfinite().all(), new, old)
                for new, old in zip(right_sums, self.right, strict=True)
            ]
            return flat

        return Work(sending_left, second_half, exchanges=2)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GradientSync.state``. Each Q lies where its matrix does; its length does not matter, so that
        the sum over ranks serves another number of them."""
        flat = self.memory.values()[0]
        right = torch.zeros_like(flat)
        for span, matrix in zip(self.matrices, self.right, strict=True):
            right[span.start : span.start + matrix.numel()] = matrix.reshape(-1)
        return {"error_feedback": flat, "right": right}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See ``GradientSync.load_state``."""
        zeros = torch.zeros(1, self.bucket.numel, device=self.bucket.gradients.device)
        self.memory.set_values(state["error_feedback"][None] if "error_feedback" in state else zeros)
        for number, span in enumerate(self.matrices if "right" in state else ()):
            old = self.right[number]
            self.right[number] = state["right"][span.start : span.start + old.numel()].view_as(old).clone()


def joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The parts end to end, flat; empty where there is none."""
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """What ``joined`` made ``flat`` of."""
    return [
        part.view(one.shape) for part, one in zip(flat.split([o.numel() for o in like]), like, strict=True)
    ]
