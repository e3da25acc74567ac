"""Puts the exchange between pipeline stages into a run."""

from functools import partial
from typing import Any

from megatron.compression.communication.site import Run
from megatron.compression.dimension import Dimension
from megatron.compression.patches import communication
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.pipeline_parallel.exchange import PipelineExchange


class PipelineParallel(Dimension):
    """Has every schedule send through a ``PipelineExchange``, which only counts where nothing is compressed.
    The sum of tied embeddings' gradients counts under pp.other."""

    def __init__(self, config: PipelineParallelConfig, run: Run, *more: Any) -> None:
        super().__init__(config, run, *more)
        self.exchange = PipelineExchange(run.policy, run.ledger)
        communication.through_pipeline_exchange(self.exchange)
        communication.after_schedules(self.exchange.finish)
        communication.on_tied_embedding_gradient_sync(
            partial(run.ledger.record_uncompressed, "pp.other", "exact", "all_reduce")
        )
