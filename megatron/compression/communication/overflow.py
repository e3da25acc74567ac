"""What is sent where the values of a lossless payload did not fit: the values as they are.

Three states of a run, the same on every rank:

- ``NOTED``, in a training pass that can be repeated (repetition.py): flags are kept on the device and read
  once at the pass's end; a pass with an overflow is repeated, lossless codecs off.
- ``OFF``, in that repeated pass and in CUDA graphs: the policy decides for no lossless codec.
- ``ASKED``, elsewhere (evaluation, loops of one's own): before payloads are sent the ranks reduce the flag
  and the host reads it. Where it cannot, between pipeline stages and in a capture, lossless is off.
"""

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape

if TYPE_CHECKING:  # transports hold the overflow state of their run
    from megatron.compression.communication.transport import TorchTransport


class State(enum.Enum):
    """See above."""

    ASKED = enum.auto()
    NOTED = enum.auto()
    OFF = enum.auto()


class Overflow:
    """The state of one run, and the flags of its pass."""

    def __init__(self) -> None:
        self.state = State.ASKED
        self._flags: dict[Any, torch.Tensor] = {}  # uint8 by stream

    def begin(self) -> None:
        """From here on flags are noted."""
        self.state, self._flags = State.NOTED, {}

    def note(self, codec: Codec, payloads: torch.Tensor) -> None:
        """Remember on the device whether payloads that one call has encoded overflowed."""
        flag = codec.overflow_flag(payloads)
        stream = torch.cuda.current_stream() if payloads.is_cuda else None
        noted = self._flags.get(stream)
        self._flags[stream] = flag.clone() if noted is None else noted.bitwise_or_(flag)

    def end(self) -> bool:
        """Whether any rank has noted an overflow since ``begin``; the state is ``ASKED`` from here on.
        Collective over all ranks of the job; synchronises with the device."""
        self.state = State.ASKED
        found = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
        for flag in self._flags.values():
            found += flag
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def turns_off(self, traffic: str, capturing: bool) -> bool:
        """Return whether lossless codecs of a traffic class are off.

        ``capturing``: a CUDA graph is being captured, in which the host cannot read a flag. Updated weights
        are sent outside passes, so they are asked about at each optimizer step (data_parallel/weights.py).
        """
        if self.state is State.ASKED:
            return capturing or traffic.startswith("pp.")
        return self.state is State.OFF and traffic != "dp.weight"


def encode(
    codec: Codec, rows: torch.Tensor, transport: "TorchTransport"
) -> tuple[Codec, torch.Tensor]:
    """Encode ``rows``, and where a lossless payload overflows on any rank, the values as they are.

    Args:
        codec: encodes one payload a row.
        rows: ``[rows, *shape]``.
        transport: sends the payloads; its run's overflow state says how an overflow is found out.

    Returns:
        What decodes on all ranks (``codec``, or ``AsIs`` where a rank's values did not fit), and the
        payloads, uint8 ``[rows, bytes]``.
    """
    payloads = codec.encode(rows)
    if not codec.lossless:
        return codec, payloads
    if transport.overflow.state is State.NOTED:
        transport.overflow.note(codec, payloads)
    elif transport.any_rank(codec.overflow_flag(payloads)):
        codec = AsIs(rows.dtype)
        payloads = codec.encode(rows)
    return codec, payloads


def sum_and_encode(
    codec: Codec,
    payloads: torch.Tensor,
    shape: Shape,
    dtype: torch.dtype,
    into: Codec,
    transport: "TorchTransport",
) -> tuple[Codec, torch.Tensor]:
    """``encode`` of the sum over S of uint8 ``[S, rows, bytes]``, by ``into``; a lossless one rounds it to
    the ``dtype`` of what was encoded."""
    if not into.lossless:
        return into, codec.decode_sum_encode(payloads, shape, into)
    return encode(into, codec.decode_sum(payloads, shape, dtype), transport)


@dataclass(frozen=True)
class AsIs(Codec):
    """The bytes of values of ``dtype``."""

    dtype: torch.dtype

    def payload_bytes(self, shape: Shape) -> int:
        return self.dtype.itemsize * math.prod(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1).contiguous().view(torch.uint8)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return payloads.contiguous().view(self.dtype).view(len(payloads), *shape).to(dtype)
