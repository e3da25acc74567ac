"""A communication site: one place in the model where a group of ranks communicates.

    message = site.message("tp.forward", "all_reduce", x.nbytes)     decided and counted
    total = message.start(x).wait()                                  through its codec, or without one

A layer whose message has no codec may leave it to megatron-core instead; it is counted already.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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

_COLLECTIVES: dict[str, tuple[Callable[..., Work], Callable[..., Work]]] = {
    "all_reduce": (all_reduce, uncompressed_all_reduce),
    "reduce_scatter": (reduce_scatter, uncompressed_reduce_scatter),
    "all_gather": (all_gather, uncompressed_all_gather),
}


@dataclass(eq=False)
class Run:
    """What the communication sites of one training run share; there is no global one."""

    policy: Policy
    """Decides what is compressed."""
    ledger: Ledger
    """Counts bytes."""
    transports: Transports = field(default_factory=Transports)
    """For the payloads."""
    overflow: Overflow = field(default_factory=Overflow)
    """Whether lossless payloads fit: asked, noted or off. The policy and the transports share it."""

    def __post_init__(self) -> None:
        self.policy.overflow = self.overflow
        self.transports.overflow = self.overflow
        wait_at_exit()


class CommSite:
    """Where one layer communicates with one group.

    Args:
        name: the module's path in the model, with its global layer number.
        layer: what ``--tp-compression-layers`` calls the layer: a number from 0, embedding or output.
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
        self.name, self.group, self.run, self.layer, self.fused = name, group, run, layer, fused
        self._transports: dict[str, tuple[int, TorchTransport]] = {}

    def message(
        self, traffic: str, operation: str, nbytes: int, decision: Decision | None = None
    ) -> "Message":
        """What is about to be sent by an all_reduce, reduce_scatter or all_gather: decided (None: by the
        policy), and counted as what the uncompressed operation would send.

        Args:
            nbytes: the uncompressed tensor over all ranks (what an all-gather makes, what a reduce-scatter
                is given).
        """
        run = self.run
        codec, reason = decision or self.decide(traffic, nbytes)
        if codec is None:
            run.ledger.record_uncompressed(traffic, reason, operation, nbytes, self.group.size())
        else:
            run.ledger.record_plain(traffic, operation, nbytes, self.group.size())
        return Message(self, traffic, operation, codec, reason)

    def decide(self, traffic: str, nbytes: int) -> Decision:
        """Codec or not for a message now, and why; nothing is counted."""
        return self.run.policy.decide(traffic, nbytes, self.name, self.layer)

    def compresses(self, nbytes: int, *traffic: str) -> bool:
        """Whether a message of this size is compressed now in one of the traffic classes."""
        return any(self.decide(one, nbytes).codec is not None for one in traffic)

    def count(self, traffic: str, reason: str, operation: str, nbytes: int) -> None:
        """Count a collective that the policy is not asked about; ``reason`` is one of ``ledger.KINDS``."""
        self.run.ledger.record_uncompressed(traffic, reason, operation, nbytes, self.group.size())

    def transport(self, traffic: str) -> TorchTransport:
        """For the compressed messages of a traffic class, which it counts."""
        version, found = self._transports.get(traffic, (-1, None))
        if found is None or version != self.run.transports.version:
            on_send = partial(self.run.ledger.record, traffic, "compressed")
            found = self.run.transports.transport(self.group, on_send, self.fused)
            self._transports[traffic] = self.run.transports.version, found
        return found


class Message:
    """One message of a site; see ``CommSite.message`` and, for ``codec`` and ``reason``, ``Decision``."""

    __slots__ = ("codec", "operation", "reason", "site", "traffic")

    def __init__(
        self, site: CommSite, traffic: str, operation: str, codec: Codec | None, reason: str
    ) -> None:
        self.site, self.traffic, self.operation = site, traffic, operation
        self.codec, self.reason = codec, reason

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        """Start the operation on ``x``; ``wait`` gives the result, in ``out``, which may be ``x``, if
        given."""
        site, codec = self.site, self.codec
        compressed, uncompressed = _COLLECTIVES[self.operation]
        if codec is None:
            return uncompressed(x, site.group, out)
        if site.run.policy.meter.interval:
            self._measure(x)
        return compressed(x, codec, site.transport(self.traffic), out)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """What ``gather`` sends of this rank's ``[n, ...]``: uint8 ``[1, bytes]``; without a codec ``x``."""
        if self.codec is None:
            return x
        self._measure(x)
        self.codec, payload = encode(self.codec.hops[1], x[None], self.site.transport(self.traffic))
        return payload

    def gather(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Work:
        """Start to gather what every rank has encoded, tensors of this shape and dtype: ``[W * n, ...]``."""
        if self.codec is None:
            return uncompressed_all_gather(payload, self.site.group)
        return all_gather_encoded(
            payload, shape, dtype, self.codec, self.site.transport(self.traffic)
        )

    def again(self, traffic: str, nbytes: int) -> "Message":
        """The same message once more, counted in another traffic class."""
        return self.site.message(traffic, self.operation, nbytes, Decision(self.codec, self.reason))

    def _measure(self, x: torch.Tensor) -> None:
        """Let the error meter measure what is encoded, when it is due."""
        site, policy = self.site, self.site.run.policy
        if not policy.measures(site.name, self.traffic):
            return
        assert self.codec is not None
        first, second = self.codec.hops
        codec = {"reduce_scatter": first, "all_gather": second}.get(self.operation, self.codec)
        policy.meter.measure(site.name, self.traffic, x, codec)


def site_name(module_path: str, layer_number: int | None) -> str:
    """``decoder.layers.0.mlp.linear_fc2`` on a later pipeline stage -> its global layer number, one-based
    ``layer_number`` of the transformer layer that holds the module, None outside."""
    if layer_number is None:
        return module_path
    return re.sub(r"layers\.\d+", f"layers.{layer_number - 1}", module_path, count=1)


def layer_name(module_path: str, layer_number: int | None) -> int | str | None:
    """What ``--tp-compression-layers`` calls a module's layer: its number from 0, embedding, output, mtp (any
    layer of multi-token prediction), or None. Arguments are those of ``site_name``."""
    first = module_path.split(".")[0]
    if layer_number is not None and first != "mtp":  # whose layers have numbers of their own
        return layer_number - 1
    return {"embedding": "embedding", "output_layer": "output", "mtp": "mtp"}.get(first)
