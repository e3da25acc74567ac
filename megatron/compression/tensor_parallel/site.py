"""A site: one place in the model where tensor parallelism communicates."""

import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.collectives import (
    CompressedWork,
    TorchTransport,
    all_gather_encoded,
    all_reduce,
    encode_slice,
    reduce_scatter,
)
from megatron.compression.runtime import CompressionRuntime
from megatron.compression.tensor_parallel.rounding_keys import draw_key


class TensorParallelSite:
    """The collectives of one layer: chosen, counted, probed.

    The methods compress whatever the size; ``compresses`` says whether a message should be.

    Args:
        name: the module's path in the model, with its global layer number.
        group: the tensor-parallel process group.
        runtime: settings, ledger and probe.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, runtime: CompressionRuntime) -> None:
        self.name = name
        self.group = group
        self.runtime = runtime

    def compresses(self, message_bytes: int) -> bool:
        """Whether a message of this size is compressed now.

        Args:
            message_bytes: the uncompressed tensor over all ranks (what an all-gather makes, what a
                reduce-scatter takes).
        """
        return self.runtime.choose_tensor_parallel_codec(message_bytes)[0] is not None

    def count_uncompressed(self, channel: str, operation: str, message_bytes: int) -> None:
        """Count a collective that megatron-core does itself."""
        _, kind = self.runtime.choose_tensor_parallel_codec(message_bytes)
        self.runtime.ledger.record_uncompressed(channel, kind, operation, message_bytes, self.group.size())

    def all_reduce(self, tensor: torch.Tensor, channel: str) -> CompressedWork:
        """Start to sum over the group; ``wait`` gives the sum. ``tensor`` is left as it is."""
        codec, transport = self._exchange(channel, "all_reduce", tensor.nbytes)
        work = all_reduce(tensor, codec, transport, async_op=True, key=self.draw_key())

        def exact() -> torch.Tensor:
            total = tensor.to(torch.float32, copy=True)
            dist.all_reduce(total, group=self.group)
            return total

        return self._probed(work, channel, "all_reduce", 4 * tensor.numel(), exact)

    def reduce_scatter(self, tensor: torch.Tensor, channel: str) -> CompressedWork:
        """Start to sum ``[W * n, ...]`` over the group; ``wait`` gives this rank's ``[n, ...]``."""
        codec, transport = self._exchange(channel, "reduce_scatter", tensor.nbytes)
        work = reduce_scatter(tensor, codec, transport, async_op=True, key=self.draw_key())

        def exact() -> torch.Tensor:
            shard = tensor.new_empty(
                (tensor.shape[0] // self.group.size(), *tensor.shape[1:]), dtype=torch.float32
            )
            dist.reduce_scatter_tensor(shard, tensor.float().contiguous(), group=self.group)
            return shard

        return self._probed(work, channel, "reduce_scatter", 4 * tensor.numel(), exact)

    def encode(self, tensor: torch.Tensor, key: int) -> torch.Tensor:
        """This rank's payload for ``all_gather_encoded``, uint8 ``[1, bytes]``."""
        return encode_slice(tensor, self.runtime.tensor_parallel_codec, TorchTransport(self.group), key)

    def draw_key(self) -> int:
        """Seed for one collective's random rounding; 0 where the codec rounds to nearest."""
        return draw_key() if self.runtime.tensor_parallel_codec.rounds_randomly else 0

    def all_gather(self, tensor: torch.Tensor, channel: str) -> CompressedWork:
        """Start to gather ``[n, ...]`` of every rank; ``wait`` gives ``[W * n, ...]``."""
        key = self.draw_key()
        work = self.all_gather_encoded(self.encode(tensor, key), tensor.shape, tensor.dtype, channel, key)

        def exact() -> torch.Tensor:
            full = tensor.new_empty((tensor.shape[0] * self.group.size(), *tensor.shape[1:]))
            dist.all_gather_into_tensor(full, tensor.contiguous(), group=self.group)
            return full

        return self._probed(work, channel, "all_gather", tensor.nbytes * self.group.size(), exact)

    def all_gather_encoded(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, channel: str, key: int
    ) -> CompressedWork:
        """Start to gather what ``encode`` made of a tensor of ``shape`` and ``dtype``."""
        plain = torch.Size(shape).numel() * dtype.itemsize * self.group.size()
        codec, transport = self._exchange(channel, "all_gather", plain)
        return all_gather_encoded(wire, shape, dtype, codec, transport, async_op=True, key=key)

    def _exchange(self, channel: str, operation: str, plain_bytes: int):
        """Codec and a counting transport for one compressed collective."""
        ledger = self.runtime.ledger
        ledger.record_plain(channel, operation, plain_bytes, self.group.size())

        def on_send(operation: str, sent: int) -> None:
            ledger.record(channel, "compressed", operation, sent, 0)

        return self.runtime.tensor_parallel_codec, TorchTransport(self.group, on_send)

    def _probed(
        self,
        work: CompressedWork,
        channel: str,
        operation: str,
        exact_bytes: int,
        exact: Callable[[], torch.Tensor],
    ) -> CompressedWork:
        """Let the error probe compare the result with the exact one, when it is due."""
        runtime = self.runtime
        if runtime.ledger.evaluating or not runtime.probe.due(self.name, channel, runtime.iteration):
            return work

        def finish() -> torch.Tensor:
            result = work.wait()
            runtime.ledger.record_uncompressed(channel, "probe", operation, exact_bytes, self.group.size())
            runtime.probe.observe(self.name, channel, exact(), result)
            return result

        return CompressedWork(None, finish)


def site_name(module_path: str, layer_number: int | None) -> str:
    """``decoder.layers.0.mlp.linear_fc2`` on a later pipeline stage -> its global layer number.

    Args:
        module_path: the path as ``named_modules`` gives it.
        layer_number: one-based global number of the transformer layer that holds the module, None outside.
    """
    if layer_number is None:
        return module_path
    return re.sub(r"layers\.\d+", f"layers.{layer_number - 1}", module_path, count=1)
