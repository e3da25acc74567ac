"""Messages of interleaved halves: they stay under way when the layer that sends them has returned.

A tensor-parallel layer sends by the messages of its site and waits for them. While a block of one
half of a micro-batch runs (halves.py), its two layers have stand-ins for their sites, which give
them messages that do not wait. Whoever schedules the halves waits later, behind a block of the
other half:

    layer            message of it              what the layer gets       who waits
    row-parallel     sum of the output          a tensor without values   BlockInput.compute
                     gather of its gradient     a gather begun before     the layer
    column-parallel  gather of the input        a gather begun before     the layer
                     sum of the input gradient  a placeholder             BlockInputBackward

The gathers exist with sequence parallelism alone. Each is begun one block early, where its input is
known.

A stand-in serves one call of its layer, forward and backward, so it is the pair of the call's
messages as well (``site.MessagePair``). It always says that the layer has to send by it:
megatron-core's functions would wait, also for what goes uncompressed. Each message is decided when
it is sent.
"""

from collections.abc import Callable, Sequence

import torch

from megatron.compression.communication import Work
from megatron.compression.communication.site import (
    CommSite,
    EncodedGather,
    Message,
    PayloadGather,
    SiteMessage,
)
from megatron.compression.tensor_parallel.functions import placeholder


class RowStandIn:
    """Stands in for the site of a row-parallel layer during one call: the sum of its output stays
    under way."""

    compressed = True
    """The layer sends by these messages, whether a codec encodes them or not."""

    def __init__(self, site: CommSite) -> None:
        self.site = site
        self.group = site.group
        self.total: Work | None = None
        """The sum of the output while it is under way."""
        self.is_lossy = False
        """Whether a codec rounds that sum, so that nobody expects the bits of an uncompressed run."""
        self.dtype: torch.dtype | None = None
        """Type of that sum, and of its gradient; the residual stream's may be fp32."""
        self.has_backward = False
        """Whether the layer's output has a gradient."""
        self._nbytes = 0
        self._gradient_gather: Work | None = None

    def pair(self, forward: str | None, backward: str | None, nbytes: int) -> "RowStandIn":
        """Return the messages of the layer's call; arguments as in ``CommSite.pair``."""
        self._nbytes = nbytes
        return self

    def forward(self, operation: str) -> Message:
        """Return the sum of the output."""
        return _OutputSum(self, self.site.message("tp.forward", operation, self._nbytes))

    def backward(self, operation: str) -> Message:
        """Return the gather of the output's gradient, which may be under way already."""
        # Frozen below, or the last block: nobody has begun one.
        if self._gradient_gather is None:
            return self.site.message("tp.backward", operation, self._nbytes)
        # Handed over once: the result is the layer's.
        work, self._gradient_gather = self._gradient_gather, None
        return _Begun(work)

    def start_gradient_gather(self, gradient: torch.Tensor) -> None:
        """Begin to gather the gradient of the layer's output, ``[s / W, b, h]`` on each rank."""
        # In the sum's own type: beside an fp32 residual stream the gradient comes in fp32.
        message = self.site.message("tp.backward", "all_gather", self._nbytes)
        self._gradient_gather = message.start(gradient.to(self.dtype))


class ColumnStandIn:
    """Stands in for the site of a column-parallel layer during one call.

    The gather of its input is begun before the layer runs, and the sum of its input gradient stays
    under way.
    """

    compressed = True
    """The layer sends by these messages, whether a codec encodes them or not."""

    def __init__(self, site: CommSite) -> None:
        self.site = site
        self.group = site.group
        self.gradient: Work | None = None
        """The sum of the input gradient while it is under way."""
        self.after_gather: Callable[[], None] | None = None
        """Called in the backward when the gather of the input has begun: the other half begins its
        own."""
        self._nbytes = 0
        self._input_gather: _InputGather | None = None

    def pair(self, forward: str | None, backward: str | None, nbytes: int) -> "ColumnStandIn":
        """Return the messages of the layer's call; arguments as in ``CommSite.pair``."""
        self._nbytes = nbytes
        return self

    def start_gather(self, y: torch.Tensor) -> None:
        """Begin to gather the layer's input ``[s / W, b, h]``, before the layer asks for it."""
        nbytes = y.nbytes * self.site.group.size()
        message = self.site.message("tp.forward", "all_gather", nbytes)
        self._input_gather = _InputGather(self, message, y)

    def encoded_gather(self) -> EncodedGather:
        """Return the gather that ``start_gather`` has begun."""
        gather, self._input_gather = self._input_gather, None
        assert gather is not None, "BlockInput.compute begins the gather before the layer runs"
        return gather

    def backward(self, operation: str) -> Message:
        """Return the sum of the input gradient."""
        return _InputGradientSum(self, self.site.message("tp.backward", operation, self._nbytes))


