"""Puts the exchange between pipeline stages into a run."""

from typing import Any

import torch

from megatron.compression.communication.site import Run
from megatron.compression.dimension import Dimension
from megatron.compression.patches import communication, running
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.pipeline_parallel.exchange import PipelineExchange


class PipelineParallel(Dimension):
    """Has every schedule of the run's model send through a ``PipelineExchange``, which only counts
    where nothing is compressed. The sum of tied embeddings' gradients counts under pp.other."""

    def __init__(self, config: PipelineParallelConfig, run: Run, *arguments: Any) -> None:
        super().__init__(config, run, *arguments)
        self.exchange = PipelineExchange(run)
        run.pipeline_exchange = self.exchange

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        running.claim(chunks, self.run)
        communication.through_pipeline_exchange()
        communication.count_tied_embedding_gradient_syncs()
