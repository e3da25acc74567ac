"""What ``resolve`` and the configs' checks read of Megatron's validated arguments."""

import argparse
from types import SimpleNamespace

from megatron.compression.flags import add_flags

MEGATRON = dict(
    **dict(transformer_impl="local", num_layers=4, hidden_size=256, seq_length=64, micro_batch_size=2),
    **dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, context_parallel_size=1),
    **dict(data_parallel_size=1, sequence_parallel=False, num_experts=None, cuda_graph_impl="none"),
    **dict(use_distributed_optimizer=False, bf16=True, fp16=False, num_distributed_optimizer_instances=1),
    **dict(use_precision_aware_optimizer=False, optimizer_cuda_graph=False, rerun_mode="disabled"),
    **dict(attention_dropout=0.0, recompute_granularity=None, recompute_modules=None),
    **dict(attention_backend=None, hidden_dropout=0.0),
    **dict(save=None, load=None, ckpt_format="torch_dist", train_iters=100, train_samples=None),
)


def parsed(*flags: str, **megatron) -> argparse.Namespace:
    """Our flags as they are parsed, beside Megatron's at the values of a small tensor-parallel run."""
    parser = add_flags(argparse.ArgumentParser())
    return parser.parse_args(flags, SimpleNamespace(**{**MEGATRON, **megatron}))
