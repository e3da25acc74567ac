"""An iteration's time by phase, from a model's shape, its layout, a cluster and what is compressed.

The formulas are in docs/cost_model.md. Milliseconds throughout; bytes are those that one rank sends.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.compression.advise import collectives, memory
from megatron.compression.advise.cluster import Cluster, Group
from megatron.compression.advise.collectives import Cost
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.codecs import Codec
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import InputError

PHASES = ("compute", "optimizer", "bubble", "TP", "PP", "DP", "EP", "CP", "codecs", "other")
"""What an iteration's time is made of: work, then communication that nothing hides."""

BUCKET = 40_000_000
"""Values of a bucket of Megatron's DDP, at least; 10^6 for each data-parallel rank beyond."""
# Accesses of a value in device memory, forward and backward, counted in the layers' operations.
RESIDUAL = 22.0  # two norms, two residual additions with bias
INNER = 6.0  # queries, keys, values and attention's output: layouts, positions
ACTIVATION = 8.0  # bias and activation function of the MLP
LOGITS_BYTES = 40.0  # of the vocabulary-parallel cross entropy, fp32


@dataclass(frozen=True)
class Prediction:
    """Of one setting."""

    phases: dict[str, float]
    """Milliseconds by ``PHASES``; they add up to the iteration."""
    hidden: dict[str, float]
    """Milliseconds of communication that run behind work, by dimension."""
    sent: dict[str, float]
    """Bytes that a rank sends in an iteration, by the ledger's traffic class; of the slowest stage."""
    memory_gb: float

    @property
    def milliseconds(self) -> float:
        return sum(self.phases.values())


class Message(NamedTuple):
    """A collective of tensor parallelism in one micro-batch."""

    traffic: str
    operation: str
    behind: float = 0.0
    """Milliseconds of GEMMs that can run meanwhile."""
    behind_more: float = 0.0
    """Further ones where our layers defer the weight gradient before."""


