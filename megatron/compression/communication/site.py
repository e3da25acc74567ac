"""A communication site: one place in the model where a group of ranks communicates."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication.all_gather import all_gather_encoded, encode_slice
from megatron.compression.communication.all_reduce import all_reduce
from megatron.compression.communication.policy import Decision
from megatron.compression.communication.reduce_scatter import reduce_scatter
from megatron.compression.communication.run import Run
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.uncompressed import (
    fp32_all_reduce,
    uncompressed_all_gather,
    uncompressed_all_reduce,
    uncompressed_reduce_scatter,
)
from megatron.compression.communication.work import Work


class CommSite:
    """The collectives of one layer: decided, counted, probed, bounded in error.

    ``compresses`` says whether messages of a size are to be compressed at all. The methods that communicate
    then compress whatever the size, unless their traffic goes uncompressed for another reason.

    Args:
        name: the module's path in the model, with its global layer number.
        layer: what ``--tp-compression-layers`` calls the layer: a number from 0, embedding or output.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, run: Run, layer: int | str | None = None) -> None:
        self.name, self.group, self.run, self.layer = name, group, run, layer

    def decide(self, traffic: str, nbytes: int | None = None) -> Decision:
        """Codec or not for a message now, and why; without a size, whatever its size."""
        return self.run.policy.decide(traffic, nbytes, self.name, self.layer)

    def compresses(self, nbytes: int, *traffic: str) -> bool:
        """Whether a message of this size is compressed now in one of the traffic classes.

        Args:
            nbytes: the uncompressed tensor over all ranks (what an all-gather makes, what a reduce-scatter
                takes).
        """
        return any(self.decide(one, nbytes).codec is not None for one in traffic)

    def uncompressed(self, nbytes: int) -> "CommSite":
        """This site where it compresses nothing, for the reason that a message of this size has."""
        return _UncompressedSite(self, nbytes)

    def count_uncompressed(self, traffic: str, operation: str, nbytes: int, why: str | None = None) -> None:
        """Count a collective that megatron-core or Transformer Engine does itself.

        Args:
            why: one of the ledger's kinds; by default what the policy says of such a message.
        """
        self._count(traffic, why or self.decide(traffic, nbytes).why, operation, nbytes)

    def all_reduce(self, tensor: torch.Tensor, traffic: str, out: torch.Tensor | None = None) -> Work:
        """Start to sum over the group; ``wait`` gives the sum (in ``out`` if given). ``tensor`` stays."""
        return self._sum("all_reduce", all_reduce, uncompressed_all_reduce, tensor, traffic, out)

    def all_reduce_uncompressed(self, tensor: torch.Tensor, traffic: str) -> Work:
        """Start to sum over the group without a codec; ``tensor`` may come to hold the sum.

        Gradients (tp.backward) of 16 bits are summed in fp32 and rounded once; they travel as they are.
        """
        why = self.decide(traffic, tensor.nbytes).why
        if traffic == "tp.backward" and tensor.itemsize == 2:
            for operation in ("all_to_all", "all_gather"):
                self._count(traffic, why, operation, tensor.nbytes)
            return fp32_all_reduce(tensor, self.group)
        self._count(traffic, why, "all_reduce", tensor.nbytes)
        pending = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Work(pending, lambda: tensor)

    def reduce_scatter(self, tensor: torch.Tensor, traffic: str, out: torch.Tensor | None = None) -> Work:
        """Start to sum ``[W * n, ...]``; ``wait`` gives this rank's ``[n, ...]``, in ``out`` if given."""
        return self._sum("reduce_scatter", reduce_scatter, uncompressed_reduce_scatter, tensor, traffic, out)

    def all_gather(self, tensor: torch.Tensor, traffic: str, out: torch.Tensor | None = None) -> Work:
        """Gather ``[n, ...]`` of every rank; ``wait`` gives ``[W * n, ...]`` (in ``out`` if given)."""
        packed = self.pack(tensor, traffic)
        work = self.gather(packed, traffic, out)
        if packed.decision.codec is None:
            return work
        return self._probed(work, traffic, "all_gather", lambda: tensor, uncompressed_all_gather)

    def pack(self, tensor: torch.Tensor, traffic: str) -> "Packed":
        """What ``gather`` sends of this rank's tensor: its payload where the traffic is compressed."""
        decision = self.decide(traffic)
        if decision.codec is None:
            return Packed(tensor, tensor.shape, tensor.dtype, decision)
        self._measure(traffic, tensor, decision.codec.hops[1])
        codec, payload = encode_slice(tensor, decision.codec, self._transport(traffic))
        return Packed(payload, tensor.shape, tensor.dtype, Decision(codec, decision.why))

    def gather(self, packed: "Packed", traffic: str, out: torch.Tensor | None = None) -> Work:
        """Start to gather what every rank packed; ``wait`` gives ``[W * n, ...]``. It can be repeated."""
        payload, shape, dtype, (codec, why) = packed
        plain = torch.Size(shape).numel() * dtype.itemsize * self.group.size()
        if codec is None:
            self._count(traffic, why, "all_gather", plain)
            return uncompressed_all_gather(payload, self.group, out)
        self._count_plain(traffic, "all_gather", plain)
        return all_gather_encoded(payload, shape, dtype, codec, self._transport(traffic), out)

    def _sum(
        self,
        operation: str,
        compressed: Callable[..., Work],
        uncompressed: Callable[..., Work],
        tensor: torch.Tensor,
        traffic: str,
        out: torch.Tensor | None,
    ) -> Work:
        """Start an all-reduce or a reduce-scatter, through the codec or without one."""
        codec, why = self.decide(traffic)
        if codec is None:
            self._count(traffic, why, operation, tensor.nbytes)
            return uncompressed(tensor, self.group, out)
        self._count_plain(traffic, operation, tensor.nbytes)
        work = compressed(tensor, codec, self._transport(traffic), out=out)
        self._measure(traffic, tensor, codec if operation == "all_reduce" else codec.hops[0])
        return self._probed(work, traffic, operation, tensor.float, uncompressed)

    def _count(self, traffic: str, why: str, operation: str, nbytes: int) -> None:
        self.run.ledger.record_uncompressed(traffic, why, operation, nbytes, self.group.size())

    def _count_plain(self, traffic: str, operation: str, nbytes: int) -> None:
        self.run.ledger.record_plain(traffic, operation, nbytes, self.group.size())

    def _transport(self, traffic: str, fused: bool = True) -> TorchTransport:
        """A transport that counts what is sent; see ``Transports.transport``."""
        ledger = self.run.ledger

        def on_send(operation: str, sent: int) -> None:
            ledger.record(traffic, "compressed", operation, sent, 0)

        return self.run.transports.transport(self.group, on_send, fused)

    def _measure(self, traffic: str, tensor: torch.Tensor, codec: Codec) -> None:
        """Let the error bound measure what is encoded, when it is due."""
        bound, policy = self.run.policy.error_bound, self.run.policy
        if bound is None or self.run.ledger.evaluating or codec.lossless:
            return
        if bound.due(self.name, traffic, policy.iteration()):
            bound.measure(self.name, traffic, tensor, codec)

    def _probed(
        self, work: Work, traffic: str, operation: str, exact_input: Callable, exact: Callable[..., Work]
    ) -> Work:
        """Let the error probe compare the result with the exact one, when it is due."""
        run = self.run
        if run.ledger.evaluating or not run.probe.due(self.name, traffic, run.policy.iteration()):
            return work

        def compare(result: torch.Tensor) -> torch.Tensor:
            tensor = exact_input()
            full = self.group.size() if operation == "all_gather" else 1
            self._count(traffic, "probe", operation, tensor.nbytes * full)
            run.probe.observe(self.name, traffic, exact(tensor, self.group).wait(), result)
            return result

        return work.then(compare)


