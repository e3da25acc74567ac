"""A site: one place in the model where tensor parallelism communicates."""

import re

import torch
import torch.distributed as dist

from megatron.compression.collectives import TorchTransport, all_reduce
from megatron.compression.runtime import CompressionRuntime


class TensorParallelSite:
    """The all-reduces of one layer, compressed or not, counted either way.

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
        """Whether a message of this size is compressed now."""
        return self.runtime.choose_tensor_parallel_codec(message_bytes)[0] is not None

    def count_uncompressed(self, channel: str, message_bytes: int) -> None:
        """Count an all-reduce that megatron-core does itself."""
        _, kind = self.runtime.choose_tensor_parallel_codec(message_bytes)
        self.runtime.ledger.record_uncompressed(channel, kind, "all_reduce", message_bytes, self.group.size())

    def compressed_all_reduce(self, tensor: torch.Tensor, channel: str) -> torch.Tensor:
        """Sum over the group through the codec, whatever the size.

        Args:
            tensor: any shape; left as it is.
            channel: ``tp.forward`` or ``tp.backward``.
        """
        runtime, world_size = self.runtime, self.group.size()
        codec = runtime.tensor_parallel_codec

        def on_send(operation: str, sent: int) -> None:
            runtime.ledger.record(channel, "compressed", operation, sent, 0)

        runtime.ledger.record_plain(channel, "all_reduce", tensor.nbytes, world_size)
        result = all_reduce(tensor, codec, TorchTransport(self.group, on_send))
        if not runtime.ledger.evaluating and runtime.probe.due(self.name, channel, runtime.iteration):
            exact = tensor.to(torch.float32, copy=True)
            dist.all_reduce(exact, group=self.group)
            runtime.ledger.record_uncompressed(channel, "probe", "all_reduce", exact.nbytes, world_size)
            runtime.probe.observe(self.name, channel, exact, result)
        return result


def site_name(module_path: str, layer_number: int | None) -> str:
    """``decoder.layers.0.mlp.linear_fc2`` on a later pipeline stage -> its global layer number.

    Args:
        module_path: the path as ``named_modules`` gives it.
        layer_number: one-based global number of the transformer layer that holds the module, None outside.
    """
    if layer_number is None:
        return module_path
    return re.sub(r"layers\.\d+", f"layers.{layer_number - 1}", module_path, count=1)