@dataclass(frozen=True)
class _Work:
    """Of one micro-batch in one stage, forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "_Work":
        return _Work(self.forward * times, self.backward * times)


def tensor_parallel_messages(
    model: Model, layout: Layout, gemm: float = 0.0, added: float = 0.0
) -> dict[str, list[Message]]:
    """What one micro-batch sends: by ``layer``, ``attention`` (a layer whose MLP is experts), ``embedding``
    and ``output``.

    Every message is of the whole sequence, ``sequence / context * micro_batch * hidden`` values.

    Args:
        gemm: milliseconds that a product with one of the model's weights takes for the micro-batch's tokens.
        added: milliseconds of adding one weight's gradient to main_grad, apart from its product.
    """
    tied = dict.fromkeys(("layer", "attention", "embedding", "output"))
    if layout.tensor == 1:
        return {name: [] for name in tied}

    def pair(column: int, row: int) -> list[Message]:
        """A column-parallel layer and the row-parallel one behind it."""
        own, deferred = gemm * column, gemm * row + added * (column + row)
        if not layout.sequence_parallel:
            return [
                Message("tp.forward", "all_reduce"),
                Message("tp.backward", "all_reduce", own, deferred),
            ]
        return [
            Message("tp.forward", "all_gather"),
            Message("tp.forward", "reduce_scatter"),
            Message("tp.backward", "all_gather"),
            Message("tp.backward", "all_gather", own),
            Message("tp.backward", "reduce_scatter", own, deferred),
        ]

    attention = pair(model.qkv, model.projection)
    output = [one for one in pair(model.vocabulary * model.hidden, 0) if _of_column(one)]
    embedding = [Message("tp.forward", "all_reduce")]
    if layout.sequence_parallel:
        embedding = [Message("tp.forward", "reduce_scatter" if model.rope else "all_reduce")]
        embedding.append(Message("tp.backward", "all_gather"))
    return {
        "layer": attention + pair(model.fc1, model.fc2),
        "attention": attention,
        "embedding": embedding,
        "output": output,
    }


def _of_column(message: Message) -> bool:
    forward = message.traffic == "tp.forward"
    if message.operation == "all_gather":
        return forward or message.behind > 0 or message.behind_more > 0
    return not forward


def predict(
    model: Model, layout: Layout, cluster: Cluster, config: CompressionConfig | None = None
) -> Prediction:
    """The iteration of one setting.

    Args:
        config: what is compressed; None: nothing.
    Raises: InputError: an impossible layout, one of other GPUs than the cluster's, or a compressor whose
        bytes depend on the values.
    """
    layout.check(model)
    if layout.gpus != cluster.gpus:
        raise InputError(f"the layout takes {layout.gpus} GPUs, --gpus says {cluster.gpus}")
    return _Iteration(model, layout, cluster, config or CompressionConfig()).prediction()


class _Iteration:
    """The sums of one prediction."""

    def __init__(self, model: Model, layout: Layout, cluster: Cluster, config: CompressionConfig) -> None:
        self.model, self.layout, self.cluster, self.config = model, layout, cluster, config
        self.constants = cluster.constants
        self.tokens = model.sequence // layout.context * layout.micro_batch
        self.phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.hidden: dict[str, float] = defaultdict(float)
        self.sent: dict[str, float] = defaultdict(float)

    def prediction(self) -> Prediction:
        """Everything."""
        layout, stages = self.layout, self.layout.pipeline * self.layout.virtual
        layers = self.model.layers // layout.pipeline
        rounds = layout.micro_batches
        body = self._layers(layers)
        ends = self._end("embedding"), self._end("output")
        if layout.pipeline == 1:
            works = [body + ends[0] + ends[1]]
        else:
            works = [body + ends[0], *[body] * (layout.pipeline - 2), body + ends[1]]
        loads = [work.forward + work.backward for work in works]
        slow = loads.index(max(loads))
        exchanges = self._tensor_parallel(layers, slow) + self._experts(layers) + self._context(layers)
        self._spread(exchanges, rounds)
        own = max(loads)
        self.phases["compute"] = rounds * own
        each = own + sum(cost for _, cost in exchanges)
        others = [load + each - own for place, load in enumerate(loads) if place != slow]
        self._pipeline(rounds, each, others, stages)
        self._data_parallel(works[slow], each / own if own else 1.0)
        weights, shard = memory.weights(self.model, layout)
        updated = shard if layout.distributed_optimizer else weights
        self.phases["optimizer"] = (30 * updated + 10 * weights) / self.constants.memory_gbps / 1e6
        self.phases["other"] += self.constants.iteration_ms
        gigabytes = memory.gigabytes(self.model, layout)
        return Prediction(self.phases, dict(self.hidden), dict(self.sent), gigabytes)

    # Work

    def _gemm(self, weights: float) -> float:
        """One product with so many of this rank's weights."""
        return 2 * self.tokens * weights / self.constants.gemm_tflops / 1e9

    def _elementwise(self, nbytes: float) -> float:
        return nbytes / self.constants.elementwise_gbps / 1e6

    def _layers(self, layers: int) -> _Work:
        model, layout, tokens = self.model, self.layout, self.tokens
        sparse = model.expert_layers * layers / model.layers
        weights = layers * (model.qkv + model.projection) + (layers - sparse) * (model.fc1 + model.fc2)
        weights = weights / layout.tensor
        # Experts: each token is computed top_k times, on this GPU or another.
        routed = sparse * (model.expert_weights(model.top_k) + model.shared_weights)
        weights += routed / (layout.tensor if layout.sequence_parallel else 1)
        product = self._gemm(weights)
        values = model.sequence * model.heads * model.head_dim / layout.tensor
        attention = 4 * tokens * values / 2 / self.constants.attention_tflops / 1e9 * layers
        width = model.ffn if not sparse else model.expert_ffn * model.top_k + model.shared_ffn
        inner = INNER * (model.heads * 2 + 2 * model.groups) * model.head_dim
        inner += ACTIVATION * width * (1.5 if model.gated else 1)
        outer = RESIDUAL * model.hidden / (layout.tensor if layout.sequence_parallel else 1)
        nbytes = tokens * layers * (outer + inner / layout.tensor) * layout.value_bytes
        added = 0.0 if layout.fused_gradients else 10 * memory.layer_weights(model, layout) * layers
        forward = product + attention + self._elementwise(nbytes / 3)
        backward = 2 * product + 2.5 * attention + self._elementwise(nbytes * 2 / 3 + added)
        again = {"none": 0.0, "selective": attention, "full": forward}[layout.recompute]
        return _Work(forward, backward + again)

    def _end(self, which: str) -> _Work:
        """The embedding, or the output layer with the loss."""
        rows = self.model.vocabulary / self.layout.tensor
        if which == "embedding":
            shard = self.tokens * self.model.hidden * self.layout.value_bytes
            return _Work(self._elementwise(2 * shard), self._elementwise(4 * shard))
        product = self._gemm(rows * self.model.hidden)
        loss = self._elementwise(self.tokens * rows * LOGITS_BYTES)
        return _Work(product + loss / 2, 2 * product + loss / 2)

    # Communication inside a micro-batch: (dimension, exposed milliseconds) of each

    def _tensor_parallel(self, layers: int, stage: int) -> list[tuple[str, float]]:
        model, layout = self.model, self.layout
        added = 0.0 if layout.fused_gradients else self._elementwise(10) / layout.tensor
        parts = tensor_parallel_messages(model, layout, self._gemm(1) / layout.tensor, added)
        sparse = model.expert_layers * layers / model.layers
        first, last = stage == 0, stage == layout.pipeline - 1
        counts = {"layer": layers - sparse, "attention": sparse, "embedding": first, "output": last}
        group = self.cluster.group(layout.tensor, 1)
        settings = self.config.tensor_parallel
        codecs = {"tp.forward": settings.forward_codec, "tp.backward": settings.backward_codec}
        values, results = self.tokens * model.hidden, []
        for part, messages in parts.items():
            for message in messages:
                codec = codecs[message.traffic]
                small = values * layout.value_bytes < settings.min_mb * 2**20
                count = float(counts[part])
                if layout.recompute == "full" and message.traffic == "tp.forward" and part != "output":
                    count *= 2
                if codec is None or small or model.experts:
                    nbytes = values * layout.value_bytes
                    cost = collectives.uncompressed(group, message.operation, nbytes, layout.communicators)
                    behind = message.behind
                else:
                    share = self.config.communicators
                    cost = collectives.compressed(
                        group, message.operation, values, codec, share, layout.value_bytes
                    )
                    behind = message.behind + message.behind_more
                results += self._behind(group, message.traffic, cost, behind, count, settings.chunks)
        return results

    def _behind(
        self, group: Group, traffic: str, cost: Cost, behind: float, count: float, chunks: int = 1
    ) -> list[tuple[str, float]]:
        """Exposed time of ``count`` such messages a micro-batch, with so much work to run behind."""
        dimension = traffic[:2].upper()
        self.sent[traffic] += cost.sent * count * self.layout.micro_batches
        if not cost.overlaps:
            return [(dimension, cost.link * count)]
        kernels, hides = cost.kernels, min(cost.link, behind)
        if chunks > 1 and cost.kernels:
            # a piece's kernels and its GEMM run behind the other piece's exchange
            kernels, hides = kernels / chunks, min(cost.link, hides + kernels * (1 - 1 / chunks))
        self.hidden[dimension] += hides * count * self.layout.micro_batches
        exposed = cost.link - hides * (1 - group.slowest.overlap_loss)
        return [(dimension, exposed * count), ("codecs", kernels * count)]

    def _experts(self, layers: int) -> list[tuple[str, float]]:
        """Dispatch and combine, forward and backward: four all-to-alls in each layer, nothing behind them."""
        model, layout = self.model, self.layout
        if not model.experts or layout.expert == 1:
            return []
        sparse = model.expert_layers * layers / model.layers
        own = self.tokens // (layout.tensor if layout.sequence_parallel else 1)
        group = self.cluster.group(layout.expert, layout.tensor * layout.context)
        nbytes = own * model.top_k * model.hidden * layout.value_bytes
        cost = collectives.uncompressed(group, "all_to_all", nbytes)
        forwards = 4 if layout.recompute == "full" else 2
        exposed = self._behind(group, "ep.forward", cost, 0, forwards * sparse)
        return exposed + self._behind(group, "ep.backward", cost, 0, 2 * sparse)

    def _context(self, layers: int) -> list[tuple[str, float]]:
        """Keys and values of every layer are gathered, their gradients scattered. Transformer Engine passes
        them round a ring behind the attention."""
        model, layout = self.model, self.layout
        if layout.context == 1:
            return []
        group = self.cluster.group(layout.context, layout.tensor)
        kept = 2 * model.groups * model.head_dim / min(layout.tensor, model.groups)
        nbytes = int(self.tokens * layout.context * kept * layout.value_bytes)
        work = self._layers(1)
        results = []
        for traffic, operation, behind in (
            ("cp.forward", "all_gather", work.forward / 4),
            ("cp.backward", "reduce_scatter", work.backward / 4),
        ):
            cost = collectives.uncompressed(group, operation, nbytes)
            results += self._behind(group, traffic, cost, behind * layout.transformer_engine, layers)
        return results

    def _spread(self, exchanges: list[tuple[str, float]], rounds: int) -> None:
        for dimension, exposed in exchanges:
            self.phases[dimension] += exposed * rounds

    # The schedule

    def _pipeline(self, rounds: int, each: float, others: list[float], stages: int) -> None:
        """1F1B. Uncompressed sends are waited for, so a stage's step holds both its messages. Payloads are not,
        but only as many micro-batches are under way as there are stages."""
        layout, ranks = self.layout, self.layout.pipeline
        if ranks == 1:
            return
        settings = self.config.pipeline_parallel
        stride = layout.tensor * layout.data * layout.context
        crosses = ranks * stride > self.cluster.gpus_per_node
        group = self.cluster.group(2, self.cluster.gpus_per_node if crosses else 1)
        tokens = model_tokens(self.model, layout)
        shape = (tokens, layout.micro_batch, self.model.hidden)
        codecs: list[tuple[str, Codec | None]] = [
            ("pp.forward", settings.forward_codec),
            ("pp.backward", settings.backward_codec),
        ]
        costs = [collectives.message(group, shape, layout.value_bytes, codec) for _, codec in codecs]
        boundaries = (stages - 1) / ranks
        for (traffic, _), cost in zip(codecs, costs, strict=True):
            self.sent[traffic] += cost.sent * rounds * boundaries
        kernels = sum(cost.kernels for cost in costs) * layout.virtual
        links = sum(cost.link for cost in costs)
        step, rest = each + kernels, [one + kernels for one in others]
        waits = all(codec is None for _, codec in codecs)
        if layout.virtual > 1:  # interleaved: messages overlap with the other chunks
            steady = max(step, links * layout.virtual)
        elif waits:
            steady = step + links
        else:
            steady = max(step, (step + sum(rest) + 2 * (ranks - 1) * links / 2) / ranks)
        fill = sum(one / layout.virtual + links for one in rest)
        self.phases["codecs"] += kernels * rounds
        self.phases["PP"] += (steady - step) * rounds + links * len(rest)
        self.hidden["PP"] += max(0.0, links * layout.virtual - (steady - step)) * rounds
        self.phases["bubble"] += fill - links * len(rest)

    def _data_parallel(self, work: _Work, slower: float) -> None:
        """Gradients run behind the last micro-batch's backward, weights behind the first one's forward."""
        layout, config = self.layout, self.config.data_parallel
        ranks = layout.data * layout.context
        if ranks == 1:
            return
        compressor, weight_codec = config.compressor, config.weight_codec
        if compressor is not None and not hasattr(compressor, "codec"):
            raise InputError(
                f"--dp-compression {config.compression} is not modelled: its bytes depend on the values"
            )
        gradient_bytes = 2 if layout.bf16_gradients or not layout.bf16 else 4
        sums = "reduce_scatter" if layout.distributed_optimizer else "all_reduce"
        dense, experts = memory.sharded_weights(self.model, layout)
        for values, group in (
            (dense, self._replicas(ranks, layout.tensor)),
            (experts, self._replicas(ranks // layout.expert, layout.tensor * layout.expert)),
        ):
            if group.ranks == 1 or not values:
                continue
            buckets = max(1.0, values / max(BUCKET, 10**6 * group.ranks))
            if compressor is None:
                cost = self._whole(group, sums, values * gradient_bytes, buckets)
            else:
                part, sharded = int(values / buckets), layout.distributed_optimizer
                one = collectives.gradients(
                    group, part, compressor.codec, sharded, self.config.communicators, gradient_bytes
                )
                cost = one.times(buckets)
            behind = work.backward * slower if layout.overlap_gradients else 0.0
            self._overlapped(group, "dp.gradient", cost, behind, buckets)
            if not layout.distributed_optimizer:
                continue
            if weight_codec is None:
                cost = self._whole(group, "all_gather", values * layout.value_bytes, buckets)
            else:
                part = int(values / buckets)
                one = collectives.gathered(group, part, weight_codec, self.config.communicators)
                cost = one.times(buckets)
            behind = work.forward * slower if layout.overlap_weights else 0.0
            self._overlapped(group, "dp.weight", cost, behind, buckets)

    def _replicas(self, ranks: int, stride: int) -> Group:
        """The data-parallel group; with ``--dp-compression-node-size`` its nodes are the user's."""
        size = self.config.data_parallel.node_size
        group = self.cluster.group(ranks, stride)
        if size is None or size == group.local or ranks % size:
            return group
        if group.nodes > 1 or size == 1:  # a node's ranks are those of a part of a node, or of several nodes
            return Group(ranks, size, replace(self.cluster, intra=group.slowest, inter=group.slowest))
        return Group(ranks, size, replace(self.cluster, inter=self.cluster.intra))

    def _whole(self, group: Group, operation: str, nbytes: float, buckets: float) -> Cost:
        one = collectives.uncompressed(group, operation, int(nbytes / buckets), self.layout.communicators)
        return one.times(buckets)

    def _overlapped(self, group: Group, traffic: str, cost: Cost, work: float, buckets: float) -> None:
        """All buckets but the last have so much work to run behind."""
        self.sent[traffic] += cost.sent
        behind = min(cost.link * (1 - 1 / buckets), work)
        self.phases["DP"] += cost.link - behind * (1 - group.slowest.overlap_loss)
        self.phases["codecs"] += cost.kernels
        self.hidden["DP"] += behind


def model_tokens(model: Model, layout: Layout) -> int:
    """Of a sample, in one message between stages."""
    return model.sequence // layout.context // (layout.tensor if layout.sequence_parallel else 1)
