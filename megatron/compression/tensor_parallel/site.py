"""A site: one place in the model where tensor parallelism communicates."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec, hop_codecs
from megatron.compression.collectives import (
    CompressedWork,
    TorchTransport,
    all_gather_encoded,
    all_reduce,
    encode_slice,
    fp32_all_reduce,
    reduce_scatter,
    uncompressed_all_gather,
    uncompressed_all_reduce,
    uncompressed_reduce_scatter,
)
from megatron.compression.runtime import Choice, CompressionRuntime
from megatron.compression.tensor_parallel.rounding_keys import draw_key


class TensorParallelSite:
    """The collectives of one layer: chosen, counted, probed, guarded.

    ``compresses`` says whether messages of a size are to be compressed at all. The methods that communicate
    then compress whatever the size, unless their channel goes uncompressed for another reason.

    Args:
        name: the module's path in the model, with its global layer number.
        group: the tensor-parallel process group.
        runtime: settings, ledger, probe and guard.
        layer: what ``--taco-layers`` calls the layer: a number from 0, embedding or output.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        runtime: CompressionRuntime,
        layer: int | str | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.runtime = runtime
        self.layer = layer

    def choose(self, channel: str, message_bytes: int | None = None) -> Choice:
        """Codec or not for a message of a channel now, and why; without a size, whatever its size."""
        return self.runtime.choose_tensor_parallel_codec(self.name, self.layer, channel, message_bytes)

    def compresses(self, message_bytes: int, *channels: str) -> bool:
        """Whether a message of this size is compressed now in one of the channels, tp.forward or tp.backward.

        Args:
            message_bytes: the uncompressed tensor over all ranks (what an all-gather makes, what a
                reduce-scatter takes).
        """
        return any(self.choose(channel, message_bytes).codec is not None for channel in channels)

    def count_uncompressed(self, channel: str, operation: str, message_bytes: int) -> None:
        """Count a collective that megatron-core does itself."""
        self._count(channel, self.choose(channel, message_bytes).kind, operation, message_bytes)

    def all_reduce(
        self, tensor: torch.Tensor, channel: str, out: torch.Tensor | None = None
    ) -> CompressedWork:
        """Start to sum over the group; ``wait`` gives the sum (in ``out`` if given). ``tensor`` stays."""
        return self._sum("all_reduce", all_reduce, uncompressed_all_reduce, tensor, channel, out)

    def all_reduce_uncompressed(self, tensor: torch.Tensor, channel: str) -> CompressedWork:
        """Start to sum over the group without a codec; ``tensor`` may come to hold the sum.

        Gradients (tp.backward) of 16 bits are summed in fp32 and rounded once; they travel as they are.
        """
        kind = self.choose(channel, tensor.nbytes).kind
        if channel == "tp.backward" and tensor.itemsize == 2:
            for operation in ("all_to_all", "all_gather"):
                self._count(channel, kind, operation, tensor.nbytes)
            return fp32_all_reduce(tensor, self.group)
        self._count(channel, kind, "all_reduce", tensor.nbytes)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return CompressedWork(work, lambda: tensor)

    def reduce_scatter(
        self, tensor: torch.Tensor, channel: str, out: torch.Tensor | None = None
    ) -> CompressedWork:
        """Start to sum ``[W * n, ...]``; ``wait`` gives this rank's ``[n, ...]``, in ``out`` if given."""
        return self._sum("reduce_scatter", reduce_scatter, uncompressed_reduce_scatter, tensor, channel, out)

    def all_gather(self, tensor: torch.Tensor, channel: str) -> CompressedWork:
        """Start to gather ``[n, ...]`` of every rank; ``wait`` gives ``[W * n, ...]``."""
        packed = self.pack(tensor, channel)
        work = self.gather(packed, channel)
        if packed.choice.codec is None:
            return work
        return self._probed(work, channel, "all_gather", lambda: tensor, uncompressed_all_gather)

    def pack(self, tensor: torch.Tensor, channel: str) -> "Packed":
        """What ``gather`` sends of this rank's tensor: its payload where the channel is compressed."""
        choice = self.choose(channel)
        if choice.codec is None:
            return Packed(tensor, tensor.shape, tensor.dtype, choice, 0)
        key = self.draw_key()
        wire = encode_slice(tensor, choice.codec, TorchTransport(self.group), key)
        self._guard(channel, tensor, hop_codecs(choice.codec)[1], key)
        return Packed(wire, tensor.shape, tensor.dtype, choice, key)

    def gather(self, packed: "Packed", channel: str) -> CompressedWork:
        """Start to gather what every rank packed; ``wait`` gives ``[W * n, ...]``. It can be gathered again.

        Args:
            packed: from ``pack``, which decided whether it is compressed.
            channel: where it is counted.
        """
        payload, shape, dtype, (codec, kind), key = packed
        plain = torch.Size(shape).numel() * dtype.itemsize * self.group.size()
        if codec is None:
            self._count(channel, kind, "all_gather", plain)
            return uncompressed_all_gather(payload, self.group)
        transport = self._transport(channel, "all_gather", plain)
        return all_gather_encoded(payload, shape, dtype, codec, transport, async_op=True, key=key)

    def _sum(
        self,
        operation: str,
        compressed: Callable[..., CompressedWork],
        uncompressed: Callable[..., CompressedWork],
        tensor: torch.Tensor,
        channel: str,
        out: torch.Tensor | None,
    ) -> CompressedWork:
        """Start an all-reduce or a reduce-scatter, through the codec or without one."""
        codec, kind = self.choose(channel)
        if codec is None:
            self._count(channel, kind, operation, tensor.nbytes)
            return uncompressed(tensor, self.group, out)
        transport, key = self._transport(channel, operation, tensor.nbytes), self.draw_key()
        work = compressed(tensor, codec, transport, async_op=True, key=key, out=out)
        self._guard(channel, tensor, codec if operation == "all_reduce" else hop_codecs(codec)[0], key)
        return self._probed(work, channel, operation, tensor.float, uncompressed)

    def draw_key(self) -> int:
        """Seed for one collective's random rounding; 0 where the codec rounds to nearest."""
        return draw_key() if self.runtime.tensor_parallel_codec.rounds_randomly else 0

    def _count(self, channel: str, kind: str, operation: str, buffer_bytes: int) -> None:
        self.runtime.ledger.record_uncompressed(channel, kind, operation, buffer_bytes, self.group.size())

    def _transport(self, channel: str, operation: str, plain_bytes: int) -> TorchTransport:
        """A counting transport for one compressed collective."""
        ledger = self.runtime.ledger
        ledger.record_plain(channel, operation, plain_bytes, self.group.size())

        def on_send(operation: str, sent: int) -> None:
            ledger.record(channel, "compressed", operation, sent, 0)

        return self.runtime.transports.transport(self.group, on_send)

    def _guard(self, channel: str, tensor: torch.Tensor, codec: Codec, key: int) -> None:
        """Let the error guard measure what is encoded, when it is due."""
        guard, runtime = self.runtime.guard, self.runtime
        if guard is None or runtime.ledger.evaluating:
            return
        if guard.due(self.name, channel, runtime.iteration):
            guard.measure(self.name, channel, tensor, codec, key)

    def _probed(
        self,
        work: CompressedWork,
        channel: str,
        operation: str,
        exact_input: Callable[[], torch.Tensor],
        exact: Callable[[torch.Tensor, dist.ProcessGroup], CompressedWork],
    ) -> CompressedWork:
        """Let the error probe compare the result with the exact one, when it is due."""
        runtime = self.runtime
        if runtime.ledger.evaluating or not runtime.probe.due(self.name, channel, runtime.iteration):
            return work

        def finish() -> torch.Tensor:
            result = work.wait()
            tensor = exact_input()
            full = self.group.size() if operation == "all_gather" else 1
            self._count(channel, "probe", operation, tensor.nbytes * full)
            runtime.probe.observe(self.name, channel, exact(tensor, self.group).wait(), result)
            return result

        return CompressedWork(None, finish, exchanges=work.exchanges)


class Packed(NamedTuple):
    """One rank's part of an all-gather, as it travels."""

    payload: torch.Tensor
    """uint8 ``[1, bytes]``, or the tensor itself where it goes uncompressed."""
    shape: torch.Size
    dtype: torch.dtype
    choice: Choice
    key: int
    """Seed of a randomly rounding codec's numbers."""


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
    """What ``--taco-layers`` calls the layer of a module: its number from 0, embedding, output, or None.

    Args:
        module_path, layer_number: as for ``site_name``.
    """
    if layer_number is not None:
        return layer_number - 1
    return {"embedding": "embedding", "output_layer": "output"}.get(module_path.split(".")[0])
