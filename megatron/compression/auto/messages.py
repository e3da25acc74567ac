"""What a run sends in an iteration, derived from Megatron's arguments, and what it costs the iteration.

The model: an iteration is its computation, and of each message what does not overlap with computation. A
message of ``t`` seconds that may overlap with ``overlap`` seconds of GEMMs lengthens the iteration by
``t - overlap``, and slows the GEMMs that it overlaps with. At TP 4 (docs/results/iterations.md, "where an
iteration goes") this gives 494 ms where 499 were measured in pcie, 25 where 22.5 were on NVLink.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron.compression.expert_parallel.config import ExpertParallelConfig

PROBE_VALUES = 2**26
"""Of a gradient bucket at most so many values are sent for a timing, more than Megatron's buckets have: a
codec's launches count as in training. More take proportionally longer."""

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_SENT_AS = {
    **{"weights": "all_gather", "outer": "all_reduce", "exchange": "send"},
    **{"gather_tokens": "all_gather", "sum_tokens": "reduce_scatter"},
}

COMPUTATION_OVER_GEMMS = 1.6
"""Norms, activations, the optimizer and gaps between kernels. At TP 4 on NVLink it is 1.75 (all less exposed
communication, over GEMMs, docs/results/iterations.md); with larger GEMMs a GPU less, by estimate."""
OVERLAP_LOSS = 0.09
"""Of the time that a message overlaps with computation, what the computation takes longer: 5 of 57 ms at TP 4
through host memory (docs/results/iterations.md); on NVLink it is more."""


