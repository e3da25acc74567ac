"""Train a small GPT in Megatron-Bridge with compressed communication.

    torchrun --nproc-per-node 2 examples/bridge.py --tensor 2 --tp int6
    torchrun --nproc-per-node 2 examples/bridge.py --expert 2 --ep int8 --dp sdp4bit

Two lines of it are this project's: the import of ``bridge``, and ``bridge.attach`` among the
callbacks of ``pretrain``. The recipe is Megatron-Bridge's smallest, on mock data. Any other recipe
takes the same lines.
"""

import argparse
import sys

try:
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed: pip install -e '.[bridge]'")

from megatron.compression import bridge


def config(
    tensor: int = 1, pipeline: int = 1, expert: int = 1, iterations: int = 20
) -> ConfigContainer:
    """Return the recipe, for a layout and a length.

    Args:
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        expert: expert-parallel size; above 1 the model is a mixture of 8 experts.
        iterations: length of the training.
    """
    cfg = vanilla_gpt_pretrain_config()

    # A model that fits any GPU. Its tensor-parallel messages are 8 MiB (1024 tokens x 4 sequences x
    # 1024 channels in bf16); smaller ones go uncompressed, unless bridge.attach is given min_mb.
    model = cfg.model
    model.num_layers = 4
    model.hidden_size = 1024
    model.ffn_hidden_size = 4096
    model.num_attention_heads = 16
    model.seq_length = 1024
    cfg.dataset.seq_length = 1024
    cfg.train.micro_batch_size = 4
    cfg.train.global_batch_size = 8

    # How it is spread over the GPUs.
    model.tensor_model_parallel_size = tensor
    model.sequence_parallel = tensor > 1
    model.pipeline_model_parallel_size = pipeline
    model.expert_model_parallel_size = expert
    if expert > 1:
        model.num_moe_experts = 8
        model.moe_router_topk = 2
        model.moe_ffn_hidden_size = 1024
        model.moe_token_dispatcher_type = "alltoall"
        model.moe_grouped_gemm = True

    # A short run that logs often and saves nothing.
    cfg.train.train_iters = iterations
    cfg.scheduler.lr_warmup_iters = 2
    cfg.scheduler.lr_decay_iters = iterations
    cfg.validation.eval_iters = 0
    cfg.logger.log_interval = 5
    cfg.logger.tensorboard_dir = None
    cfg.checkpoint.save = None
    cfg.checkpoint.load = None
    return cfg


def main() -> None:
    """Train, and print Megatron-Bridge's log with a line of what was sent at each interval."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tensor", type=int, default=1, help="tensor-parallel size")
    add("--pipeline", type=int, default=1, help="pipeline-parallel size")
    add("--expert", type=int, default=1, help="expert-parallel size")
    add("--tp", default="none", help="codec between tensor-parallel ranks, such as int8")
    add("--dp", default="none", help="codec between data-parallel ranks, such as sdp4bit")
    add("--pp", default="none", help="codec between pipeline stages, such as int8")
    add("--ep", default="none", help="codec of tokens on their way to experts, such as int8")
    add("--iterations", type=int, default=20)
    options = parser.parse_args()

    cfg = config(options.tensor, options.pipeline, options.expert, options.iterations)
    # attach() comes before pretrain(), which builds the model from cfg.
    compression = bridge.attach(cfg, tp=options.tp, dp=options.dp, pp=options.pp, ep=options.ep)
    pretrain(cfg, forward_step, callbacks=[compression])


if __name__ == "__main__":
    main()
