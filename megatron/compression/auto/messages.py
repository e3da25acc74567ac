"""What a run sends in an iteration, derived from Megatron's arguments, and what it costs the
iteration.

The model: an iteration is its computation, and of each message what does not overlap with
computation. A message of ``t`` seconds that may overlap with ``overlap`` seconds of GEMMs lengthens
the iteration by ``t - overlap``, and slows the GEMMs that it overlaps with. At TP 4
(docs/results/iterations.md, "where an iteration goes") this gives 494 ms where 499 were measured in
pcie, 25 where 22.5 were on NVLink.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron.compression.expert_parallel.config import ExpertParallelConfig
from taco_kernels.common import ceil_div

PROBE_VALUES = 2**26
"""The most values of a gradient bucket that are sent for a timing, more than Megatron's buckets
have: a codec's launches count as in training. More take proportionally longer."""

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_COLLECTIVES = {
    "weights": "all_gather",
    "outer": "all_reduce",
    "exchange": "send",
    "gather_tokens": "all_gather",
    "sum_tokens": "reduce_scatter",
}
"""Operation of a message -> the ledger's name of the collective that sends it."""

COMPUTATION_OVER_GEMMS = 1.6
"""Computation over that of matrix products alone: norms, activations, the optimizer and gaps
between kernels. At TP 4 on NVLink it is 1.75 (all less exposed communication, over GEMMs,
docs/results/iterations.md); with larger GEMMs a GPU less, by estimate."""
OVERLAP_LOSS = 0.09
"""Part of the time that a message overlaps with computation by which the computation takes longer:
5 of 57 ms at TP 4 through host memory (docs/results/iterations.md); on NVLink it is more."""

HALVES_COST = 0.06
"""Part of an iteration's computation that interleaved halves of a micro-batch cost by themselves:
smaller kernels, and more of them (GPT-350M uncompressed over NVLink, docs/results/graphs.md)."""
HALVES_OVERLAP_LOSS = 0.35
"""Part of the shorter one of link and computation by which an iteration in halves exceeds the longer
one: copies and kernels slow each other. Six iterations of that page, three models over PCIe, have
0.29 to 0.48."""


@dataclass(frozen=True)
class MessageKind:
    """One kind of message of an iteration."""

    dimension: str
    """The dimension's name, such as tensor_parallel."""
    traffic: str
    """The ledger's class."""
    operation: str
    """all_reduce, reduce_scatter, all_gather; exchange (between stages); gradients, weights (a
    bucket's), outer (its shard's sum between optimizer instances); all_to_all, gather_tokens,
    sum_tokens (of an expert layer's dispatcher)."""
    shape: tuple[int, ...]
    """The whole tensor's over all ranks: what an all-gather makes, what a reduce-scatter takes. For
    an all-to-all, what a rank sends."""
    dtype: torch.dtype
    count: float
    """How many of them follow each other on the critical path of an iteration."""
    overlap: float = 0.0
    """Seconds of computation that one of them may overlap with."""
    exposed_count: float = 0.0
    """How many of them overlap with nothing."""
    unequal: bool = False
    """Whether the router decides how many tokens each rank sends; their numbers are sent too."""

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def sent_as(self, sharded: bool) -> str:
        """Return the ledger's name of the collective that sends it uncompressed.

        Args:
            sharded: with the distributed optimizer.
        """
        if self.operation == "gradients":
            return "reduce_scatter" if sharded else "all_reduce"
        return _COLLECTIVES.get(self.operation, self.operation)

    def exposed(self, seconds: float) -> float:
        """Return by how many seconds these messages lengthen an iteration.

        Args:
            seconds: that one of them takes by itself.
        """
        # What sticks out of the overlap, or those that overlap with nothing, whichever is more;
        # the rest slows the computation that it overlaps with.
        total = self.count * seconds
        not_overlapped = self.count * (seconds - self.overlap)
        waited = max(not_overlapped, self.exposed_count * seconds, 0.0)
        return waited + OVERLAP_LOSS * (total - waited)


