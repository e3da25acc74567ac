"""What ``resolve``, the configs' checks and ``--compression auto`` read of Megatron's validated arguments."""

import argparse
from types import SimpleNamespace

import torch

from megatron.compression.flags import add_flags

MEGATRON = dict(
    **dict(
        transformer_impl="local", num_layers=4, hidden_size=256, seq_length=64, micro_batch_size=2
    ),
    **dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, context_parallel_size=1),
    **dict(data_parallel_size=1, sequence_parallel=False, num_experts=None, cuda_graph_impl="none"),
    **dict(
        cuda_graph_modules=[], cuda_graph_warmup_steps=3, overlap_p2p_comm=False, log_interval=100
    ),
    **dict(overlap_param_gather=False, moe_pad_expert_input_to_capacity=False),
    **dict(
        use_distributed_optimizer=False,
        bf16=True,
        fp16=False,
        num_distributed_optimizer_instances=1,
    ),
    **dict(use_precision_aware_optimizer=False, optimizer_cuda_graph=False, rerun_mode="disabled"),
    **dict(use_torch_fsdp2=False),
    **dict(attention_dropout=0.0, recompute_granularity=None, recompute_modules=None),
    **dict(attention_backend=None, hidden_dropout=0.0),
    **dict(save=None, load=None, ckpt_format="torch_dist", train_iters=100, train_samples=None),
)


EXPERTS = dict(
    **dict(
        num_experts=8,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        moe_latent_size=None,
    ),
    **dict(moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend="deepep"),
)
"""What a run with experts has besides."""


def parsed(*flags: str, **megatron) -> argparse.Namespace:
    """Our flags as they are parsed, beside Megatron's at the values of a small tensor-parallel run."""
    parser = add_flags(argparse.ArgumentParser())
    return parser.parse_args(flags, SimpleNamespace(**{**MEGATRON, **megatron}))


def megatron(**changes) -> argparse.Namespace:
    """Megatron's arguments as far as an iteration's messages follow from them: 8 layers of 4096, TP 4."""
    given = dict(
        **dict(
            world_size=4, tensor_model_parallel_size=4, virtual_pipeline_model_parallel_size=None
        ),
        **dict(
            num_layers=8,
            hidden_size=4096,
            seq_length=2048,
            micro_batch_size=4,
            global_batch_size=16,
        ),
        **dict(
            params_dtype=torch.bfloat16,
            overlap_grad_reduce=False,
            ddp_bucket_size=None,
            swiglu=False,
        ),
        **dict(accumulate_allreduce_grads_in_fp32=True),
    )
    return argparse.Namespace(**{**MEGATRON, **given, **changes})


def experts(**changes) -> argparse.Namespace:
    """8 experts, 2 for a token, in each of 8 layers, EP 4."""
    given = dict(
        **dict(expert_model_parallel_size=4, tensor_model_parallel_size=1, data_parallel_size=4),
        **dict(
            moe_router_topk=2,
            moe_router_dtype=None,
            moe_expert_capacity_factor=None,
            moe_layer_freq=1,
        ),
        **dict(moe_shared_expert_intermediate_size=None, moe_shared_expert_overlap=False),
        **dict(overlap_moe_expert_parallel_comm=False),
    )
    return megatron(**{**EXPERTS, **given, **changes})
