"""Exchanges of payloads that may be cut (lossless codecs): where any sender says so, the rest follows.

Every receiver sees a payload of every sender, and a sender's payloads say alike whether they are cut, so all
ranks decide alike.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


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
) -> Work:
    """Start to gather uint8 ``[1, bytes]`` of every rank; then ``proceed(gathered)``, uint8 ``[W, bytes]``.

    Args:
        row: ``[1, *shape]``, what the payload encodes; None will do for a codec that is not lossless.
    """
    return _exchange(lambda one: transport.all_gather(one[0]), payload, codec, row, proceed)


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
) -> Work:
    between = payloads.shape[1:-1]
    received, pending = start(payloads.flatten(1))
    received = received.view(len(received), *between, -1)
    if not codec.lossless:
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