@dataclass(frozen=True)
class Workload:
    """An iteration of one rank."""

    computation: float
    """Seconds without communication, pipeline bubbles included."""
    messages: tuple[MessageKind, ...]

    def seconds(self, times: Mapping[MessageKind, float]) -> float:
        """Return the seconds of an iteration whose messages take ``times`` (seconds one by one)."""
        exposed = sum(message.exposed(times[message]) for message in self.messages)
        return self.computation + exposed

    def seconds_in_halves(self, times: Mapping[MessageKind, float]) -> float:
        """Return the seconds of an iteration that interleaves halves of each micro-batch.

        The sums of one half travel while the other half computes::

            max(computation, link) + what the two slow each other

        Args:
            times: seconds of each message that is not of tensor parallelism; of one that is, the
                seconds of its two halves together.
        """
        computation = self.computation * (1 + HALVES_COST)
        link = 0.0
        exposed = 0.0
        for message in self.messages:
            if message.dimension == "tensor_parallel":
                link += message.count * times[message]
            else:
                exposed += message.exposed(times[message])
        contention = HALVES_OVERLAP_LOSS * min(computation, link)
        return max(computation, link) + contention + exposed


def workload(args: Namespace, parameters: int, flops: float, gemm_rate: float) -> Workload:
    """Return what this rank computes and sends in an iteration.

    Args:
        args: Megatron's arguments.
        parameters: of this rank, that data parallelism reduces.
        flops: floating-point operations of an iteration over all ranks, without recomputation.
        gemm_rate: FLOP/s of a GEMM of this model on this rank.
    """
    stages = args.pipeline_model_parallel_size
    virtual_stages = args.virtual_pipeline_model_parallel_size or 1
    samples = args.micro_batch_size * args.data_parallel_size
    micro_batches = max(1, args.global_batch_size // samples)
    # A pipeline's bubble: so many times as long as without one, computation and messages alike.
    bubble = 1 + (stages - 1) / (micro_batches * virtual_stages)
    # Forward 1, backward 2 parts of the operations; a second forward pass is one more.
    recomputed = args.recompute_granularity == "full"
    flops = flops / args.world_size
    if recomputed:
        flops *= 4 / 3  # a second forward pass
    gemm_seconds = flops / gemm_rate
    computation = gemm_seconds * COMPUTATION_OVER_GEMMS * bubble
    micro_batch_seconds = computation / bubble / micro_batches
    chunks = micro_batches * virtual_stages
    messages = (
        *_tensor_parallel(args, micro_batches, bubble, gemm_seconds / 3, recomputed),
        *_data_parallel(args, parameters, micro_batch_seconds),
        *_pipeline_parallel(args, chunks, computation / chunks),
        *_expert_parallel(args, micro_batches * bubble, gemm_rate, micro_batch_seconds),
        *_context_parallel(args, micro_batches * bubble),
    )
    return Workload(computation, messages)


def activations(args: Namespace) -> tuple[int, int, int]:
    """Return ``[tokens, samples, channels]`` of a micro-batch on a tensor-parallel group."""
    return args.seq_length // args.context_parallel_size, args.micro_batch_size, args.hidden_size


def _layers_of_stage(args: Namespace) -> int:
    return ceil_div(args.num_layers, args.pipeline_model_parallel_size)


def _tensor_parallel(
    args: Namespace, micro_batches: int, bubble: float, weight_gemms: float, recomputed: bool
) -> list[MessageKind]:
    """Return the sums of layers: two a layer and direction, one of an expert layer without shared
    experts.

    What ranks that share an expert send is in ``_expert_parallel``. In the backward pass sums
    overlap with weight gradients.

    Args:
        args: Megatron's arguments.
        micro_batches: of an iteration.
        bubble: by which a pipeline's bubbles lengthen everything.
        weight_gemms: seconds of an iteration's weight gradients.
        recomputed: whether the backward pass runs the forward pass again.
    """
    if args.tensor_model_parallel_size == 1:
        return []
    # An expert layer's MLP sums nothing over this group, unless shared experts do.
    single_sums = _expert_layers(args)
    if args.num_experts and args.moe_shared_expert_intermediate_size:
        single_sums = 0
    # One more: in the forward pass the embedding's, in the backward pass the output layer's.
    sums = 2 * _layers_of_stage(args) - single_sums + 1
    count = sums * micro_batches
    overlap = weight_gemms / count
    forward_count = count * 2 if recomputed else count

    def message(direction: str, operation: str, count: float, overlap: float = 0.0) -> MessageKind:
        """Return one kind of message of a layer.

        Args:
            direction: forward or backward.
            operation: the collective.
            count: of them in an iteration without a pipeline's bubbles.
            overlap: seconds of weight gradients that one of them may overlap with.
        """
        return MessageKind(
            dimension="tensor_parallel",
            traffic=f"tp.{direction}",
            operation=operation,
            shape=activations(args),
            dtype=args.params_dtype,
            count=count * bubble,
            overlap=overlap,
        )

    if not args.sequence_parallel:
        return [
            message("forward", "all_reduce", forward_count),
            message("backward", "all_reduce", count, overlap),
        ]
    return [
        message("forward", "reduce_scatter", forward_count),
        message("forward", "all_gather", forward_count),
        message("backward", "reduce_scatter", count, overlap),
        # The output's gradient is gathered, and the input once more, while the input's gradient is
        # computed.
        message("backward", "all_gather", 2 * count, overlap / 2),
    ]


def _data_parallel(args: Namespace, parameters: int, micro_batch: float) -> list[MessageKind]:
    """Return the reductions and gathers of buckets.

    They may overlap with the last micro-batch's backward and the next iteration's first forward
    pass.

    Args:
        args: Megatron's arguments.
        parameters: of this rank.
        micro_batch: seconds of one, forward and backward.
    """
    all_ranks = args.data_parallel_size * args.context_parallel_size
    instances = args.num_distributed_optimizer_instances
    ranks = all_ranks // instances
    if all_ranks == 1 or not parameters:
        return []
    bucket = _bucket_values(args, parameters, all_ranks)
    # Whole shards, since a bucket is padded to a multiple of the ranks.
    values = ceil_div(min(bucket, PROBE_VALUES), ranks) * ranks
    count = parameters / values
    gradient_dtype = args.params_dtype
    if args.accumulate_allreduce_grads_in_fp32:
        gradient_dtype = torch.float32

    def message(
        traffic: str, operation: str, dtype: torch.dtype, overlap: float, values: int = values
    ) -> MessageKind:
        """Return one kind of message of a bucket.

        Args:
            traffic: the ledger's class.
            operation: gradients, outer or weights.
            dtype: of what is sent.
            overlap: seconds of computation that all of them together may overlap with.
            values: of one, over all ranks.
        """
        # During the last bucket nothing is computed: the backward pass has ended.
        exposed_count = 0.0
        if overlap:
            exposed_count = min(count, bucket * count / parameters)
        return MessageKind(
            dimension="data_parallel",
            traffic=traffic,
            operation=operation,
            shape=(values,),
            dtype=dtype,
            count=count,
            overlap=overlap / count,
            exposed_count=exposed_count,
        )

    # Of a micro-batch a third is forward and two thirds are backward.
    backward_seconds = 0.0
    forward_seconds = 0.0
    if args.overlap_grad_reduce:
        backward_seconds = micro_batch * 2 / 3
    if args.overlap_param_gather:
        forward_seconds = micro_batch / 3
    messages = []
    if ranks > 1:
        messages.append(message("dp.gradient", "gradients", gradient_dtype, backward_seconds))
    if instances > 1:
        shard = values // ranks
        messages.append(message("dp.outer", "outer", gradient_dtype, backward_seconds, shard))
    if args.use_distributed_optimizer and ranks > 1:
        messages.append(message("dp.weight", "weights", args.params_dtype, forward_seconds))
    return messages


def _bucket_values(args: Namespace, parameters: int, ranks: int) -> int:
    """Return how many values Megatron reduces at once, padding left out.

    Args:
        args: Megatron's arguments.
        parameters: of this rank.
        ranks: that reduce them, of all optimizer instances.
    """
    # Without overlap there is nothing to gain by several buckets: Megatron makes one.
    if not args.overlap_grad_reduce:
        return parameters
    # Megatron's default size of a bucket.
    bucket_size = args.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)
    return min(parameters, bucket_size)