class AgainStandIn:
    """Stands in for the site of a column-parallel layer that runs again in the backward
    (halves_recompute.py): its input is gathered once more, and nothing else is sent."""

    compressed = True
    """The layer sends by these messages, whether a codec encodes them or not."""

    def __init__(self, site: CommSite) -> None:
        self.site = site
        self.group = site.group
        self._nbytes = 0

    def pair(self, forward: str | None, backward: str | None, nbytes: int) -> "AgainStandIn":
        """Return the messages of the layer's call; arguments as in ``CommSite.pair``."""
        self._nbytes = nbytes
        return self

    def encoded_gather(self) -> EncodedGather:
        """Return the gather of the input, counted now."""
        return self.site.message("tp.forward", "all_gather", self._nbytes)


class _OutputSum:
    """The sum of a row-parallel layer's output, which the stand-in keeps under way.

    The layer gets a tensor of the sum's shape without values: it returns it, and does not read it.
    """

    __slots__ = ("_message", "_stand_in")

    def __init__(self, stand_in: RowStandIn, message: SiteMessage) -> None:
        self._stand_in = stand_in
        self._message = message

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        message = self._message
        stand_in = self._stand_in
        destination = None
        if message.codec is None and message.operation == "all_reduce":
            # In the place of the layer's product, which nobody else reads: torch.distributed sums
            # in place, and a sum elsewhere costs a copy. A product that is encoded is free at once.
            destination = x
        # Not waited for: BlockInput.compute does.
        stand_in.total = message.start(x, destination)
        stand_in.is_lossy = message.codec is not None and not message.codec.lossless
        stand_in.dtype = x.dtype
        tokens = x.shape[0]
        if message.operation == "reduce_scatter":
            tokens //= message.site.group.size()
        # The layer reads nothing of it, so no memory is spent.
        return Work.completed(empty(x, x.dtype, (tokens, *x.shape[1:])))


class _InputGradientSum:
    """The sum of a column-parallel layer's input gradient, which the stand-in keeps under way.

    The layer's weight gradients overlap with its first exchange, and leave the last one under way.
    """

    __slots__ = ("_message", "_stand_in")

    def __init__(self, stand_in: ColumnStandIn, message: SiteMessage) -> None:
        self._stand_in = stand_in
        self._message = message

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        message = self._message
        destination = None
        if message.codec is None and message.operation == "all_reduce":
            destination = x  # as in _OutputSum
        work = message.start(x, destination)
        # BlockInputBackward waits for it, a block later.
        self._stand_in.gradient = work
        tokens = x.shape[0]
        if message.operation == "reduce_scatter":
            tokens //= message.site.group.size()
        return _LeftUnderWay(work, placeholder(x[:tokens]))


class _Begun:
    """A gather that has been started already; what the layer gives to ``start`` is what is
    gathered."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        return self._work


class _InputGather:
    """The gather of a column-parallel layer's input, begun when it is made.

    Payload and result are handed to the layer and forgotten here, so that their memory is the
    layer's.
    """

    __slots__ = ("_message", "_payload", "_stand_in", "_work")

    def __init__(self, stand_in: ColumnStandIn, message: SiteMessage, y: torch.Tensor) -> None:
        self._stand_in = stand_in
        self._message = message
        # Encoded where the input is known, a block before the layer asks.
        self._payload: torch.Tensor | None = message.encode(y)
        self._work: Work | None = message.gather(self._payload, y.shape, y.dtype)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        payload, self._payload = self._payload, None
        return payload

    def gather(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Work:
        work, self._work = self._work, None
        return work

    def again(self, traffic: str) -> "_GatherInBackward":
        return _GatherInBackward(self._stand_in, self._message.again(traffic))


class _GatherInBackward:
    """The gather of the layer's input in its backward; behind it the other half begins one of its
    own."""

    __slots__ = ("_message", "_stand_in")

    def __init__(self, stand_in: ColumnStandIn, message: PayloadGather) -> None:
        self._stand_in = stand_in
        self._message = message

    def gather(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Work:
        work = self._message.gather(payload, shape, dtype)
        if self._stand_in.after_gather is not None:
            # The link is free for the other half's gather after this one has begun.
            self._stand_in.after_gather()
        return work


class _LeftUnderWay(Work):
    """Another work without its last exchange: ``wait`` gives a placeholder at once."""

    def __init__(self, work: Work, result: torch.Tensor) -> None:
        super().__init__(None)
        self._work = work
        self._placeholder = result

    @property
    def exchanges(self) -> int:
        # One fewer, so that a layer that advances it leaves the last one under way.
        return max(self._work.exchanges - 1, 0)

    def advance(self) -> None:
        self._work.advance()

    def wait(self) -> torch.Tensor:
        return self._placeholder


def empty(
    like: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a tensor whose values come later or never; it takes one value's memory.

    Args:
        like: has its device, and its shape unless one is given.
        dtype: its type.
        shape: its shape; None: that of ``like``.
    """
    # Strides of 0: every index is the same element.
    shape = tuple(like.shape if shape is None else shape)
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=like.device)
