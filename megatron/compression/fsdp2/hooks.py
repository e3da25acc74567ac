"""Puts compression into a run under Megatron's ``--use-torch-fsdp2``."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import TorchFullyShardedDataParallel

from megatron.compression.communication.topology import find_topology
from megatron.compression.data_parallel.config import check_memory
from megatron.compression.data_parallel.hooks import Gradients
from megatron.compression.fsdp2.attach import Fsdp2Compression


class DataParallel(Gradients):
    """Gradients and weights of one run, under Megatron's DDP or torch's FSDP2."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fsdp2: list[Fsdp2Compression] = []
        """One for each chunk under FSDP2."""

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Attach wrapped chunks; those under FSDP2 are followed, uncompressed too. Collective."""
        for chunk in chunks:
            if isinstance(chunk, TorchFullyShardedDataParallel):
                self.fsdp2.append(self._attach_sharded(chunk))
        super().attach_wrapped(chunks)

    def _attach_sharded(self, chunk: TorchFullyShardedDataParallel) -> Fsdp2Compression:
        check_memory(self.compressor, chunk.config)
        topology_of = self.topology if self.config.enabled else find_topology
        cut = self.cut(chunk.module, chunk.process_group.size())
        is_copy = partial(_is_replicated, cut=cut)
        return Fsdp2Compression(chunk.module, self.run, topology_of, self.log, is_copy)

    def close(self) -> None:
        """Give chunks under FSDP2 back to it; under DDP what has no rule is Megatron's own."""
        for compression in self.fsdp2:
            compression.close()

    def _attach_replicas(self, chunks: list[torch.nn.Module]) -> None:
        if not self.fsdp2:
            super()._attach_replicas(chunks)


def _is_replicated(parameter: torch.nn.Parameter, cut: Collection[torch.nn.Parameter]) -> bool:
    """Return whether every tensor-parallel rank holds a parameter in whole; ``cut`` lack Megatron's
    mark.

    Context-parallel ranks are in FSDP's own mesh; there are no pipeline stages and no experts
    beside it.
    """
    if parallel_state.get_tensor_model_parallel_world_size() == 1 or parameter in cut:
        return False
    return not getattr(parameter, "tensor_model_parallel", False)