@dataclass(frozen=True)
class MessageKind:
    """One kind of message of an iteration."""

    dimension: str
    """Such as tensor_parallel."""
    traffic: str
    """The ledger's class."""
    operation: str
    """all_reduce, reduce_scatter, all_gather; exchange (between stages); gradients, weights (a bucket's),
    outer (its shard's sum between optimizer instances); all_to_all, gather_tokens, sum_tokens (of an expert
    layer's dispatcher)."""
    shape: tuple[int, ...]
    """Of the whole tensor over all ranks: what an all-gather makes, what a reduce-scatter takes. Of an
    all-to-all what a rank sends."""
    dtype: torch.dtype
    count: float
    """How many of them follow each other on the critical path of an iteration."""
    overlap: float = 0.0
    """Seconds of computation that one of them may overlap with."""
    exposed_count: float = 0.0
    """How many of them overlap with nothing."""
    unequal: bool = False
    """Of tokens: the router decides how many each rank sends, and their numbers are sent too."""

    @property
    def nbytes(self) -> int:
        """Uncompressed."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def sent_as(self, sharded: bool) -> str:
        """The ledger's name of the collective that sends it uncompressed; ``sharded``: with the distributed
        optimizer."""
        if self.operation == "gradients":
            return "reduce_scatter" if sharded else "all_reduce"
        return _SENT_AS.get(self.operation, self.operation)

    def exposed(self, seconds: float) -> float:
        """Seconds by which these messages lengthen an iteration; one of them takes ``seconds`` by itself."""
        waited = max(self.count * (seconds - self.overlap), self.exposed_count * seconds, 0.0)
        return waited + OVERLAP_LOSS * (self.count * seconds - waited)


@dataclass(frozen=True)
class Workload:
    """An iteration of one rank."""

    computation: float
    """Seconds without communication, pipeline bubbles included."""
    messages: tuple[MessageKind, ...]

    def seconds(self, times: Mapping[MessageKind, float]) -> float:
        """An iteration whose messages take ``times`` (seconds one by one)."""
        return self.computation + sum(message.exposed(times[message]) for message in self.messages)


def workload(args: Namespace, parameters: int, flops: float, gemm_rate: float) -> Workload:
    """What this rank, with its ``parameters``, computes and sends in an iteration of ``flops`` over all
    ranks; ``gemm_rate``: FLOP/s of a GEMM of this model on this rank."""
    stages, virtual = (
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size or 1,
    )
    micro = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    bubble = 1 + (stages - 1) / (micro * virtual)
    recomputed = args.recompute_granularity == "full"
    flops = flops / args.world_size * (4 / 3 if recomputed else 1)
    computation = flops / gemm_rate * COMPUTATION_OVER_GEMMS * bubble
    messages = (
        *_tensor_parallel(args, micro, bubble, flops / gemm_rate / 3, recomputed),
        *_data_parallel(args, parameters, computation / bubble / micro),
        *_pipeline_parallel(args, micro * virtual, computation / micro / virtual),
        *_expert_parallel(args, micro * bubble, gemm_rate, computation / bubble / micro),
        *_context_parallel(args, micro * bubble),
    )
    return Workload(computation, messages)


def activations(args: Namespace) -> tuple[int, int, int]:
    """``[tokens, samples, channels]`` of a micro-batch on a tensor-parallel group."""
    return args.seq_length // args.context_parallel_size, args.micro_batch_size, args.hidden_size


def _tensor_parallel(
    args: Namespace, micro: int, bubble: float, weight_gemms: float, recomputed: bool
) -> list[MessageKind]:
    """Two sums a layer and direction, one of an expert layer without shared experts: what ranks that share an
    expert send is ``_expert_parallel``'s. In the backward pass they overlap with weight gradients, which take
    ``weight_gemms`` seconds an iteration."""
    if args.tensor_model_parallel_size == 1:
        return []
    layers = -(-args.num_layers // args.pipeline_model_parallel_size)
    alone = (
        0 if args.num_experts and args.moe_shared_expert_intermediate_size else _expert_layers(args)
    )
    pairs = 2 * layers - alone + 1  # the embedding's forward, the output layer's backward
    count, overlap = pairs * micro, weight_gemms / (pairs * micro)

    def message(direction: str, operation: str, many: float, overlap: float = 0.0) -> MessageKind:
        sent = activations(args), args.params_dtype, many * bubble, overlap
        return MessageKind("tensor_parallel", f"tp.{direction}", operation, *sent)

    forward = count * (2 if recomputed else 1)
    if not args.sequence_parallel:
        return [
            message("forward", "all_reduce", forward),
            message("backward", "all_reduce", count, overlap),
        ]
    return [
        message("forward", "reduce_scatter", forward),
        message("forward", "all_gather", forward),
        message("backward", "reduce_scatter", count, overlap),
        # of the output's gradient; the input is gathered once more, while the input gradient is computed
        message("backward", "all_gather", 2 * count, overlap / 2),
    ]


def _data_parallel(args: Namespace, parameters: int, micro_batch: float) -> list[MessageKind]:
    """Buckets, which may overlap with the last micro-batch's backward and the next one's forward pass; a
    micro-batch takes ``micro_batch`` seconds, forward and backward."""
    every, instances = (
        args.data_parallel_size * args.context_parallel_size,
        args.num_distributed_optimizer_instances,
    )
    if every == 1 or not parameters:
        return []
    bucket, ranks = parameters, every // instances
    if args.overlap_grad_reduce:
        bucket = min(parameters, args.ddp_bucket_size or max(40_000_000, 1_000_000 * every))
    values = -(-min(bucket, PROBE_VALUES) // ranks) * ranks
    count = parameters / values
    dtype = torch.float32 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype

    def message(
        traffic: str, operation: str, dtype: torch.dtype, overlap: float, values: int = values
    ) -> MessageKind:
        sent = (values,), dtype, count, overlap / count
        last = (
            min(count, bucket * count / parameters) if overlap else 0.0
        )  # nothing is computed meanwhile
        return MessageKind("data_parallel", traffic, operation, *sent, last)

    overlap = micro_batch * 2 / 3 if args.overlap_grad_reduce else 0.0
    found = [message("dp.gradient", "gradients", dtype, overlap)] if ranks > 1 else []
    if instances > 1:
        found.append(message("dp.outer", "outer", dtype, overlap, values // ranks))
    if args.use_distributed_optimizer and ranks > 1:
        overlap = micro_batch / 3 if args.overlap_param_gather else 0.0
        found.append(message("dp.weight", "weights", args.params_dtype, overlap))
    return found


def _pipeline_parallel(args: Namespace, chunks: int, chunk: float) -> list[MessageKind]:
    """Between two stages a micro-batch's activations and another's gradients cross each other: in 1F1B's
    steady state twice a micro-batch at an inner stage; before and after it a message passes every boundary.

    Args:
        chunks: micro-batches times virtual stages.
        chunk: seconds of one of them, forward and backward.
    """
    stages = args.pipeline_model_parallel_size
    if stages == 1:
        return []
    tokens, samples, channels = activations(args)
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    count = (chunks - 1) * min(2, stages - 1) + 2 * (stages - 1)
    overlap = chunk / 2 if args.overlap_p2p_comm else 0.0
    # One exchange is timed with activations going round and one with gradients; each counts a half.
    return [
        MessageKind(
            *("pipeline_parallel", f"pp.{direction}", "exchange", (tokens, samples, channels)),
            *(args.params_dtype, count / 2, overlap),
        )
        for direction in ("forward", "backward")
    ]


def _expert_layers(args: Namespace) -> int:
    """Layers of a pipeline stage whose MLP is experts."""
    if args.num_experts is None:
        return 0
    every = args.moe_layer_freq
    pattern = every if isinstance(every, list) else [i % every == 0 for i in range(args.num_layers)]
    return -(-sum(map(bool, pattern)) // args.pipeline_model_parallel_size)


def _expert_parallel(
    args: Namespace, micro: float, gemm_rate: float, micro_batch: float
) -> list[MessageKind]:
    """Four legs a layer: tokens to their experts and back, and their gradients, spread evenly where none are
    dropped; probabilities and counts are left out. They overlap with another micro-batch's layers
    (``--overlap-moe-expert-parallel-comm``), with shared experts in the dispatcher, or with
    nothing. ``micro`` includes a pipeline's bubbles, here and for context parallelism; a micro-batch takes
    ``micro_batch`` seconds.
    """
    layers = _expert_layers(args)
    if not layers or args.moe_token_dispatcher_type == "flex":
        return []  # it sends in another way, which cannot be timed: the config's check says how
    tokens, samples, channels = activations(args)
    tokens *= samples
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    width, backward = args.moe_latent_size or channels, layers * micro
    forward = backward * (2 if _recomputes(args, "moe") else 1)
    dtype = args.params_dtype
    outputs = _ROUTER_DTYPES.get(args.moe_router_dtype, dtype)

    def gathered(dimension: str, traffic: str, rows: int, unequal: bool) -> list[MessageKind]:
        """A gather there, a sum back in the probabilities' dtype; their gradients the other way round."""
        return [
            MessageKind(
                dimension,
                f"{traffic}.{way}",
                operation,
                (rows, width),
                sent,
                count,
                unequal=unequal,
            )
            for way, operation, sent, count in (
                ("forward", "gather_tokens", dtype, forward),
                ("forward", "sum_tokens", outputs, forward),
                ("backward", "gather_tokens", outputs, backward),
                ("backward", "sum_tokens", dtype, backward),
            )
        ]

    if args.moe_token_dispatcher_type == "allgather":
        ranks = ExpertParallelConfig.ranks(args)
        return gathered("expert_parallel", "ep", tokens * ranks, False) if ranks > 1 else []
    rows, padded = tokens * args.moe_router_topk, args.moe_pad_expert_input_to_capacity
    if args.moe_expert_capacity_factor is not None:
        places = args.num_experts * get_capacity(
            rows, args.num_experts, args.moe_expert_capacity_factor
        )
        rows = places if padded else min(rows, places)
    ranks, sharing = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    rows = -(-rows // ranks) * ranks
    found = []
    if ranks > 1:
        overlaps, alone = (0.0, 0.0), 0
        if args.overlap_moe_expert_parallel_comm:
            layer = micro_batch * args.pipeline_model_parallel_size / args.num_layers
            overlaps = (
                layer / 3,
                layer / 6,
            )  # half of another one's backward pass, half of its forward pass
            alone = (
                2 * layers
            )  # of the first micro-batch's forward pass, of the last one's backward pass
        elif args.moe_shared_expert_overlap:
            products = 2 * tokens * channels * args.moe_shared_expert_intermediate_size
            overlap = products * (3 if args.swiglu else 2) / gemm_rate
            overlaps = overlap / 2, overlap
        found = [
            MessageKind(
                *(
                    "expert_parallel",
                    f"ep.{way}",
                    "all_to_all",
                    (rows, width),
                    dtype,
                    2 * count,
                    overlap,
                    alone,
                ),
                unequal=not padded,
            )
            for way, count, overlap in zip(
                ("forward", "backward"), (forward, backward), overlaps, strict=True
            )
        ]
    if sharing > 1:
        found += gathered("tensor_parallel", "tp", rows * sharing, not padded)
    return found


def _context_parallel(args: Namespace, micro: float) -> list[MessageKind]:
    """Keys and values of a layer are gathered, their gradients summed; they overlap with nothing."""
    if args.context_parallel_size == 1 or args.transformer_impl != "local":
        return []  # Transformer Engine's ring cannot be timed: the config's check says so
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    kept = 2 * args.kv_channels * max(groups // args.tensor_model_parallel_size, 1)
    if args.multi_latent_attention:
        width = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
        kept = heads // args.tensor_model_parallel_size * width
    shape = args.seq_length, args.micro_batch_size, kept
    count = -(-args.num_layers // args.pipeline_model_parallel_size) * micro
    again = 2 if _recomputes(args, "core_attn") else 1
    sent = shape, args.params_dtype
    return [
        MessageKind("context_parallel", "cp.forward", "all_gather", *sent, count * again),
        MessageKind("context_parallel", "cp.backward", "reduce_scatter", *sent, count),
    ]


def _recomputes(args: Namespace, part: str) -> bool:
    """Whether the backward pass runs a part's forward again, sends included."""
    if args.recompute_granularity != "selective":
        return args.recompute_granularity == "full"
    return part in (args.recompute_modules or ["core_attn"])
