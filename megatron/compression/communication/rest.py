"""Exchanges of payloads that may be cut (lossless codecs): where any sender says so, the rest follows.

Every receiver sees a payload of every sender, and a sender's payloads say alike whether they are cut, so all
ranks decide alike. To see it the host waits for the device. In a pass that can be repeated (``speculation``)
it does not look: cut payloads decode to zeros, and at the pass's end all ranks ask whether there were any.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


class Speculation:
    """Whether this process is in a pass in which nobody waits for the flags of payloads, and those flags.

    Senders note them: whatever is received has been sent by a rank of the job.
    """

    def __init__(self) -> None:
        self.on = False
        self._noted: dict[Any, torch.Tensor] = {}  # uint8 by stream: the flags' bits

    def begin(self) -> None:
        """From here on nobody looks."""
        self.on, self._noted = True, {}

    def note(self, codec: Codec, payloads: torch.Tensor) -> None:
        """Remember on the device whether these payloads, the rows of one exchange, are cut."""
        flag = codec.cut_flags(payloads).reshape(-1)[0]
        stream = torch.cuda.current_stream() if payloads.is_cuda else None
        noted = self._noted.get(stream)
        if noted is None:
            self._noted[stream] = flag.clone()
        else:
            noted.bitwise_or_(flag)

    def end(self) -> bool:
        """Whether any rank has sent a cut payload since ``begin``. Collective over all ranks of the job;
        synchronises with the device."""
        self.on, noted = False, [flags & 1 for flags in self._noted.values()]
        cut = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
        for flag in noted:
            cut += flag
        dist.all_reduce(cut, op=dist.ReduceOp.MAX)
        return bool(cut)


speculation = Speculation()
"""The process's; a pass has one, whatever it is that communicates in it. See repetition.py."""


def all_to_all(
    payloads: torch.Tensor,
    codec: Codec,
    rows: torch.Tensor,
    transport: TorchTransport,
    proceed: Callable[[torch.Tensor], Any],
    exchanges: int = 1,
) -> Work:
    """Start to send row r of uint8 ``[W, ..., bytes]`` to rank r; then ``proceed(received)``, shaped alike.

    Args:
        rows: ``[W, ..., *shape]``, what the payloads encode; left as it is until they have arrived.
        proceed: gives the result, or the ``Work`` of the next exchange.
        exchanges: how many there are from here on, the rest not counted.
    """
    return _exchange(transport.all_to_all, payloads, codec, rows, proceed, exchanges)


def all_gather(
    payload: torch.Tensor,
    codec: Codec,
    row: torch.Tensor | None,
    transport: TorchTransport,
    proceed: Callable[[torch.Tensor], Any],
    fits: bool | None = None,
) -> Work:
    """Start to gather uint8 ``[1, bytes]`` of every rank; then ``proceed(gathered)``, uint8 ``[W, bytes]``.

    Args:
        row: ``[1, *shape]``, what the payload encodes; None will do for a codec that is not lossless.
        fits: whether no rank's payload is cut, where that has been asked; None: as in the pass.
    """
    start = lambda one: transport.all_gather(one[0])  # noqa: E731
    return _exchange(start, payload, codec, row, proceed, fits=fits)


def sum_and_encode(
    codec: Codec, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, into: Codec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum over S of uint8 ``[S, rows, bytes]`` as ``into`` encodes it, and, where it may be cut, itself.

    Args:
        dtype: of what was encoded; a lossless codec rounds the fp32 sum to it.
    """
    if not into.lossless:
        return codec.decode_sum_encode(payloads, shape, into), None
    total = codec.decode_sum(payloads, shape, dtype)
    return into.encode(total), total


def _exchange(
    start: Callable[[torch.Tensor], tuple[torch.Tensor, Any]],
    payloads: torch.Tensor,
    codec: Codec,
    rows: torch.Tensor | None,
    proceed: Callable[[torch.Tensor], Any],
    exchanges: int = 1,
    fits: bool | None = None,
) -> Work:
    between = payloads.shape[1:-1]
    received, pending = start(payloads.flatten(1) if between else payloads)
    if between:
        received = received.view(len(received), *between, -1)
    if fits is None and codec.lossless and speculation.on:
        speculation.note(codec, payloads)
        fits = True
    if fits or not codec.lossless:
        return Work(pending, lambda: proceed(received), exchanges)

    def finish() -> Any:
        if not codec.is_cut(received):
            return proceed(received)
        assert rows is not None, "a lossless codec needs what it has encoded"
        own = codec.rest(rows.flatten(0, len(between))).view(len(payloads), -1)
        rest, pending = start(own)
        # Waited for here: ranks that need no rest here (another node's) go on to exchanges over other groups,
        # and these must come in one order everywhere.
        pending.wait()
        return proceed(torch.cat((received, rest.view(*received.shape[:-1], -1)), dim=-1))

    return Work(pending, finish, exchanges)
