"""What a run sends in an iteration, derived from Megatron's arguments: shapes, counts, what hides them."""

from argparse import Namespace
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron.compression.auto.predict import Message, computation_seconds
from megatron.compression.expert_parallel.config import expert_ranks

PROBE_VALUES = 2**26
"""Of a gradient bucket at most so many values are sent for a timing, more than Megatron's buckets have: a
codec's launches count as in training. More take proportionally longer."""

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Workload:
    """An iteration of one rank."""

    computation: float
    """Seconds without communication, pipeline bubbles included."""
    messages: tuple[Message, ...]


def workload(args: Namespace, parameters: int, flops: float, gemm_rate: float) -> Workload:
    """What this rank computes and sends in an iteration.

    Args:
        args: Megatron's, validated.
        parameters: of this rank.
        flops: of an iteration over all ranks.
        gemm_rate: FLOP/s of a GEMM of this model on this rank.
    """
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    micro = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    bubble = 1 + (stages - 1) / (micro * virtual)
    recomputed = args.recompute_granularity == "full"
    flops = flops / args.world_size * (4 / 3 if recomputed else 1)
    computation = computation_seconds(flops, gemm_rate, bubble)
    messages = (
        *_tensor_parallel(args, micro, bubble, flops / gemm_rate / 3, recomputed),
        *_data_parallel(args, parameters, computation / bubble / micro),
        *_pipeline_parallel(args, micro * virtual, computation / micro / virtual),
        *_expert_parallel(args, micro * bubble, gemm_rate),
        *_context_parallel(args, micro * bubble),
    )
    return Workload(computation, messages)


def activations(args: Namespace) -> tuple[int, int, int]:
    """``[tokens, samples, channels]`` of a micro-batch on a tensor-parallel group."""
    return args.seq_length // args.context_parallel_size, args.micro_batch_size, args.hidden_size


