"""A tiny run of Megatron-Bridge on CPU processes.

The recipe is that of examples/bridge.py, or with ``--qwen3-experts`` one of Megatron-Bridge's own
whose container names the flex dispatcher. Torch-native layers stand in for Transformer Engine's.
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import host
from scripts import _bridge

_bridge.name_version()
host.install()  # megatron-core is imported here, without the stand-in for Transformer Engine
_bridge.stand_in()

from megatron.bridge.training import setup  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402

from examples.bridge import config  # noqa: E402
from megatron.compression import bridge  # noqa: E402
from megatron.compression.patches import symbols  # noqa: E402
from megatron.compression.torch_native.spec import block_spec  # noqa: E402

symbols.hide("transformer_engine", "the stand-in was for imports")


def parse_arguments() -> argparse.Namespace:
    """Read the command line; layout and attach are JSON objects of keyword arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", type=json.loads, default={}, help="of examples.bridge.config")
    parser.add_argument("--attach", type=json.loads, default={}, help="of bridge.attach")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--qwen3-experts",
        action="store_true",
        help="the recipe of Qwen3-30B-A3B, with the sizes of a tiny checkpoint",
    )
    parser.add_argument("--folder", help="of checkpoints and TensorBoard's events")
    parser.add_argument(
        "--from-iteration", type=int, help="go on from this checkpoint, and save nothing"
    )
    return parser.parse_args()


def tiny_config(arguments: argparse.Namespace):
    """Return the recipe's configuration with a tiny model, on CPU processes over gloo."""
    if arguments.qwen3_experts:
        cfg = qwen3_experts(**arguments.layout, iterations=arguments.iterations)
    else:
        cfg = config(**arguments.layout, iterations=arguments.iterations)
    shrink(cfg.model)
    cfg.model.seq_length = 32
    cfg.dataset.seq_length = 32
    cfg.ddp.use_distributed_optimizer = True
    cfg.dist.distributed_backend = "gloo"
    cfg.tokenizer.vocab_size = 127
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 4
    cfg.logger.log_interval = 2
    if arguments.folder:
        cfg.checkpoint.load = arguments.folder
        cfg.checkpoint.save_interval = 2
        cfg.checkpoint.save = None if arguments.from_iteration else arguments.folder
        cfg.checkpoint.ckpt_step = arguments.from_iteration
        cfg.logger.tensorboard_dir = f"{arguments.folder}/events"
    return cfg


def qwen3_experts(expert: int, iterations: int):
    """Return Megatron-Bridge's recipe of Qwen3-30B-A3B as the package makes it, but for its length,
    its layout and the tokenizer, which would be downloaded.

    Args:
        expert: expert-parallel size; every other kind of parallelism has one rank.
        iterations: length of the training.
    """
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.recipes.qwen.h100.qwen3_moe import (
        qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config,
    )
    from megatron.core.transformer.enums import AttnBackend
    from transformers import Qwen3MoeConfig

    checkpoint = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=128,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoBridge.from_hf_pretrained = staticmethod(
        lambda *_, **__: AutoBridge.from_hf_config(checkpoint)
    )
    cfg = qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config()
    model = cfg.model
    model.tensor_model_parallel_size = 1
    model.sequence_parallel = False
    model.pipeline_model_parallel_size = 1
    model.expert_model_parallel_size = expert
    # These are for Transformer Engine's layers, or for a GPU.
    model.attention_backend = AttnBackend.auto
    model.moe_permute_fusion = False
    model.recompute_granularity = None
    model.recompute_method = None
    model.recompute_num_layers = None
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.tokenizer_model = None
    cfg.train.train_iters = iterations
    cfg.scheduler.lr_warmup_iters = 2
    cfg.scheduler.lr_decay_iters = iterations
    cfg.validation.eval_iters = 0
    cfg.logger.tensorboard_dir = None
    cfg.checkpoint.save = None
    cfg.checkpoint.load = None
    return cfg


def shrink(model) -> None:
    """Set a model's sizes and its layers, and turn off the fusions that need a GPU."""
    model.transformer_impl = "local"
    model.transformer_layer_spec = block_spec
    model.num_layers = 2
    model.hidden_size = 64
    model.num_attention_heads = 4
    model.ffn_hidden_size = 128
    model.persist_layer_norm = False
    model.gradient_accumulation_fusion = False
    model.masked_softmax_fusion = False
    model.bias_activation_fusion = False
    model.bias_dropout_fusion = False
    model.apply_rope_fusion = False
    model.cross_entropy_loss_fusion = False


def main() -> None:
    """Train, and print a line of JSON: losses of each iteration, and this rank's ledger."""
    arguments = parse_arguments()
    cfg = tiny_config(arguments)
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = lambda *_: None
    losses = []
    dispatcher_of_recipe = cfg.model.moe_token_dispatcher_type
    callback = bridge.attach(cfg, **arguments.attach)
    end = callback.on_train_step_end

    def on_train_step_end(self, context) -> None:
        losses.append({name: float(value) for name, value in (context.loss_dict or {}).items()})
        end(context)

    type(callback).on_train_step_end = on_train_step_end
    pretrain(cfg, forward_step, callbacks=[callback])
    row = {
        "rank": int(os.environ["RANK"]),
        "losses": losses,
        "dispatchers": [dispatcher_of_recipe, cfg.model.moe_token_dispatcher_type],
        "ledger": callback.compression.ledger.rows(),
    }
    print("RESULT", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