class _UncompressedSite(CommSite):
    """See ``CommSite.uncompressed``."""

    def __init__(self, site: CommSite, nbytes: int) -> None:
        super().__init__(site.name, site.group, site.run, site.layer)
        self.nbytes = nbytes

    def decide(self, traffic: str, nbytes: int | None = None) -> Decision:
        """Never a codec."""
        return Decision(None, super().decide(traffic, self.nbytes).why)


class Packed(NamedTuple):
    """One rank's part of an all-gather, as it travels."""

    payload: torch.Tensor
    """uint8 ``[1, bytes]``, or the tensor itself where it goes uncompressed."""
    shape: torch.Size
    dtype: torch.dtype
    decision: Decision


def site_name(module_path: str, layer_number: int | None) -> str:
    """``decoder.layers.0.mlp.linear_fc2`` on a later pipeline stage -> its global layer number.

    Args:
        module_path: the path as ``named_modules`` gives it.
        layer_number: one-based global number of the transformer layer that holds the module, None outside.
    """
    if layer_number is None:
        return module_path
    return re.sub(r"layers\.\d+", f"layers.{layer_number - 1}", module_path, count=1)


def layer_name(module_path: str, layer_number: int | None) -> int | str | None:
    """What ``--tp-compression-layers`` calls the layer of a module: its number from 0, embedding, output, or
    None.

    Args:
        module_path, layer_number: as for ``site_name``.
    """
    if layer_number is not None:
        return layer_number - 1
    return {"embedding": "embedding", "output_layer": "output"}.get(module_path.split(".")[0])
