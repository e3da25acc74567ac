"""What a GPU computes for one micro-batch, and what tensor parallelism sends meanwhile."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.compression.advise import memory
from megatron.compression.advise.cluster import Constants
from megatron.compression.advise.shapes import Layout, Model

# Accesses of a value in device memory, forward and backward, counted in the layers' operations.
RESIDUAL = 22.0  # two norms, two residual additions with bias
INNER = 6.0  # queries, keys, values and attention's output: layouts, positions
ACTIVATION = 8.0  # bias and activation function of the MLP
ROUTED = 14.0  # a token's copies for experts: sorted before and behind each all-to-all, weighted, added up
LOGITS_BYTES = 40.0  # of the vocabulary-parallel cross entropy, fp32
ADDED_BYTES = 10.0  # a 16-bit gradient read, an fp32 main_grad read and written


@dataclass(frozen=True)
class Work:
    """Milliseconds of one micro-batch."""

    forward: float
    backward: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Message(NamedTuple):
    """A collective of tensor parallelism, over ``sequence / context * micro_batch * hidden`` values."""

    traffic: str
    operation: str
    behind: float = 0.0
    """Milliseconds of GEMMs that can run meanwhile."""
    deferred: float = 0.0
    """Further ones where our layers compress: the row-parallel layer's weight gradient waits for it."""


def tokens_of(model: Model, layout: Layout) -> int:
    """Tokens of a micro-batch on one context-parallel rank."""
    return model.sequence // layout.context * layout.micro_batch


def sparse_layers(model: Model, layout: Layout) -> float:
    """Layers of a pipeline rank whose MLP is experts."""
    return model.expert_layers / layout.pipeline


def layers_work(model: Model, layout: Layout, constants: Constants) -> Work:
    """All transformer layers of one pipeline rank."""
    tokens, layers, sparse = (
        tokens_of(model, layout),
        model.layers // layout.pipeline,
        sparse_layers(model, layout),
    )
    split = layout.tensor if layout.sequence_parallel else 1
    dense = layers * (model.qkv + model.projection) + (layers - sparse) * (model.fc1 + model.fc2)
    routed = sparse * (model.expert_weights(model.top_k) + model.shared_weights)
    product = gemm_ms(model, layout, constants, dense / layout.tensor + routed / split)
    scores = 2 * tokens * model.sequence * model.heads * model.head_dim / layout.tensor  # the causal half
    attention = scores / constants.attention_tflops / 1e9 * layers
    width = (layers - sparse) * model.ffn / layout.tensor
    width += sparse * (model.expert_ffn * model.top_k + model.shared_ffn) / split
    accesses = RESIDUAL * model.hidden / split * layers
    accesses += INNER * 2 * (model.heads + model.groups) * model.head_dim / layout.tensor * layers
    accesses += ACTIVATION * width * (1.5 if model.gated else 1)
    accesses += ROUTED * model.top_k * model.hidden / split * sparse
    moved = elementwise_ms(constants, tokens * accesses * layout.value_bytes)
    added = added_ms(model, layout, constants, memory.layer_weights(model, layout) * layers)
    forward = product + attention + moved / 3
    again = {"none": 0.0, "selective": attention, "full": forward}[layout.recompute]
    return Work(forward, 2 * product + 2.5 * attention + moved * 2 / 3 + added + again)


def embedding_work(model: Model, layout: Layout, constants: Constants) -> Work:
    """The embedding's rows, once forward, twice backward."""
    moved = elementwise_ms(constants, 2 * tokens_of(model, layout) * model.hidden * layout.value_bytes)
    return Work(moved, 2 * moved)


def output_work(model: Model, layout: Layout, constants: Constants) -> Work:
    """The output layer and the loss."""
    rows = model.vocabulary / layout.tensor
    product = gemm_ms(model, layout, constants, rows * model.hidden)
    loss = elementwise_ms(constants, tokens_of(model, layout) * rows * LOGITS_BYTES)
    return Work(product + loss / 2, 2 * product + loss / 2)


def gemm_ms(model: Model, layout: Layout, constants: Constants, weights: float) -> float:
    """One product of a micro-batch with so many of this rank's weights."""
    return 2 * tokens_of(model, layout) * weights / constants.gemm_tflops / 1e9


def elementwise_ms(constants: Constants, nbytes: float) -> float:
    """Operations that are bound by memory."""
    return nbytes / constants.elementwise_gbps / 1e6


def added_ms(model: Model, layout: Layout, constants: Constants, weights: float) -> float:
    """Adding gradients to main_grad, where that is not part of their product."""
    return 0.0 if layout.fused_gradients else elementwise_ms(constants, ADDED_BYTES * weights)


def messages(model: Model, layout: Layout, constants: Constants) -> dict[str, list[Message]]:
    """What one micro-batch sends: in a ``layer``, in the ``attention`` of one whose MLP is experts, for the
    ``embedding`` and the ``output`` layer."""
    if layout.tensor == 1:
        return {}
    sequence = layout.sequence_parallel

    def column(weights: int, before: int) -> list[Message]:
        """A column-parallel layer; ``before``: of the row-parallel one before it in the backward."""
        own = gemm_ms(model, layout, constants, weights / layout.tensor)
        deferred = gemm_ms(model, layout, constants, before / layout.tensor)
        deferred += added_ms(model, layout, constants, (weights + before) / layout.tensor)
        if not sequence:
            return [Message("tp.backward", "all_reduce", own, deferred)]
        return [
            Message("tp.forward", "all_gather"),
            Message("tp.backward", "all_gather", own),
            Message("tp.backward", "reduce_scatter", own, deferred),
        ]

    row = [Message("tp.forward", "reduce_scatter"), Message("tp.backward", "all_gather")]
    if not sequence:
        row = [Message("tp.forward", "all_reduce")]
    # learned positions are added before the sequence is split
    embedding = [row[0] if model.rope else Message("tp.forward", "all_reduce"), *row[1:]]
    attention = column(model.qkv, model.projection) + row
    return {
        "layer": attention + column(model.fc1, model.fc2) + row,
        "attention": attention,
        "embedding": embedding,
        "output": column(model.vocabulary * model.hidden, 0),
    }
