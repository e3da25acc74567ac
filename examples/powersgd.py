"""PowerSGD (arXiv 1905.13727), a gradient compressor of one's own, in one file outside the packages.

    torchrun ... pretrain_gpt.py ... --dp-compression examples.powersgd:PowerSGD:rank=4

A matrix of gradients M [m, n] is sent as P [m, rank] and Q [n, rank], whose product P Q^T is near it. Each
training iteration does one step of the power iteration, from the last one's Q:

    P = sum of M Q over the ranks, made orthonormal     Q = sum of M^T P over the ranks     sum of M ~ P Q^T

P and Q are sums over ranks, so two all-reduces do. What a rank's own P Q^T misses of its M it adds to its
next M (its memory, in fp32). Vectors go uncompressed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.compression.communication import Work
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
)


@dataclass(frozen=True)
class PowerSGD(GradientCompressor):
    """Matrices of gradients as products of thin ones (arXiv 1905.13727)."""

    rank: int = 4
    """Columns of the thin matrices: more of them send more and lose less."""

    has_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be a number >= 1")

    def build(self, bucket: GradientBucket) -> GradientSync:
        """See ``GradientCompressor.build``."""
        return PowerSGDSync(bucket, self.rank)

    def describe(self) -> str:
        """See ``GradientCompressor.describe``."""
        return f"gradients as products of matrices of {self.rank} columns, with a memory"


class PowerSGDSync(GradientSync):
    """Sums the gradients of one bucket."""

    def __init__(self, bucket: GradientBucket, rank: int) -> None:
        self.bucket = bucket
        device, generator = bucket.gradients.device, torch.Generator().manual_seed(rank)
        self.memory = torch.zeros(bucket.numel, device=device)
        self.matrices, self.vectors, self.right = [], [], []
        for span in bucket.spans:
            m, n = span.parameter.shape[0], span.parameter[0].numel()
            if rank * (m + n) < m * n:
                self.matrices.append(span)
                self.right.append(
                    torch.randn(n, rank, generator=generator).to(device)
                )  # alike on all ranks
            else:
                self.vectors.append(span)

    def start(self) -> Work:
        """See ``GradientSync.start``."""
        bucket, flat = self.bucket, self.bucket.gradients
        bucket.record_plain(sum(s.end - s.start for s in self.matrices) * flat.element_size())
        total = self.memory + flat
        matrices = [total[s.start : s.end].view(s.parameter.shape[0], -1) for s in self.matrices]
        vectors = joined([flat[s.start : s.end] for s in self.vectors], flat)
        sending_vectors = bucket.all_reduce(vectors, "excluded")
        lefts = [matrix @ right for matrix, right in zip(matrices, self.right, strict=True)]
        left_sum = joined(lefts, total)
        sending_left = bucket.all_reduce(left_sum)

        def second_half() -> Work:
            bases = [torch.linalg.qr(left).Q for left in cut(left_sum, lefts)]
            rights = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
            right_sum = joined(rights, total)
            return Work(
                bucket.all_reduce(right_sum), lambda: finish(bases, rights, cut(right_sum, rights))
            )

        def finish(bases: list, rights: list, right_sums: list) -> torch.Tensor:
            sending_vectors.wait()
            for span, values in zip(
                self.vectors, cut(vectors, [s.parameter for s in self.vectors]), strict=True
            ):
                flat[span.start : span.end] = values.view(-1) * bucket.scale
            sent = (
                total.clone()
            )  # vectors, and the gaps between parameters: nothing of them is lost
            for span, basis, own, right in zip(
                self.matrices, bases, rights, right_sums, strict=True
            ):
                flat[span.start : span.end] = (basis @ right.T).view(-1) * bucket.scale
                sent[span.start : span.end] = (basis @ own.T).view(-1)
            # a NaN or infinity shows in the sum, whose step is skipped; the next one begins with the last Q
            left = total - sent
            self.memory = torch.where(left.isfinite(), left, self.memory)
            self.right = [
                torch.where(new.isfinite().all(), new, old)
                for new, old in zip(right_sums, self.right, strict=True)
            ]
            return flat

        return Work(sending_left, second_half, exchanges=2)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GradientSync.state``."""
        return (
            {"memory": self.memory, "right": joined(self.right, self.memory)} if self.right else {}
        )

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See ``GradientSync.load_state``."""
        self.memory, self.right = state["memory"], cut(state["right"], self.right)


def joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The parts end to end, flat; empty where there is none."""
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """What ``joined`` made ``flat`` of."""
    return [
        row.view(one.shape)
        for row, one in zip(flat.split([o.numel() for o in like]), like, strict=True)
    ]
