"""An iteration's time by phase, from a model's shape, its layout, a cluster and what is compressed.

The formulas are in docs/cost_model.md. Milliseconds throughout; bytes are those that one rank sends.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron.compression.advise import collectives, memory, work
from megatron.compression.advise.cluster import Cluster, Group
from megatron.compression.advise.collectives import Cost
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.advise.work import Work
from megatron.compression.codecs import Codec
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import InputError
from megatron.compression.tensor_parallel.by_site import parse_layers

PHASES = ("compute", "optimizer", "bubble", "TP", "PP", "DP", "EP", "CP", "codecs", "host", "other")
"""What an iteration's time is made of: work, then communication that nothing hides, then what the GPU waits
for the host."""

BUCKET = 40_000_000
"""Values of a bucket of Megatron's DDP, at least; 10^6 for each data-parallel rank beyond."""


@dataclass(frozen=True)
class Prediction:
    """Of one setting."""

    phases: dict[str, float]
    """Milliseconds by ``PHASES``; they add up to the iteration."""
    hidden: dict[str, float]
    """Milliseconds of communication that run behind work, by dimension."""
    sent: dict[str, float]
    """Bytes that a rank sends in an iteration, by the ledger's traffic class: a rank of the slowest stage;
    between stages the mean over the stages."""
    memory_gb: float

    @property
    def milliseconds(self) -> float:
        return sum(self.phases.values())


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
        if config.transport == "collective":
            cluster = replace(cluster, intra=replace(cluster.intra, fused=False, copied=False))
        if config.caat_net.enabled:
            raise InputError("--caat-net-sync-fraction makes another model, which is not modelled; drop it")
        if config.tensor_parallel.halves:
            raise InputError("--tp-compression-overlap halves hides sums, which is not modelled; drop it")
        self.model, self.layout, self.cluster, self.config = model, layout, cluster, config
        self.constants, self.rounds = cluster.constants, layout.micro_batches
        self.phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.hidden: dict[str, float] = defaultdict(float)
        self.sent: dict[str, float] = defaultdict(float)
        self.launching = 0.0
        """Milliseconds of the host, for compressed messages."""

    def prediction(self) -> Prediction:
        """Everything."""
        shape = self.model, self.layout, self.constants
        stages = [work.layers_work(*shape)] * self.layout.pipeline
        stages[0] += work.embedding_work(*shape)
        stages[-1] += work.output_work(*shape)
        slow = max(range(len(stages)), key=lambda stage: stages[stage].both)
        own = stages[slow].both
        self.phases["compute"] = self.rounds * own
        exposed = self._tensor_parallel(slow) + self._experts() + self._context()
        others = [stage.both + exposed for place, stage in enumerate(stages) if place != slow]
        self._pipeline(own + exposed, others)
        self._data_parallel(stages[slow], (own + exposed) / own)
        held, shard = memory.weights(self.model, self.layout)
        updated = shard if self.layout.distributed_optimizer else held
        self.phases["optimizer"] = (30 * updated + 10 * held) / self.constants.memory_gbps / 1e6
        self._host()
        self.phases["other"] = self.constants.iteration_ms
        gigabytes = memory.gigabytes(self.model, self.layout)
        return Prediction(self.phases, dict(self.hidden), dict(self.sent), gigabytes)

    def _host(self) -> None:
        """Kernels are launched while others run: what counts is by how much the host takes longer."""
        layout, passes = self.layout, 4 / 3 if self.layout.recompute == "full" else 1.0
        layers = self.model.layers / layout.pipeline * self.rounds
        launched = passes * layers * self.constants.host_layer_ms + self.launching
        launched *= 1 + (layout.pipeline - 1) / layout.virtual / self.rounds
        self.phases["host"] = max(0.0, launched - sum(self.phases.values()))

    # Inside a micro-batch; each returns the exposed milliseconds of one

    def _tensor_parallel(self, stage: int) -> float:
        model, layout, settings = self.model, self.layout, self.config.tensor_parallel
        sparse, group = work.sparse_layers(model, layout), self.cluster.group(layout.tensor, 1)
        counts = {"layer": model.layers / layout.pipeline - sparse, "attention": sparse}
        counts |= {"embedding": float(stage == 0), "output": float(stage == layout.pipeline - 1)}
        rules = settings.rules(0)
        if any(rule.choices for rule in rules.values()):
            raise InputError(f"--tp-compression {settings.compression}: codecs by site are not modelled")
        chosen = parse_layers(settings.layers)
        values, total = work.tokens_of(model, layout) * model.hidden, 0.0
        nbytes = values * layout.value_bytes
        for part, messages in work.messages(model, layout, self.constants).items():
            share = 1.0  # of these places that compress
            if chosen is not None:
                numbered = sum(isinstance(layer, int) for layer in chosen) / model.layers
                share = numbered if part in ("layer", "attention") else float(part in chosen)
            if nbytes < settings.min_mb * 2**20:
                share = 0.0
            for traffic, operation, behind, deferred in messages:
                codec, count = rules[traffic].codec, counts[part]
                if layout.recompute == "full" and traffic == "tp.forward" and part in ("layer", "attention"):
                    count *= 2
                if codec is not None and share:
                    communicators = self.config.communicators
                    cost = collectives.compressed(
                        group, operation, values, codec, communicators, layout.value_bytes
                    )
                    total += self._behind(group, traffic, cost, behind + deferred, count * share)
                    count *= 1 - share
                cost = collectives.uncompressed(group, operation, nbytes, layout.communicators)
                total += self._behind(group, traffic, cost, behind, count)
        return total

    def _behind(self, group: Group, traffic: str, cost: Cost, behind: float, count: float) -> float:
        """``count`` such messages a micro-batch, with so much work to run behind."""
        dimension, times = traffic[:2].upper(), count * self.rounds
        self.sent[traffic] += cost.sent * times
        hides = min(cost.link, behind) if cost.overlaps else 0.0
        exposed = cost.link - hides * (1 - _overlap_loss(group, cost))
        self.hidden[dimension] += hides * times
        self.phases[dimension] += exposed * times
        self.phases["codecs"] += cost.kernels * times
        self.launching += cost.host * times
        return (exposed + cost.kernels) * count

    def _experts(self) -> float:
        """Dispatch and combine, forward and backward: four all-to-alls in each layer, nothing behind them."""
        model, layout, sparse = self.model, self.layout, work.sparse_layers(self.model, self.layout)
        if not model.experts or layout.expert == 1:
            return 0.0
        group = self.cluster.group(layout.expert, 1)
        own = work.tokens_of(model, layout) // (layout.tensor if layout.sequence_parallel else 1)
        values, forwards = own * model.top_k * model.hidden, 4 if layout.recompute == "full" else 2
        return sum(
            self._behind(group, traffic, self._through(rule.codec, group, "all_to_all", values), 0.0, count)
            for (traffic, rule), count in zip(
                self.config.expert_parallel.rules(0).items(), (forwards * sparse, 2 * sparse), strict=True
            )
        )

    def _through(self, codec: Codec | None, group: Group, operation: str, values: int) -> Cost:
        nbytes = self.layout.value_bytes
        if codec is None:
            return collectives.uncompressed(group, operation, values * nbytes)
        return collectives.compressed(group, operation, values, codec, self.config.communicators, nbytes)

    def _context(self) -> float:
        """Keys and values of every layer are gathered, their gradients scattered. Transformer Engine passes
        them round a ring behind the attention."""
        model, layout = self.model, self.layout
        if layout.context == 1:
            return 0.0
        group = self.cluster.group(layout.context, layout.tensor)
        kept = 2 * model.groups * model.head_dim // min(layout.tensor, model.groups)
        values = work.tokens_of(model, layout) * layout.context * kept
        layers = model.layers / layout.pipeline
        scores = (
            2 * work.tokens_of(model, layout) * model.sequence * model.heads * model.head_dim / layout.tensor
        )
        attention = scores / self.constants.attention_tflops / 1e9 * layout.transformer_engine
        codecs = self.config.context_parallel
        forward = self._through(codecs.forward_codec, group, "all_gather", values)
        backward = self._through(codecs.backward_codec, group, "reduce_scatter", values)
        total = self._behind(group, "cp.forward", forward, attention, layers)
        return total + self._behind(group, "cp.backward", backward, 2.5 * attention, layers)

    # Between micro-batches

    def _pipeline(self, slowest: float, others: list[float]) -> None:
        """1F1B. Uncompressed sends are waited for, so a stage's step holds both its messages; those of two
        stages, which have no other neighbour, cross each other. Payloads are not waited for, but only as many
        micro-batches are under way as there are stages. Interleaved, messages run behind the other chunks."""
        layout, ranks, virtual = self.layout, self.layout.pipeline, self.layout.virtual
        if ranks == 1:
            return
        settings, per_node = self.config.pipeline_parallel, self.cluster.gpus_per_node
        group = self.cluster.group(2, 1 if layout.gpus <= per_node else per_node)
        tokens = self.model.sequence // layout.context // (layout.tensor if layout.sequence_parallel else 1)
        shape, times, kernels = (tokens, layout.micro_batch, self.model.hidden), [], 0.0
        codecs = {"pp.forward": settings.forward_codec, "pp.backward": settings.backward_codec}
        for traffic, codec in codecs.items():
            cost = collectives.message(group, shape, layout.value_bytes, codec)
            times.append(cost.link)
            kernels += cost.kernels * virtual
            self.sent[traffic] += cost.sent * self.rounds * (ranks * virtual - 1) / ranks
        links, step, rest = sum(times), slowest + kernels, [one + kernels for one in others]
        if virtual > 1:
            steady = max(step, links * virtual)
        elif settings.enabled:
            steady = max(step, (step + sum(rest) + (ranks - 1) * links) / ranks)
        else:
            steady = step + (max(times) if ranks == 2 else links)
        self.phases["codecs"] += kernels * self.rounds
        self.phases["PP"] += (steady - step) * self.rounds + links * len(rest)
        self.hidden["PP"] += max(0.0, links * virtual - (steady - step)) * self.rounds
        self.phases["bubble"] += sum(rest) / virtual

    def _data_parallel(self, stage: Work, slower: float) -> None:
        """Gradients run behind the last micro-batch's backward, weights behind the first one's forward."""
        layout, config, share = self.layout, self.config.data_parallel, self.config.communicators
        compressor, weight_codec = config.compressor, config.weight_codec
        if compressor is not None and not hasattr(compressor, "codec"):
            raise InputError(
                f"--dp-compression {config.compression}: its bytes depend on the values; not modelled"
            )
        gradient_bytes = 2 if layout.bf16_gradients else 4
        sharded = layout.distributed_optimizer
        replicas = layout.data * layout.context
        dense, experts = memory.sharded_weights(self.model, layout)
        for values, group in (
            (dense, self._replicas(replicas, layout.tensor)),
            (experts, self._replicas(replicas * layout.tensor // layout.expert, layout.expert)),
        ):
            if group.ranks == 1 or not values:
                continue
            buckets = max(1.0, values / max(BUCKET, 10**6 * group.ranks))
            part = int(values / buckets)
            if compressor is None:
                operation, nbytes = "reduce_scatter" if sharded else "all_reduce", part * gradient_bytes
                cost = collectives.uncompressed(group, operation, nbytes, layout.communicators)
            else:
                cost = collectives.gradients(group, part, compressor.codec, sharded, share, gradient_bytes)
            behind = stage.backward * slower if layout.overlap_gradients else 0.0
            self._buckets(group, "dp.gradient", cost, behind, buckets)
            if not sharded:
                continue
            if weight_codec is None:
                nbytes = part * layout.value_bytes
                cost = collectives.uncompressed(group, "all_gather", nbytes, layout.communicators)
            else:
                cost = collectives.gathered(group, part, weight_codec, share, layout.value_bytes)
            behind = stage.forward * slower if layout.overlap_weights else 0.0
            self._buckets(group, "dp.weight", cost, behind, buckets)

    def _replicas(self, ranks: int, stride: int) -> Group:
        """A data-parallel group; with ``--dp-compression-node-size`` its nodes are the user's."""
        group, size = self.cluster.group(ranks, stride), self.config.data_parallel.node_size
        if size is None or ranks % size:
            return group
        inter = self.cluster.inter if size >= group.local else self.cluster.intra
        intra = self.cluster.intra if size <= group.local else self.cluster.inter
        return Group(ranks, size, replace(self.cluster, intra=intra, inter=inter))

    def _buckets(self, group: Group, traffic: str, one: Cost, behind: float, buckets: float) -> None:
        """All buckets but the last have so much work to run behind."""
        hides = min(one.link * (buckets - 1), behind)
        self.sent[traffic] += one.sent * buckets
        self.phases["DP"] += one.link * buckets - hides * (1 - _overlap_loss(group, one))
        self.phases["codecs"] += one.kernels * buckets
        self.hidden["DP"] += hides


def _overlap_loss(group: Group, cost: Cost) -> float:
    """How much comes back of what hides such a message."""
    return group.slowest.copied_loss if cost.copied else group.slowest.overlap_loss
