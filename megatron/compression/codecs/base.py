"""The codec contract."""

from collections.abc import Sequence
from typing import Protocol

import torch

from taco_kernels import Stream


class Codec(Protocol):
    """Turns tensors into contiguous uint8 payloads of a size that is known beforehand, and back.

    A codec is pure: no communication, no state, no host synchronisation, so it can be captured in a CUDA
    graph. It takes any number of values (0 too, and sizes that divide nothing: it pads inside). A group that
    holds a NaN or Inf decodes to non-finite values.

    A tensor is encoded in ``chunks`` equal pieces, one a destination rank; piece c holds the values
    ``[c * chunk_numel, (c + 1) * chunk_numel)`` of the tensor in row-major order, zero padded.

    A codec that rounds at random (``rounds_randomly``) takes the address of its random numbers, a
    ``taco_kernels.Stream``: element i of the tensor uses number ``offset + i`` of the stream, so that a
    decoder, a recomputation and a resumed run draw the same ones. Others ignore it.
    """

    name: str
    """Short name for logs, with the settings that matter."""

    rounds_randomly: bool
    """Whether ``encode`` needs random numbers."""

    def chunk_numel(self, numel: int, chunks: int = 1) -> int:
        """Values in each of ``chunks`` pieces of a tensor of ``numel`` values, padding included."""
        ...

    def wire_bytes(self, numel: int) -> int:
        """Exact payload bytes for one piece of ``numel`` values."""
        ...

    def encode(self, x: torch.Tensor, chunks: int = 1, random: Stream | None = None) -> torch.Tensor:
        """Encode ``x`` (any shape and stride; bf16, fp16, fp32).

        Returns:
            uint8 ``[chunks, wire_bytes(chunk_numel(x.numel(), chunks))]``, contiguous.
        """
        ...

    def decode(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Invert ``encode``: uint8 ``[chunks, bytes]`` to ``shape`` and ``dtype``, in ``out`` if given."""
        ...

    def decode_sum(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the same piece from W senders, uint8 ``[W, bytes]``, in fp32 in the order of the rows.

        ``random`` is sender 0's; sender w's stream is ``random.stream + w``. The result is ``out`` if given.
        """
        ...

    def decode_sum_encode(
        self,
        wires: torch.Tensor,
        numel: int,
        random_in: Stream | None = None,
        random_out: Stream | None = None,
    ) -> torch.Tensor:
        """The middle of a two-shot all-reduce: the sum of uint8 ``[W, bytes]``, as hop 2 encodes it.

        Args:
            numel: values in the piece (what ``chunk_numel`` gave).
            random_in, random_out: the senders' (as in ``decode_sum``), and the one that encodes the sum.

        Returns:
            uint8 ``[bytes]``.
        """
        ...


def hop_codecs(codec: Codec) -> tuple[Codec, Codec]:
    """What encodes first (partial sums: all-reduce, reduce-scatter) and second (their sum; gathered slices).

    The codec itself twice, unless it has ``hops`` of its own (``TacoCodec``). The pieces of both are equally
    long.
    """
    return getattr(codec, "hops", (codec, codec))