def _pipeline_parallel(args: Namespace, chunks: int, chunk: float) -> list[MessageKind]:
    """Return the exchanges between stages.

    Between two stages a micro-batch's activations and another's gradients cross each other: in
    1F1B's steady state twice a micro-batch at an inner stage; before and after it a message passes
    every boundary.

    Args:
        args: Megatron's arguments.
        chunks: micro-batches times virtual stages.
        chunk: seconds of one of them, forward and backward.
    """
    stages = args.pipeline_model_parallel_size
    if stages == 1:
        return []
    tokens, samples, channels = activations(args)
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    # The steady state's, then one for each boundary to fill the pipeline and one to drain it.
    exchanges = (chunks - 1) * min(2, stages - 1) + 2 * (stages - 1)
    overlap = chunk / 2 if args.overlap_p2p_comm else 0.0
    # One exchange is timed with activations going round and one with gradients; each counts a half.
    return [
        MessageKind(
            dimension="pipeline_parallel",
            traffic=f"pp.{direction}",
            operation="exchange",
            shape=(tokens, samples, channels),
            dtype=args.params_dtype,
            count=exchanges / 2,
            overlap=overlap,
        )
        for direction in ("forward", "backward")
    ]


def _expert_layers(args: Namespace) -> int:
    """Return how many layers of a pipeline stage have experts as their MLP."""
    if args.num_experts is None:
        return 0
    frequency = args.moe_layer_freq
    if isinstance(frequency, list):
        layers = sum(map(bool, frequency))
    else:
        layers = ceil_div(args.num_layers, frequency)
    return ceil_div(layers, args.pipeline_model_parallel_size)


