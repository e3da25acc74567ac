"""What a run sends in an iteration, derived from Megatron's arguments: shapes, counts, what hides them."""

from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron.compression.auto.predict import Message, computation_seconds

PROBE_VALUES = 2**23
"""Of a gradient bucket at most so many values are sent for a timing: more take proportionally longer."""


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
    )
    return Workload(computation, messages)


def activations(args: Namespace) -> tuple[int, int, int]:
    """``[tokens, samples, channels]`` of a micro-batch on a tensor-parallel group."""
    return args.seq_length // args.context_parallel_size, args.micro_batch_size, args.hidden_size


def _tensor_parallel(
    args: Namespace, micro: int, bubble: float, weight_gemms: float, recomputed: bool
) -> list[Message]:
    """Two sums a layer and direction. In the backward pass they run behind weight gradients.

    Args:
        weight_gemms: seconds of an iteration's weight gradients.
    """
    if args.tensor_model_parallel_size == 1:
        return []
    layers = -(-args.num_layers // args.pipeline_model_parallel_size)
    pairs = 2 * layers + 1  # the embedding's forward, the output layer's backward
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
