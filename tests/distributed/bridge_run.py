"""A tiny run of Megatron-Bridge on CPU processes: examples/bridge.py's recipe with torch-native layers."""

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


def main() -> None:
    """Train, and print a line of JSON: losses of each iteration, and this rank's ledger."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", type=json.loads, default={})
    parser.add_argument("--attach", type=json.loads, default={})
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--folder", help="of checkpoints and TensorBoard's events")
    parser.add_argument(
        "--from-iteration", type=int, help="go on from this checkpoint, and save nothing"
    )
    given = parser.parse_args()
    cfg = config(**given.layout, iterations=given.iterations)
    model = cfg.model
    model.transformer_impl, model.transformer_layer_spec = "local", block_spec
    model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size = (
        2,
        64,
        4,
        128,
    )
    model.seq_length = cfg.dataset.seq_length = 32
    model.gradient_accumulation_fusion = model.masked_softmax_fusion = model.persist_layer_norm = (
        False
    )
    model.bias_activation_fusion = model.bias_dropout_fusion = model.apply_rope_fusion = False
    model.cross_entropy_loss_fusion = False
    cfg.ddp.use_distributed_optimizer = True
    cfg.dist.distributed_backend = "gloo"
    cfg.tokenizer.vocab_size = 127
    cfg.train.micro_batch_size, cfg.train.global_batch_size = 2, 4
    cfg.logger.log_interval = 2
    if given.folder:
        cfg.checkpoint.load, cfg.checkpoint.save_interval = given.folder, 2
        cfg.checkpoint.save = None if given.from_iteration else given.folder
        cfg.checkpoint.ckpt_step = given.from_iteration
        cfg.logger.tensorboard_dir = f"{given.folder}/events"
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = lambda *_: None
    losses = []
    callback = bridge.attach(cfg, **given.attach)
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