def _tensor_parallel(
    args: Namespace, micro: int, bubble: float, weight_gemms: float, recomputed: bool
) -> list[Message]:
    """Two sums a layer and direction, one of an expert layer without shared experts: what ranks that share an
    expert send is ``_expert_parallel``'s. In the backward pass they run behind weight gradients.

    Args:
        weight_gemms: seconds of an iteration's weight gradients.
    """
    if args.tensor_model_parallel_size == 1:
        return []
    layers = -(-args.num_layers // args.pipeline_model_parallel_size)
    alone = 0 if args.num_experts and args.moe_shared_expert_intermediate_size else _expert_layers(args)
    pairs = 2 * layers - alone + 1  # the embedding's forward, the output layer's backward
    count, hidden = pairs * micro, weight_gemms / (pairs * micro)

    def message(direction: str, operation: str, many: float, behind: float = 0.0) -> Message:
        shape = activations(args)
        traffic = f"tp.{direction}"
        return Message("tensor_parallel", traffic, operation, shape, args.params_dtype, many * bubble, behind)

    forward = count * (2 if recomputed else 1)
    if not args.sequence_parallel:
        return [message("forward", "all_reduce", forward), message("backward", "all_reduce", count, hidden)]
    return [
        message("forward", "reduce_scatter", forward),
        message("forward", "all_gather", forward),
        message("backward", "reduce_scatter", count, hidden),
        # of the output's gradient; the input is gathered once more, behind the input gradient's GEMM
        message("backward", "all_gather", 2 * count, hidden / 2),
    ]


def _data_parallel(args: Namespace, parameters: int, micro_batch: float) -> list[Message]:
    """Buckets; overlapped, behind the last micro-batch's backward and the next one's forward pass.

    Args:
        micro_batch: seconds of a micro-batch, forward and backward.
    """
    ranks = args.data_parallel_size * args.context_parallel_size
    if ranks == 1 or not parameters:
        return []
    bucket = parameters
    if args.overlap_grad_reduce:
        bucket = min(parameters, args.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks))
    values = -(-min(bucket, PROBE_VALUES) // ranks) * ranks
    count = parameters / values
    dtype = torch.float32 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype

    def message(traffic: str, operation: str, dtype: torch.dtype, overlapped: bool, behind: float) -> Message:
        if not overlapped:
            return Message("data_parallel", traffic, operation, (values,), dtype, count)
        least = min(count, bucket / values)  # the last bucket has nothing left to run behind
        return Message("data_parallel", traffic, operation, (values,), dtype, count, behind / count, least)

    found = [message("dp.gradient", "gradients", dtype, args.overlap_grad_reduce, micro_batch * 2 / 3)]
    if args.use_distributed_optimizer:
        behind = micro_batch / 3
        found.append(message("dp.weight", "weights", args.params_dtype, args.overlap_param_gather, behind))
    return found


def _pipeline_parallel(args: Namespace, chunks: int, chunk: float) -> list[Message]:
    """Between two stages a micro-batch's activations and another's gradients cross each other.

    In 1F1B's steady state an inner stage has two such exchanges a micro-batch, with its two neighbours, and
    waits for both; before and behind it a message passes every boundary.

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
    behind = chunk / 2 if args.overlap_p2p_comm else 0.0
    # One exchange is timed with activations going round and one with gradients; each counts a half.
    return [
        Message(
            *("pipeline_parallel", f"pp.{direction}", "exchange", (tokens, samples, channels)),
            *(args.params_dtype, count / 2, behind),
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


def _expert_parallel(args: Namespace, micro: float, gemm_rate: float) -> list[Message]:
    """Four legs a layer: tokens to their experts and back, and their gradients. A router that drops none is
    taken to spread them evenly; probabilities and counts are left out.

    Nothing hides them but shared experts that run beside the dispatcher.

    Args:
        micro: micro-batches, a pipeline's bubbles included.
    """
    layers = _expert_layers(args)
    if not layers or args.moe_token_dispatcher_type == "flex" or args.overlap_moe_expert_parallel_comm:
        return []  # the latter two send in another way, which cannot be timed: the config's check says how
    tokens, samples, channels = activations(args)
    tokens *= samples
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    width, backward = args.moe_latent_size or channels, layers * micro
    forward = backward * (2 if _recomputes(args, "moe") else 1)
    dtype = args.params_dtype
    outputs = _ROUTER_DTYPES.get(args.moe_router_dtype, dtype)

    def gathered(dimension: str, traffic: str, rows: int, unequal: bool) -> list[Message]:
        """A gather there, a sum back in the probabilities' dtype; their gradients the other way round."""
        return [
            Message(dimension, f"{traffic}.{way}", operation, (rows, width), sent, count, unequal=unequal)
            for way, operation, sent, count in (
                ("forward", "gather_tokens", dtype, forward),
                ("forward", "sum_tokens", outputs, forward),
                ("backward", "gather_tokens", outputs, backward),
                ("backward", "sum_tokens", dtype, backward),
            )
        ]

    if args.moe_token_dispatcher_type == "allgather":
        ranks = expert_ranks(args)
        return gathered("expert_parallel", "ep", tokens * ranks, False) if ranks > 1 else []
    rows, padded = tokens * args.moe_router_topk, args.moe_pad_expert_input_to_capacity
    if args.moe_expert_capacity_factor is not None:
        places = args.num_experts * get_capacity(rows, args.num_experts, args.moe_expert_capacity_factor)
        rows = places if padded else min(rows, places)
    ranks, sharing = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    rows = -(-rows // ranks) * ranks
    found = []
    if ranks > 1:
        beside = 0.0
        if args.moe_shared_expert_overlap:
            products = 2 * tokens * channels * args.moe_shared_expert_intermediate_size
            beside = products * (3 if args.swiglu else 2) / gemm_rate
        found = [
            Message(
                *("expert_parallel", f"ep.{way}", "all_to_all", (rows, width), dtype, 2 * count, hidden),
                unequal=not padded,
            )
            for way, count, hidden in (("forward", forward, beside / 2), ("backward", backward, beside))
        ]
    if sharing > 1:
        found += gathered("tensor_parallel", "tp", rows * sharing, not padded)
    return found


def _context_parallel(args: Namespace, micro: float) -> list[Message]:
    """Keys and values of a layer are gathered, their gradients summed; nothing hides them.

    Args:
        micro: micro-batches, a pipeline's bubbles included.
    """
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
    return [
        Message("context_parallel", f"cp.{way}", operation, shape, args.params_dtype, many)
        for way, operation, many in (
            ("forward", "all_gather", count * again),
            ("backward", "reduce_scatter", count),
        )
    ]


def _recomputes(args: Namespace, part: str) -> bool:
    """Whether the backward pass runs a part's forward again, sends included."""
    if args.recompute_granularity != "selective":
        return args.recompute_granularity == "full"
    return part in (args.recompute_modules or ["core_attn"])
