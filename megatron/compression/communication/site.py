"""A communication site: one point in the model where a group of ranks communicates.

A site answers one question: how is this message sent? The answer is decided by the policy, counted
in the ledger, and sends itself.

    message = site.message("tp.forward", "all_reduce", x.nbytes)   decided and counted
    total = message.start(x).wait()                                through its codec, or without one

A layer whose backward communicates as well asks for both directions in its forward:

    pair = site.pair("tp.forward", "tp.backward", x.nbytes)        decided; nothing is counted yet
    pair.forward("reduce_scatter").start(x)                        counted and sent in the forward
    pair.backward("all_gather").start(gradient)                    counted and sent in the backward

Where ``pair.compressed`` is False the layer may leave both to megatron-core's own functions, after
it has called ``pair.forward`` and ``pair.backward``, which count them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import (
    all_gather,
    all_gather_encoded,
    all_reduce,
    reduce_scatter,
    uncompressed_all_gather,
    uncompressed_all_reduce,
    uncompressed_reduce_scatter,
)
from megatron.compression.communication.gloo import wait_at_exit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.overflow import Overflow, encode
from megatron.compression.communication.policy import Decision, Policy
from megatron.compression.communication.transport import TorchTransport, Transports
from megatron.compression.communication.work import Work
from megatron.compression.patches import running

_COLLECTIVES: dict[str, tuple[Callable[..., Work], Callable[..., Work]]] = {
    "all_reduce": (all_reduce, uncompressed_all_reduce),
    "reduce_scatter": (reduce_scatter, uncompressed_reduce_scatter),
    "all_gather": (all_gather, uncompressed_all_gather),
}
"""By operation: the collective over a codec, and the one without."""


@dataclass(eq=False)
class Run:
    """What the communication sites of one training run share; there is no global one."""

    policy: Policy
    """Decides what is compressed."""
    ledger: Ledger
    """Counts bytes."""
    transports: Transports = field(default_factory=Transports)
    """Carry the payloads."""
    overflow: Overflow = field(default_factory=Overflow)
    """Whether lossless payloads fit: asked, noted or off. The policy and the transports share
    it."""
    before_gradient_sync: list[Callable[[], None]] = field(default_factory=list)
    """Called before a bucket of the run's gradients is reduced: weight gradients that are added
    late."""
    pipeline_exchange: Any = None
    """Its ``PipelineExchange``, through which the stages of its model send; None: it has no
    stages."""
    session: Any = None
    """The session that Megatron's training loop tells what happens; None: it runs in another
    loop."""

    def __post_init__(self) -> None:
        self.policy.overflow = self.overflow
        self.transports.overflow = self.overflow
        wait_at_exit()

    def open(self) -> None:
        """Begin: functions that are replaced for runs stay replaced, and CUDA graphs are followed.

        Idempotent.
        """
        running.open_run(self)
        self.ledger.count_replays()

    def close(self) -> None:
        """End: nothing is marked with the run any more; the last run of a process leaves the
        functions of other packages as they were."""
        self.ledger.ignore_replays()
        running.close_run(self)


class Message(Protocol):
    """One message that is about to be sent, decided and counted.

    A ``CommSite`` gives ``SiteMessage``. Interleaved halves (tensor_parallel/halves_messages.py)
    give layers messages of their own, which stay under way when the layer has returned.
    """

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        """Start the operation on ``x``; ``wait`` gives the result, in a contiguous ``out`` if
        given."""


class PayloadGather(Protocol):
    """An all-gather of a payload that is there already."""

    def gather(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Work:
        """Start to gather the payloads of tensors of this shape and dtype; ``wait`` gives ``[W * n,
        ...]``."""


class EncodedGather(PayloadGather, Protocol):
    """An all-gather whose payload a layer keeps, to gather it once more in its backward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank sends of ``x [n, ...]``: uint8 ``[1, bytes]``; without a codec
        ``x``."""

    def again(self, traffic: str) -> PayloadGather:
        """Return the same gather once more, with the same codec, counted in another traffic
        class."""


class MessagePair(Protocol):
    """The messages of one call of a layer: those of its forward, and those of its backward."""

    compressed: bool
    """Whether the layer has to send by these messages. False: it may leave all of them to
    megatron-core, and calls ``forward`` and ``backward`` to have them counted."""

    def forward(self, operation: str) -> Message:
        """Return a message of the forward, counted now."""

    def encoded_gather(self) -> EncodedGather:
        """Return an all-gather of the forward, counted now."""

    def backward(self, operation: str) -> Message:
        """Return a message of the backward, counted now."""


class CommSite:
    """The point where one layer communicates with one group.

    Args:
        name: the module's path in the model, with its global layer number.
        group: the ranks that communicate.
        run: the run that the model belongs to.
        layer: what ``--tp-compression-layers`` calls the layer: a number from 0, embedding or
            output.
        fused: whether collectives may be fused kernels over symmetric memory.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        run: Run,
        layer: int | str | None = None,
        fused: bool = True,
    ) -> None:
        self.name = name
        self.group = group
        self.run = run
        self.layer = layer
        self.fused = fused
        self._transports: dict[str, tuple[int, TorchTransport]] = {}

    def message(
        self, traffic: str, operation: str, nbytes: int, decision: Decision | None = None
    ) -> "SiteMessage":
        """Return the message that is about to be sent, decided and counted.

        Args:
            traffic: its class, one of ``ledger.TRAFFIC``.
            operation: all_reduce, reduce_scatter or all_gather.
            nbytes: size of the uncompressed tensor over all ranks: of what an all-gather makes, of
                what a reduce-scatter is given. It is the same on every rank of the group.
            decision: how it is sent; None: the policy decides.
        """
        run = self.run
        # A pair has decided already.
        codec, reason = decision or self.decide(traffic, nbytes)
        if codec is None:
            run.ledger.record_uncompressed(traffic, reason, operation, nbytes, self.group.size())
        else:
            run.ledger.record_plain(traffic, operation, nbytes, self.group.size())
        return SiteMessage(self, traffic, operation, nbytes, codec, reason)

    def pair(self, forward: str | None, backward: str | None, nbytes: int) -> "SiteMessagePair":
        """Decide how a layer's messages of this size are sent, in its forward and in its backward.

        Args:
            forward: traffic class of the forward's messages; None: the forward sends nothing.
            backward: traffic class of the backward's messages; None: the backward sends nothing.
            nbytes: size of each uncompressed message, as in ``message``.
        """
        return SiteMessagePair(self, forward, backward, nbytes)

    def decide(self, traffic: str, nbytes: int) -> Decision:
        """Return how a message of this size is sent now; nothing is counted."""
        return self.run.policy.decide(traffic, nbytes, self.name, self.layer)

    def count(self, traffic: str, reason: str, operation: str, nbytes: int) -> None:
        """Count an uncompressed collective that the policy is not asked about.

        Args:
            traffic: its class, one of ``ledger.TRAFFIC``.
            reason: why it goes uncompressed, one of ``ledger.KINDS``.
            operation: its name, as ``ledger.bytes_sent`` knows it.
            nbytes: size of its buffer.
        """
        self.run.ledger.record_uncompressed(traffic, reason, operation, nbytes, self.group.size())

    def transport(self, traffic: str) -> TorchTransport:
        """Return what carries the payloads of a traffic class and counts them."""
        version, transport = self._transports.get(traffic, (-1, None))
        # ``Transports.prepare`` may have found the group another transport since.
        if transport is None or version != self.run.transports.version:
            # What is really sent is counted where it is sent; ``record_plain`` has the other side.
            on_send = partial(self.run.ledger.record, traffic, "compressed")
            transport = self.run.transports.transport(self.group, on_send, self.fused)
            self._transports[traffic] = self.run.transports.version, transport
        return transport


