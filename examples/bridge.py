"""A small GPT in Megatron-Bridge with compressed communication; two lines of it are this project's.

torchrun --nproc-per-node 2 examples/bridge.py --tensor 2 --tp int6
torchrun --nproc-per-node 2 examples/bridge.py --expert 2 --ep int8 --dp sdp4bit

The recipe is Megatron-Bridge's smallest, on mock data; any other is changed in the same way.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    """The recipe, with a layout and a length of one's own; experts where they are shared out."""
    cfg = vanilla_gpt_pretrain_config()
    model, sequence = cfg.model, 1024
    model.num_layers, model.hidden_size, model.num_attention_heads = 4, 1024, 16
    model.ffn_hidden_size, model.seq_length, cfg.dataset.seq_length = 4096, sequence, sequence
    model.tensor_model_parallel_size, model.sequence_parallel = tensor, tensor > 1
    model.pipeline_model_parallel_size, model.expert_model_parallel_size = pipeline, expert
    if expert > 1:
        model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size = 8, 2, 1024
        model.moe_token_dispatcher_type, model.moe_grouped_gemm = "alltoall", True
    # Tensor-parallel messages are 8 MiB here; smaller ones go uncompressed unless min_mb says otherwise.
    cfg.train.train_iters, cfg.train.micro_batch_size, cfg.train.global_batch_size = (
        iterations,
        4,
        8,
    )
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 2, iterations
    cfg.validation.eval_iters = 0
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 5, None
    cfg.checkpoint.save = cfg.checkpoint.load = None
    return cfg


def main() -> None:
    """Train, and print Megatron-Bridge's log with a line of ours at each interval."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name}-parallel size")
    for name in ("tp", "dp", "pp", "ep"):
        parser.add_argument(f"--{name}", default="none", help="codec of its traffic")
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args()
    cfg = config(given.tensor, given.pipeline, given.expert, given.iterations)
    codecs = {name: getattr(given, name) for name in ("tp", "dp", "pp", "ep")}
    pretrain(cfg, forward_step, callbacks=[bridge.attach(cfg, **codecs)])


if __name__ == "__main__":
    main()
