"""PowerSGD (Vogels et al., arXiv 1905.13727): a gradient compressor of your own, in one file.

    torchrun ... pretrain_gpt.py ... --dp-compression examples.powersgd:PowerSGD:rank=4

A matrix of gradients M [m, n] is sent as P [m, rank] and Q [n, rank], whose product P Q^T is close
to it. Each training iteration does one step of the power iteration, from the Q of the iteration
before (algorithm 1 of the paper). "sum" is over the data-parallel ranks:

    P = sum of M Q,   made orthonormal         the first all-reduce
    Q = sum of M^T P                           the second all-reduce
    sum of M is replaced by P Q^T

A rank's own P Q^T misses a part of its M. The rank keeps that part (its memory, in fp32) and adds
it to its next M. Vectors, and matrices that would not get smaller, go uncompressed.

A compressor takes two classes. The settings are a frozen dataclass, whose ``build`` makes an object
for each bucket of gradients. That object's ``start`` begins to sum the bucket, and returns a
``Work`` to wait for.
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
    """Sends matrices of gradients as products of thin ones."""

    rank: int = 4
    """Columns of the thin matrices: more of them send more and lose less."""

    # What an iteration leaves out is kept. Checkpoints then save the state of every PowerSGDSync.
    has_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be a number >= 1")

    def build(self, bucket: GradientBucket) -> GradientSync:
        """Return what sums this bucket. Called on every rank, for the same buckets in the same
        order."""
        return PowerSGDSync(bucket, self.rank)

    def describe(self) -> str:
        """Return the words for the log."""
        return f"gradients as products of matrices of {self.rank} columns, with a memory"


class PowerSGDSync(GradientSync):
    """Sums the gradients of one bucket over the data-parallel ranks."""

    def __init__(self, bucket: GradientBucket, rank: int) -> None:
        self.bucket = bucket
        device = bucket.gradients.device
        self.memory = torch.zeros(bucket.numel, device=device)
        """[numel], fp32: what this rank has not sent yet."""
        self.matrices = []
        """Spans of the parameters that are compressed."""
        self.vectors = []
        """Spans of those that are not."""
        self.rights = []
        """Q [n, rank] of each matrix. A generator with one seed makes them the same on all ranks.
        """
        generator = torch.Generator().manual_seed(rank)
        for span in bucket.spans:
            # A parameter of more than two dimensions counts as a matrix of its first one.
            m = span.parameter.shape[0]
            n = span.parameter[0].numel()
            if rank * (m + n) < m * n:
                self.matrices.append(span)
                self.rights.append(torch.randn(n, rank, generator=generator).to(device))
            else:
                self.vectors.append(span)

    def start(self, gradients: torch.Tensor | None = None) -> Work:
        """Start the first all-reduce. The returned work runs the second, and then writes the sum.

        Args:
            gradients: what to sum, in place; None: the bucket's own.
        """
        bucket = self.bucket
        if gradients is None:
            gradients = bucket.gradients
        compressed_values = sum(span.end - span.start for span in self.matrices)
        # For the ledger: what the uncompressed collective would have sent for the matrices.
        bucket.record_plain(compressed_values * gradients.element_size())

        total = self.memory + gradients
        matrices = []
        for span in self.matrices:
            matrices.append(total[span.start : span.end].view(span.parameter.shape[0], -1))
        vectors = join([gradients[span.start : span.end] for span in self.vectors], gradients)
        sending_vectors = bucket.all_reduce(vectors, "excluded")
        lefts = [matrix @ right for matrix, right in zip(matrices, self.rights, strict=True)]
        left_sum = join(lefts, total)
        sending_lefts = bucket.all_reduce(left_sum)

        def send_rights() -> Work:
            # The sums are the same bits on all ranks, so every rank makes the same P of them.
            bases = [torch.linalg.qr(left).Q for left in cut(left_sum, lefts)]
            rights = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
            right_sum = join(rights, total)
            sending_rights = bucket.all_reduce(right_sum)
            return Work(sending_rights, lambda: finish(bases, rights, cut(right_sum, rights)))

        def finish(
            bases: list[torch.Tensor], rights: list[torch.Tensor], right_sums: list[torch.Tensor]
        ) -> torch.Tensor:
            sending_vectors.wait()
            vector_sums = cut(vectors, [span.parameter for span in self.vectors])
            for span, vector_sum in zip(self.vectors, vector_sums, strict=True):
                gradients[span.start : span.end] = vector_sum.view(-1) * bucket.scale
            # Nothing is missed of vectors, and of the gaps between parameters.
            sent = total.clone()
            for index, span in enumerate(self.matrices):
                product = bases[index] @ right_sums[index].T
                gradients[span.start : span.end] = product.view(-1) * bucket.scale
                sent[span.start : span.end] = (bases[index] @ rights[index].T).view(-1)
            # A NaN or infinity of any rank shows in the sum, so that the optimizer skips the step.
            # It must not stay: the memory keeps its last finite values, and the next step begins
            # with the last Q.
            missed = total - sent
            self.memory = torch.where(missed.isfinite(), missed, self.memory)
            for index, right_sum in enumerate(right_sums):
                is_finite = right_sum.isfinite().all()
                self.rights[index] = torch.where(is_finite, right_sum, self.rights[index])
            return gradients

        return Work(sending_lefts, send_rights, exchanges=2)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps of this rank, by name."""
        if not self.rights:
            return {}
        return {"memory": self.memory, "right": join(self.rights, self.memory)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.memory = state["memory"]
        self.rights = cut(state["right"], self.rights)

    def left_over(self) -> torch.Tensor:
        """Return what this rank has not sent yet of each gradient, [numel], fp32."""
        return self.memory


def join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the parts end to end, flat; an empty tensor of the type of ``like`` where there is
    none."""
    if not parts:
        return like.new_empty(0)
    return torch.cat([part.reshape(-1) for part in parts])


def cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what ``join`` has joined: pieces of ``flat`` with the shapes of ``like``."""
    rows = flat.split([tensor.numel() for tensor in like])
    return [row.view(tensor.shape) for row, tensor in zip(rows, like, strict=True)]
