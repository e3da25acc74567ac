"""Lossless payloads whose values do not fit: the protocol by which ranks find out, and what is sent
instead.

A payload has a size that is agreed beforehand, since the receiver allocates it: what trained
tensors need, with some room. Whether a message fits depends on its values. The encoder sets a flag
on the device where one does not; such a payload decodes to zeros. All ranks have to know, and the
host must not wait for the device in each message. So there is one protocol, in three steps:

    note      the flag stays on the device                                 OverflowFlags.note
    ask       the ranks reduce their flags, and the host reads the answer  OverflowFlags.ask
    repeat    what did not fit is sent once more, or elsewhere, as it is

Four kinds of traffic differ in when they ask, and in what is repeated:

    traffic                      flags are asked about        what is repeated
    messages of a training pass  at the pass's end, once      the pass (repetition.py), lossless off
    messages elsewhere           before each is sent          the message, as ``AsIs`` encodes it
    updated weights              at each optimizer step       the gather, by Megatron itself
    FSDP2's weights              after a change of weights    the module's gathers, by torch itself

The session chooses between the first two by the state of its run's ``Overflow``, which is the same
on every rank. ``repetition.py`` sets it where Megatron's loop can repeat a pass.
"""

import enum
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape, contiguous_rows

if TYPE_CHECKING:  # transports hold the overflow state of their run
    from megatron.compression.communication.transport import TorchTransport


class State(enum.Enum):
    """How the messages of a run that are sent by sites find out whether they fit."""

    ASKED = enum.auto()
    """Before a payload is sent the ranks reduce its flag and the host reads it: in evaluation, and
    in loops of one's own. Where the host cannot wait, between pipeline stages and in a capture,
    lossless is off."""
    NOTED = enum.auto()
    """In a pass that can be repeated: flags are kept on the device and read once, at the pass's
    end."""
    OFF = enum.auto()
    """In a pass that is repeated, and in CUDA graphs: the policy decides for no lossless codec."""


class OverflowFlags:
    """Overflow flags of payloads, kept on the device until the ranks ask for them.

    flags.note(bucket, codec.overflow_flag(payload))             any number of times
    overflowed = flags.ask(transport.any_ranks)                  {bucket: whether any rank's did}
    """

    def __init__(self) -> None:
        self._flags: dict[Hashable, torch.Tensor] = {}

    def note(self, key: Hashable, flag: torch.Tensor) -> None:
        """Remember a flag.

        Args:
            key: what the payload belongs to; flags of one key are joined by or.
            flag: uint8 ``[]`` on the device, not 0 where the payload did not fit.
        """
        noted = self._flags.get(key)
        # A copy: an encoder may use the flag's memory again.
        self._flags[key] = flag.clone() if noted is None else noted.bitwise_or_(flag)

    def take(self) -> dict[Hashable, torch.Tensor]:
        """Return the flags by key, and forget them."""
        flags, self._flags = self._flags, {}
        return flags

    def ask(self, any_ranks: Callable[[torch.Tensor], list[bool]]) -> dict[Hashable, bool]:
        """Return by key whether any rank has noted an overflow, and forget the flags.

        Collective: all ranks have noted the same keys in the same order. The host waits for the
        device, once.

        Args:
            any_ranks: reduces uint8 ``[n]`` over the ranks, as ``TorchTransport.any_ranks``.
        """
        flags = self.take()
        if not flags:
            return {}
        return dict(zip(flags, any_ranks(torch.stack(list(flags.values()))), strict=True))


class Overflow:
    """The state of one run, and the flags of its pass."""

    def __init__(self) -> None:
        self.state = State.ASKED
        self._flags = OverflowFlags()

    def begin(self) -> None:
        """Begin a pass: from here on flags are noted."""
        self.state = State.NOTED
        self._flags = OverflowFlags()

    def note(self, codec: Codec, payloads: torch.Tensor) -> None:
        """Remember on the device whether payloads that one call has encoded overflowed."""
        # By stream: two streams do not write one flag.
        stream = torch.cuda.current_stream() if payloads.is_cuda else None
        self._flags.note(stream, codec.overflow_flag(payloads))

    def end(self) -> bool:
        """End a pass: return whether any rank has noted an overflow since ``begin``.

        The state is ``ASKED`` from here on. Collective over all ranks of the job; the host waits.
        """
        self.state = State.ASKED
        # One number: ranks differ in their streams, and a pipeline stage may have noted nothing.
        overflowed = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
        for flag in self._flags.take().values():
            overflowed += flag
        dist.all_reduce(overflowed, op=dist.ReduceOp.MAX)
        return bool(overflowed)

    def turns_off(self, traffic: str, capturing: bool) -> bool:
        """Return whether lossless codecs of a traffic class are off.

        Args:
            traffic: one of ``ledger.TRAFFIC``. Updated weights are sent outside passes and have
                flags of their own, at each optimizer step (data_parallel/weights.py).
            capturing: a CUDA graph is being captured, in which the host cannot read a flag.
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
        What decodes on all ranks (``codec``, or ``AsIs`` where a rank's values did not fit), and
        the payloads, uint8 ``[rows, bytes]``.
    """
    payloads = codec.encode(rows)
    # Only lossless codecs overflow; for all others this is one call.
    if not codec.lossless:
        return codec, payloads
    if transport.overflow.state is State.NOTED:
        transport.overflow.note(codec, payloads)
    elif transport.any_rank(codec.overflow_flag(payloads)):
        # All ranks go this way together, since they have read the same answer.
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
    """Sum payloads and encode the sum, as ``encode`` does.

    Args:
        codec: has encoded the payloads.
        payloads: uint8 ``[S, rows, bytes]``, summed over S in fp32.
        shape: of one row's values.
        dtype: of what was encoded; a lossless ``into`` encodes the sum rounded to it.
        into: encodes the sum.
        transport: as in ``encode``.

    Returns: as ``encode``.
    """
    if not into.lossless:
        return into, codec.decode_sum_encode(payloads, shape, into)
    return encode(into, codec.decode_sum(payloads, shape, dtype), transport)


@dataclass(frozen=True)
class AsIs(Codec):
    """Values of one dtype as they are: each payload is their bytes."""

    dtype: torch.dtype

    def payload_bytes(self, shape: Shape) -> int:
        return self.dtype.itemsize * math.prod(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return contiguous_rows(x).view(torch.uint8)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return payloads.reshape(-1).view(self.dtype).view(len(payloads), *shape).to(dtype)