def _expert_parallel(
    args: Namespace, micro_batches: float, gemm_rate: float, micro_batch: float
) -> list[MessageKind]:
    """Return the messages of experts' tokens.

    A layer has four legs: tokens to their experts and back, and their gradients, spread evenly
    where none are dropped; probabilities and counts are left out. They overlap with another
    micro-batch's layers (``--overlap-moe-expert-parallel-comm``), with shared experts in the
    dispatcher, or with nothing.

    Args:
        args: Megatron's arguments.
        micro_batches: of an iteration, a pipeline's bubbles included.
        gemm_rate: FLOP/s.
        micro_batch: seconds of one, forward and backward.
    """
    layers = _expert_layers(args)
    if not layers or args.moe_token_dispatcher_type == "flex":
        return []  # it sends in another way, which cannot be timed: the config's check says how
    tokens, samples, channels = activations(args)
    tokens *= samples
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    backward_count = layers * micro_batches
    forward_count = backward_count * 2 if _recomputes(args, "moe") else backward_count
    width = args.moe_latent_size or channels
    if args.moe_token_dispatcher_type == "allgather":
        ranks = ExpertParallelConfig.ranks(args)
        if ranks == 1:
            return []
        shape = (tokens * ranks, width)
        return _gathers_and_sums(
            args, "expert_parallel", "ep", shape, forward_count, backward_count, unequal=False
        )
    ranks = args.expert_model_parallel_size
    rows = ceil_div(_routed_rows(args, tokens), ranks) * ranks
    unequal = not args.moe_pad_expert_input_to_capacity
    messages = []
    if ranks > 1:
        overlaps = _expert_overlaps(args, tokens, gemm_rate, micro_batch)
        exposed_count = 0
        if args.overlap_moe_expert_parallel_comm:
            # The first micro-batch's forward pass and the last one's backward pass have no other
            # beside them.
            exposed_count = 2 * layers
        messages = [
            MessageKind(
                dimension="expert_parallel",
                traffic=f"ep.{direction}",
                operation="all_to_all",
                shape=(rows, width),
                dtype=args.params_dtype,
                count=2 * count,
                overlap=overlap,
                exposed_count=exposed_count,
                unequal=unequal,
            )
            for direction, count, overlap in (
                ("forward", forward_count, overlaps[0]),
                ("backward", backward_count, overlaps[1]),
            )
        ]
    expert_tensor_ranks = args.expert_tensor_parallel_size
    if expert_tensor_ranks > 1:
        shape = (rows * expert_tensor_ranks, width)
        messages += _gathers_and_sums(
            args, "tensor_parallel", "tp", shape, forward_count, backward_count, unequal
        )
    return messages


def _routed_rows(args: Namespace, tokens: int) -> int:
    """Return how many tokens a rank sends to experts, each as often as it is routed."""
    rows = tokens * args.moe_router_topk
    if args.moe_expert_capacity_factor is None:
        return rows
    capacity = get_capacity(rows, args.num_experts, args.moe_expert_capacity_factor)
    capacity *= args.num_experts
    if args.moe_pad_expert_input_to_capacity:
        return capacity
    return min(rows, capacity)


