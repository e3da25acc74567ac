"""The collectives of W ranks on one device, with the arithmetic of the real ones.

Everything that is sent is encoded and decoded by the project's codecs in the order of
megatron.compression.communication, so a simulated all-reduce has the bits of a real one.
"""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import cut, joined
from scripts.accuracy.settings import Setting

MICRO_BATCH = 4
"""Sequences of a message between pipeline stages."""


class Exchange:
    """Sums the ranks' partial sums, gathers their slices and sends between stages, as a setting
    says.

    The first hop of an all-reduce encodes each rank's partial sum. The second hop encodes their sum
    or, with sequence parallelism, what is gathered.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world_size = setting.world_size
        self.codecs = setting.codecs

    def reduce(self, partials: torch.Tensor, direction: str, whole: bool = False) -> torch.Tensor:
        """Sum the ranks' tensors: an all-reduce, or a reduce-scatter whose shards are put together.

        Args:
            partials: [W, T, h] of the ranks.
            direction: the message, a field of ``Setting``.
            whole: whether it is an all-reduce also with sequence parallelism.

        Returns:
            Their sum, [T, h].
        """
        codec = self.codecs[direction]
        is_scattered = self.setting.sequence_parallel and not whole
        if codec is None or is_scattered:
            return self.reduce_scatter(partials, direction)
        # Two ranks send each other all they have: one exchange, and so one encoding.
        if len(partials) == 2 and codec.one_exchange:
            return self._sum_of_one_exchange(partials, codec, in_pieces=codec.sees_shape)
        # Decode and sum what the ranks sent, and encode the sum for the way back.
        first, second = codec.hops
        payloads, piece = self._encode(partials, codec, first, pieces_matter(codec))
        total = first.decode_sum_encode(payloads, piece, second)
        return joined(second.decode(total, piece, partials.dtype), partials.shape[1:])

    def reduce_scatter(self, partials: torch.Tensor, direction: str) -> torch.Tensor:
        """Return the shards of the sum of [W, T, h] together, [T, h]."""
        codec = self.codecs[direction]
        if codec is None:
            # Sums of bf16 run in fp32 and are rounded once.
            return partials.sum(dim=0, dtype=partials.dtype)
        return self._sum_of_one_exchange(partials, codec, in_pieces=pieces_matter(codec))

    def _sum_of_one_exchange(
        self, partials: torch.Tensor, codec: Codec, in_pieces: bool
    ) -> torch.Tensor:
        """Return the sum [T, h] of what ranks have encoded once.

        Args:
            partials: [W, T, h] of the ranks.
            codec: of the message; its first hop is used.
            in_pieces: whether a rank encodes a piece for each receiver.
        """
        first = codec.hops[0]
        payloads, piece = self._encode(partials, codec, first, in_pieces)
        return joined(first.decode_sum(payloads, piece, partials.dtype), partials.shape[1:])

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """Return x [T, h] as every rank has it after the all-gather of slices, or of keys and
        values."""
        codec = self.codecs[direction]
        if codec is None:
            return x.clone()
        # A gather is the second hop of an all-reduce.
        second = codec.hops[1]
        payloads, piece = self._encode(x[None], codec, second, pieces_matter(codec))
        return joined(second.decode(payloads[0], piece, x.dtype), x.shape)

    def send(self, x: torch.Tensor, sequence: int, direction: str) -> torch.Tensor:
        """Return what the next pipeline stage has of x, a message for each micro-batch.

        Args:
            x: [T, h], one sequence after the other.
            sequence: tokens of a sequence.
            direction: the message, a field of ``Setting``.
        """
        codec = self.codecs[direction]
        if codec is None:
            return x.clone()
        sequences = x.view(-1, sequence, x.shape[1])
        samples = min(MICRO_BATCH, len(sequences))
        # Megatron's messages are [tokens, samples, h].
        messages = sequences.view(-1, samples, *sequences.shape[1:]).transpose(1, 2)
        senders = 1
        if self.setting.sequence_parallel:
            senders = self.world_size  # each rank sends its own tokens
        parts = messages.unflatten(1, (senders, -1)).flatten(0, 1)
        decoded = codec.decode(codec.encode(parts), parts.shape[1:], x.dtype)
        return decoded.reshape(messages.shape).transpose(1, 2).reshape(x.shape)

    def _encode(
        self, x: torch.Tensor, codec: Codec, hop: Codec, in_pieces: bool
    ) -> tuple[torch.Tensor, torch.Size]:
        """Encode what each rank sends.

        Args:
            x: [S, ...], a tensor of each sender.
            codec: the codec of the message.
            hop: the codec of this hop of it.
            in_pieces: whether there is a piece for each receiving rank.

        Returns:
            uint8 [S, rows, bytes], and the shape of a row.
        """
        pieces = self.world_size if in_pieces else 1
        rows = torch.stack([cut(tensor, pieces, codec) for tensor in x])
        payloads = hop.encode(rows.flatten(0, 1))
        return payloads.view(*rows.shape[:2], -1), rows.shape[2:]


def pieces_matter(codec: Codec) -> bool:
    """Return whether pieces of a tensor are encoded in other bits than the tensor in one.

    Groups of values are the same in both. Shapes are not, and each piece begins a new list of
    outliers.
    """
    hops = [getattr(hop, "config", None) for hop in codec.hops]
    return codec.sees_shape or any(getattr(config, "outliers", False) for config in hops)
