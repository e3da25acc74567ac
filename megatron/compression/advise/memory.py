"""Bytes that a GPU needs: weights, gradients, optimizer, activations. The peak is on the first stage."""

from megatron.compression.advise.shapes import Layout, Model


def layer_weights(model: Model, layout: Layout) -> float:
    """Of an average layer on one rank, its share of the experts included."""
    sparse = model.expert_layers / model.layers
    own = (
        model.qkv + model.projection + (1 - sparse) * (model.fc1 + model.fc2) + sparse * model.shared_weights
    )
    return own / layout.tensor + sparse * model.expert_weights(model.experts) / layout.expert


def sharded_weights(model: Model, layout: Layout) -> tuple[int, int]:
    """Weights of the fullest rank: those replicated over all data-parallel ranks, and experts'."""
    layers = model.layers // layout.pipeline
    experts = (
        layers * model.expert_layers / model.layers * model.expert_weights(model.experts) / layout.expert
    )
    ends = 1 if model.tied or layout.pipeline > 1 else 2
    dense = layers * layer_weights(model, layout) - experts
    return int(dense + ends * model.vocabulary * model.hidden / layout.tensor), int(experts)


def weights(model: Model, layout: Layout) -> tuple[float, float]:
    """Weights of a rank, and how many of them its optimizer keeps if it is distributed."""
    dense, experts = sharded_weights(model, layout)
    ranks = layout.data * layout.context
    return dense + experts, dense / ranks + experts / (ranks * layout.tensor / layout.expert)


def gigabytes(model: Model, layout: Layout) -> float:
    """Peak of a rank, 10^9 bytes, without what torch and NCCL take for themselves.

    Activations of a layer: Korthikanti et al. 2022 (arXiv 2205.05198), equation 2, without the attention
    matrices, which fused attention does not keep.
    """
    held, sharded = weights(model, layout)
    updated = sharded if layout.distributed_optimizer else held
    # Weight and gradient; fp32 master and two moments.
    state = (4 if layout.bf16_gradients else 6) * held + 12 * updated
    tokens = model.sequence // layout.context * layout.micro_batch
    shares = layout.tensor if layout.sequence_parallel else 1
    width = model.ffn if not model.experts else model.expert_ffn * model.top_k + model.shared_ffn
    inner = (2 * model.heads + 2 * model.groups) * model.head_dim + width * (3 if model.gated else 2)
    layer = tokens * (10 * model.hidden / shares + 2 * inner / layout.tensor) * layout.value_bytes / 2
    if layout.recompute == "full":
        layer = tokens * model.hidden * layout.value_bytes / shares
    stages, layers = layout.pipeline, model.layers // layout.pipeline
    under_way = min(stages, layout.micro_batches) if stages > 1 else 1
    interleaved = 1 + (stages - 1) / (stages * layout.virtual) if layout.virtual > 1 else 1.0
    kept = layer * layers * under_way * interleaved
    if stages == 1:
        kept += tokens * model.vocabulary / layout.tensor * (2 + layout.value_bytes)
    return (state + kept) / 1e9
