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
    """Sums the ranks' partial sums, gathers their slices, sends between stages, as a setting says. The first
    hop encodes each rank's partial sum, the second their sum or, with sequence parallelism, what is gathered.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world_size = setting.world_size
        self.codecs = setting.codecs

    def reduce(self, partials: torch.Tensor, direction: str, whole: bool = False) -> torch.Tensor:
        """[W, T, h] of the ranks -> their sum [T, h]: an all-reduce, or a reduce-scatter's shards together.

        ``whole``: an all-reduce also with sequence parallelism.
        """
        codec, shape, dtype = self.codecs[direction], partials.shape[1:], partials.dtype
        if codec is None or (self.setting.sequence_parallel and not whole):
            return self.reduce_scatter(partials, direction)
        if len(partials) == 2 and codec.one_exchange:
            return self.reduce_scatter(partials, direction)
        first, second = codec.hops
        payloads, piece = self._encode(partials, codec, first)
        total = first.decode_sum_encode(payloads, piece, second)
        return joined(second.decode(total, piece, dtype), shape)

    def reduce_scatter(self, partials: torch.Tensor, direction: str) -> torch.Tensor:
        """[W, T, h] of the ranks -> the shards of their sum together, [T, h]."""
        codec, dtype = self.codecs[direction], partials.dtype
        if codec is None:
            return partials.sum(dim=0, dtype=dtype)  # bf16 sums run in fp32 and are rounded once
        payloads, piece = self._encode(partials, codec, codec.hops[0])
        return joined(codec.hops[0].decode_sum(payloads, piece, dtype), partials.shape[1:])

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """x [T, h] as every rank has it after the all-gather of slices, or of keys and values."""
        codec = self.codecs[direction]
        if codec is None:
            return x.clone()
        payloads, piece = self._encode(x[None], codec, codec.hops[1])
        return joined(codec.hops[1].decode(payloads[0], piece, x.dtype), x.shape)

    def send(self, x: torch.Tensor, sequence: int, direction: str) -> torch.Tensor:
        """x [T, h], one sequence after the other, as messages [sequence, samples, h], one a micro-batch."""
        codec = self.codecs[direction]
        if codec is None:
            return x.clone()
        batch = x.view(-1, sequence, x.shape[1])
        messages = batch.view(-1, min(MICRO_BATCH, len(batch)), *batch.shape[1:]).transpose(1, 2)
        slices = (
            self.world_size if self.setting.sequence_parallel else 1
        )  # each rank sends its own tokens
        parts = messages.unflatten(1, (slices, -1)).flatten(0, 1)
        decoded = codec.decode(codec.encode(parts), parts.shape[1:], x.dtype)
        return decoded.reshape(messages.shape).transpose(1, 2).reshape(x.shape)

    def _encode(self, x: torch.Tensor, codec: Codec, hop: Codec) -> tuple[torch.Tensor, torch.Size]:
        """uint8 [S, rows, bytes] of x [S, ...], and the shape of a row: a piece for each rank only where that
        matters, since groups of values are the same in a whole tensor."""
        rows = torch.stack(
            [cut(one, self.world_size if codec.sees_shape else 1, codec) for one in x]
        )
        payloads = hop.encode(rows.flatten(0, 1))
        return payloads.view(*rows.shape[:2], -1), rows.shape[2:]