class SiteMessage:
    """A message that a site sends at once; see ``CommSite.message``.

    It is a ``Message``, and of an all-gather an ``EncodedGather`` as well.
    """

    __slots__ = ("codec", "nbytes", "operation", "reason", "site", "traffic")

    def __init__(
        self,
        site: CommSite,
        traffic: str,
        operation: str,
        nbytes: int,
        codec: Codec | None,
        reason: str,
    ) -> None:
        self.site = site
        self.traffic = traffic
        self.operation = operation
        self.nbytes = nbytes
        self.codec = codec
        self.reason = reason

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        """Start the operation on ``x``; ``wait`` gives the result, in a contiguous ``out`` if
        given.

        ``out`` may be ``x`` itself.
        """
        site = self.site
        codec = self.codec
        compressed, uncompressed = _COLLECTIVES[self.operation]
        if codec is None:
            return uncompressed(x, site.group, out)
        # Asked here, since a call that finds no meter would cost every message.
        if site.run.policy.meter.interval:
            self._measure(x)
        return compressed(x, codec, site.transport(self.traffic), out)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ``gather`` sends of this rank's ``[n, ...]``: uint8 ``[1, bytes]``.

        Without a codec that is ``x``. From here on ``codec`` is what decodes the payload on all
        ranks, which is another one where a lossless payload did not fit.
        """
        if self.codec is None:
            return x
        if x.numel() == 0:  # on all ranks: nothing is encoded, and nothing has to be decoded
            self.codec = None
            return x
        self._measure(x)
        # Another codec comes back where a lossless payload did not fit on some rank.
        self.codec, payload = encode(self.codec.hops[1], x[None], self.site.transport(self.traffic))
        return payload

    def gather(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Work:
        """Start to gather what every rank has encoded, tensors of this shape and dtype.

        Args:
            payload: what ``encode`` gave.
            shape: ``[n, ...]`` of the encoded tensor.
            dtype: its type.

        Returns: Work whose ``wait`` gives ``[W * n, ...]``.
        """
        if self.codec is None:
            return uncompressed_all_gather(payload, self.site.group)
        transport = self.site.transport(self.traffic)
        return all_gather_encoded(payload, shape, dtype, self.codec, transport)

    def again(self, traffic: str) -> "SiteMessage":
        """Return the same message once more, with the same codec, counted in another traffic
        class."""
        decision = Decision(self.codec, self.reason)
        return self.site.message(traffic, self.operation, self.nbytes, decision)

    def _measure(self, x: torch.Tensor) -> None:
        """Let the error meter measure what is encoded, when it is due."""
        site = self.site
        policy = site.run.policy
        if not policy.measures(site.name, self.traffic):
            return
        assert self.codec is not None
        # A reduce-scatter encodes by the codec's first hop, an all-gather by its second, an
        # all-reduce by both.
        first, second = self.codec.hops
        codec = {"reduce_scatter": first, "all_gather": second}.get(self.operation, self.codec)
        policy.meter.measure(site.name, self.traffic, x, codec)


class SiteMessagePair:
    """The messages of one call of a layer, decided together; see ``MessagePair`` and
    ``CommSite.pair``.

    Both directions are decided in the forward: nothing that the policy looks at changes between a
    forward and its backward.
    """

    __slots__ = ("_backward", "_forward", "compressed", "nbytes", "site")

    def __init__(
        self, site: CommSite, forward: str | None, backward: str | None, nbytes: int
    ) -> None:
        self.site = site
        self.nbytes = nbytes
        self.compressed = False
        self._forward: tuple[str, Decision] | None = None
        self._backward: tuple[str, Decision] | None = None
        if forward is not None:
            decision = site.decide(forward, nbytes)
            self._forward = forward, decision
            self.compressed = decision.codec is not None
        if backward is not None:
            decision = site.decide(backward, nbytes)
            self._backward = backward, decision
            self.compressed = self.compressed or decision.codec is not None

    def forward(self, operation: str) -> SiteMessage:
        """Return a message of the forward, counted now."""
        assert self._forward is not None, "the forward was said to send nothing"
        traffic, decision = self._forward
        return self.site.message(traffic, operation, self.nbytes, decision)

    def encoded_gather(self) -> SiteMessage:
        """Return an all-gather of the forward, counted now."""
        assert self._forward is not None, "the forward was said to send nothing"
        traffic, decision = self._forward
        return self.site.message(traffic, "all_gather", self.nbytes, decision)

    def backward(self, operation: str) -> SiteMessage:
        """Return a message of the backward, counted now."""
        assert self._backward is not None, "the backward was said to send nothing"
        traffic, decision = self._backward
        return self.site.message(traffic, operation, self.nbytes, decision)


def enclosing_layer(module_path: str, layer_numbers: Mapping[str, int]) -> int | None:
    """Return the number of the transformer layer that holds a module; None: it is in none.

    Args:
        module_path: of the module.
        layer_numbers: numbers of the chunk's transformer layers, by their paths.
    """
    # Layers do not nest, so the first that fits is the only one.
    for path, number in layer_numbers.items():
        if module_path.startswith(path + "."):
            return number
    return None


def site_name(module_path: str, layer_number: int | None) -> str:
    """Return a module's path with its global layer number, also on a later pipeline stage.

    Args:
        module_path: the path in this stage's chunk, such as ``decoder.layers.0.mlp.linear_fc2``.
        layer_number: number, from 1, of the transformer layer that holds the module; None: it is in
            none.
    """
    if layer_number is None:
        return module_path
    return re.sub(r"layers\.\d+", f"layers.{layer_number - 1}", module_path, count=1)


def layer_name(module_path: str, layer_number: int | None) -> int | str | None:
    """Return what ``--tp-compression-layers`` calls a module's layer; arguments as in
    ``site_name``.

    That is its number from 0, embedding, output, mtp (any layer of multi-token prediction), or
    None.
    """
    first = module_path.split(".")[0]
    # Layers of multi-token prediction have numbers of their own.
    if layer_number is not None and first != "mtp":
        return layer_number - 1
    return {"embedding": "embedding", "output_layer": "output", "mtp": "mtp"}.get(first)
