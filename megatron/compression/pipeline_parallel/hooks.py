"""Puts the exchange between pipeline stages into a run."""

from functools import partial

from megatron.compression import patches
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy
from megatron.compression.pipeline_parallel.exchange import PipelineExchange


def attach(policy: Policy, ledger: Ledger) -> PipelineExchange:
    """Have every schedule send through a ``PipelineExchange``, which only counts where nothing is compressed.

    Args:
        ledger: counts them, and under pp.other the sum of tied embeddings' gradients.
    """
    exchange = PipelineExchange(policy, ledger)
    patches.through_pipeline_exchange(exchange)
    patches.after_schedules(exchange.finish)
    patches.on_tied_embedding_gradient_sync(
        partial(ledger.record_uncompressed, "pp.other", "exact", "all_reduce")
    )
    return exchange
