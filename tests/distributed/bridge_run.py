"""A tiny run of Megatron-Bridge on CPU processes.

The recipe is that of examples/bridge.py, with torch-native layers in place of Transformer Engine's.
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
    parser.add_argument("--folder", help="of checkpoints and TensorBoard's events")
    parser.add_argument(
        "--from-iteration", type=int, help="go on from this checkpoint, and save nothing"
    )
    return parser.parse_args()


def tiny_config(arguments: argparse.Namespace):
    """Return the recipe's configuration with a tiny model, on CPU processes over gloo."""
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
        "ledger": callback.compression.ledger.rows(),
    }
    print("RESULT", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
