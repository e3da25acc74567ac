"""Megatron's validated arguments that ``resolve``, the configs' checks and ``auto`` read."""

import argparse
from types import SimpleNamespace

import torch

from megatron.compression.flags import add_flags

MEGATRON = dict(
    # model and batch
    transformer_impl="local",
    num_layers=4,
    hidden_size=256,
    seq_length=64,
    micro_batch_size=2,
    num_experts=None,
    attention_backend=None,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    moe_pad_expert_input_to_capacity=False,
    # parallelism
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    data_parallel_size=1,
    sequence_parallel=False,
    overlap_p2p_comm=False,
    overlap_param_gather=False,
    # optimizer and precision
    bf16=True,
    fp16=False,
    use_torch_fsdp2=False,
    use_distributed_optimizer=False,
    num_distributed_optimizer_instances=1,
    use_precision_aware_optimizer=False,
    optimizer_cuda_graph=False,
    # CUDA graphs and recomputation
    cuda_graph_impl="none",
    cuda_graph_modules=[],
    cuda_graph_warmup_steps=3,
    recompute_granularity=None,
    recompute_modules=None,
    # the run
    rerun_mode="disabled",
    log_interval=100,
    save=None,
    load=None,
    ckpt_format="torch_dist",
    train_iters=100,
    train_samples=None,
)
"""A small run with tensor parallelism over two ranks."""


EXPERTS = dict(
    num_experts=8,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
    moe_latent_size=None,
    moe_token_dispatcher_type="alltoall",
    moe_flex_dispatcher_backend="deepep",
)
"""Arguments that a run with experts has besides."""


def parsed(*flags: str, **megatron) -> argparse.Namespace:
    """Return this project's flags as they are parsed, beside Megatron's arguments.

    Args:
        flags: words of the command line, such as ``"--tp-compression", "int8"``.
        megatron: arguments of Megatron that differ from ``MEGATRON``.
    """
    parser = add_flags(argparse.ArgumentParser())
    return parser.parse_args(flags, SimpleNamespace(**{**MEGATRON, **megatron}))


def megatron(**changes) -> argparse.Namespace:
    """Return the arguments of a model of 8 layers of 4096 channels at TP 4.

    They are those that an iteration's messages follow from: 4 micro-batches of 4 x 2048 tokens.
    """
    arguments = dict(
        world_size=4,
        tensor_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=None,
        num_layers=8,
        hidden_size=4096,
        seq_length=2048,
        micro_batch_size=4,
        global_batch_size=16,
        params_dtype=torch.bfloat16,
        swiglu=False,
        overlap_grad_reduce=False,
        ddp_bucket_size=None,
        accumulate_allreduce_grads_in_fp32=True,
    )
    return argparse.Namespace(**{**MEGATRON, **arguments, **changes})


def experts(**changes) -> argparse.Namespace:
    """Return the arguments of that model at EP 4: 8 experts in each layer, 2 for a token."""
    arguments = dict(
        expert_model_parallel_size=4,
        tensor_model_parallel_size=1,
        data_parallel_size=4,
        moe_router_topk=2,
        moe_router_dtype=None,
        moe_expert_capacity_factor=None,
        moe_layer_freq=1,
        moe_shared_expert_intermediate_size=None,
        moe_shared_expert_overlap=False,
        overlap_moe_expert_parallel_comm=False,
    )
    return megatron(**{**EXPERTS, **arguments, **changes})