def _expert_overlaps(
    args: Namespace, tokens: int, gemm_rate: float, micro_batch: float
) -> tuple[float, float]:
    """Return the seconds of computation that one leg may overlap with, forward and backward.

    Args:
        args: Megatron's arguments.
        tokens: of a micro-batch on this rank.
        gemm_rate: FLOP/s.
        micro_batch: seconds of one, forward and backward.
    """
    if args.overlap_moe_expert_parallel_comm:
        # A stage has 1 / stages of the layers.
        layer = micro_batch * args.pipeline_model_parallel_size / args.num_layers
        # Half of another micro-batch's backward pass, half of its forward pass: those take 2/3 and
        # 1/3.
        return layer / 3, layer / 6
    if args.moe_shared_expert_overlap:
        matrices = 3 if args.swiglu else 2
        # A multiplication and an addition for each weight and token.
        products = 2 * tokens * args.hidden_size * args.moe_shared_expert_intermediate_size
        shared_expert = products * matrices / gemm_rate
        return shared_expert / 2, shared_expert
    return 0.0, 0.0


def _gathers_and_sums(
    args: Namespace,
    dimension: str,
    traffic: str,
    shape: tuple[int, int],
    forward_count: float,
    backward_count: float,
    unequal: bool,
) -> list[MessageKind]:
    """Return a gather of tokens and a sum of experts' outputs, and their gradients the other way
    round.

    Args:
        args: Megatron's arguments.
        dimension: whose group sends them.
        traffic: how its traffic classes begin.
        shape: (tokens, channels) over all ranks.
        forward_count: of each in an iteration.
        backward_count: of each in an iteration.
        unequal: whether ranks have different numbers of tokens.
    """
    token_dtype = args.params_dtype
    # Experts' outputs are weighted by the router's probabilities, in whose dtype they are summed.
    output_dtype = _ROUTER_DTYPES.get(args.moe_router_dtype, token_dtype)
    return [
        MessageKind(
            dimension=dimension,
            traffic=f"{traffic}.{direction}",
            operation=operation,
            shape=shape,
            dtype=dtype,
            count=count,
            unequal=unequal,
        )
        for direction, operation, dtype, count in (
            ("forward", "gather_tokens", token_dtype, forward_count),
            ("forward", "sum_tokens", output_dtype, forward_count),
            ("backward", "gather_tokens", output_dtype, backward_count),
            ("backward", "sum_tokens", token_dtype, backward_count),
        )
    ]


def _context_parallel(args: Namespace, micro_batches: float) -> list[MessageKind]:
    """Return the gathers of layers' keys and values and the sums of their gradients.

    They overlap with nothing.

    Args:
        args: Megatron's arguments.
        micro_batches: of an iteration, a pipeline's bubbles included.
    """
    if args.context_parallel_size == 1 or args.transformer_impl != "local":
        return []  # Transformer Engine's ring cannot be timed: the config's check says so
    shape = (args.seq_length, args.micro_batch_size, _key_value_channels(args))
    count = _layers_of_stage(args) * micro_batches
    forward_count = count * 2 if _recomputes(args, "core_attn") else count

    def message(direction: str, operation: str, count: float) -> MessageKind:
        """Return one kind of message of attention.

        Args:
            direction: forward or backward.
            operation: the collective.
            count: of them in an iteration.
        """
        return MessageKind(
            dimension="context_parallel",
            traffic=f"cp.{direction}",
            operation=operation,
            shape=shape,
            dtype=args.params_dtype,
            count=count,
        )

    return [
        message("forward", "all_gather", forward_count),
        message("backward", "reduce_scatter", count),
    ]


def _key_value_channels(args: Namespace) -> int:
    """Return the channels of a token's keys and values on one tensor-parallel rank."""
    heads = args.num_attention_heads
    tensor_ranks = args.tensor_model_parallel_size
    if args.multi_latent_attention:
        head_dim = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
        return heads // tensor_ranks * head_dim
    groups = args.num_query_groups if args.group_query_attention else heads
    # Where there are fewer groups than ranks, each rank holds a whole one.
    return 2 * args.kv_channels * max(groups // tensor_ranks, 1)


def _recomputes(args: Namespace, module: str) -> bool:
    """Return whether the backward pass runs a module's forward pass again, sends included."""
    if args.recompute_granularity != "selective":
        return args.recompute_granularity == "full"
    return module in (args.recompute_modules or ["core_attn"])
