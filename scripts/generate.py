#!/usr/bin/env python
"""Greedy text from a checkpoint of pretrain_gpt.py or pretrain_qwen.py, at its tensor-parallel size.

    torchrun --nproc-per-node 4 scripts/generate.py <the run's flags> --load checkpoints \\
        --prompt "def main(" --max-new-tokens 64 --json generated.json

Takes the flags of the run (model, tokenizer, parallel sizes, compression) and prints the text and what one
GPU sent for each new token. A checkpoint of another function (see --caat-net-sync-fraction) is refused.
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Needed by the parser and without effect here; the caller's flags come behind them and win.
FILLERS = [
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "0", "--eval-iters", "0"),
    *("--eval-interval", "1", "--mock-data"),
]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The flags of both entrypoints and those of this script."""
    from megatron.compression.huggingface.flags import add_qwen_arguments
    from megatron.compression.setup import add_arguments as add_compression_arguments

    group = add_qwen_arguments(add_compression_arguments(parser)).add_argument_group("generation")
    group.add_argument("--prompt", default="import ", help="text to continue")
    group.add_argument("--max-new-tokens", type=int, default=64, help="tokens to add at most")
    group.add_argument("--json", type=Path, help="write text, tokens and the ledger here")
    return parser


def check(args) -> None:
    """Refuse what the plain forward loop does not do.

    Raises:
        CompressionConfigError: with the flag and the fix.
    """
    from megatron.compression.errors import CompressionConfigError

    if args.load is None:
        raise CompressionConfigError("--load is missing: name the folder of a checkpoint")
    if not _is_there(args):
        step = f" --ckpt-step {args.ckpt_step}" if args.ckpt_step else ""
        raise CompressionConfigError(
            f"--load {args.load}{step}: no checkpoint there; name a run's --save folder"
        )
    for flag in ("pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(args, flag) > 1:
            raise CompressionConfigError(
                f"--{flag.replace('_', '-')} {getattr(args, flag)} is not covered here; a checkpoint in "
                "torch_dist format loads without it"
            )
    if args.sequence_parallel:
        raise CompressionConfigError(
            "--sequence-parallel is not covered here; the model is the same without it"
        )


def _is_there(args) -> bool:
    """Whether --load holds a checkpoint: without one Megatron would go on with random weights."""
    from megatron.training import checkpointing

    if args.ckpt_step:
        iteration, release = args.ckpt_step, False
    elif checkpointing.checkpoint_exists(args.load):
        iteration, release = checkpointing.read_metadata(
            checkpointing.get_checkpoint_tracker_filename(args.load)
        )
    else:
        return False
    return Path(
        checkpointing.get_checkpoint_name(args.load, iteration, release, return_base_dir=True)
    ).is_dir()


def generate(args) -> dict:
    """Build, load, generate; returns what --json holds."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_tokenizer, training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron.compression import setup
    from megatron.compression.errors import CompressionConfigError
    from megatron.compression.generation import generate_greedily

    model_config = gpt_config_from_args(args)
    ledger = setup.enable(args, model_config).ledger
    model_config.post_wrap_hooks.clear()  # data-parallel compression: there are no gradients here
    training.initialize_megatron()
    tokenizer = get_tokenizer()
    prompt = tokenizer.tokenize(args.prompt)
    if not 1 <= len(prompt) <= args.seq_length - args.max_new_tokens:
        raise CompressionConfigError(
            f"--prompt has {len(prompt)} tokens: with --max-new-tokens {args.max_new_tokens} it needs 1 to "
            f"{args.seq_length - args.max_new_tokens} of --seq-length {args.seq_length}"
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = GPTModelBuilder(model_config).build_distributed_models(
        groups, wrap_with_ddp=False, data_parallel_random_init=False
    )
    args.no_load_optim = args.no_load_rng = True
    # A run's flags may say that it began from other weights: then nothing is checked, and it is iteration 0.
    args.finetune, args.pretrained_checkpoint = False, None
    iteration, _ = load_checkpoint(chunks, None, None)
    # A start iteration in the flags says when training began to compress, not that this model does not.
    args.iteration = iteration
    ledger.evaluating = True
    tokens = generate_greedily(
        chunks[0],
        prompt,
        args.max_new_tokens,
        tokenizer.vocab_size,
        parallel_state.get_tensor_model_parallel_group(),
        ledger,
        end=tokenizer.eod,
    )
    sent = {
        traffic: sum(sent for sent, _ in kinds.values()) / len(tokens)
        for traffic, kinds in ledger.totals("eval").items()
    }
    return {
        "iteration": iteration,
        "prompt": args.prompt,
        "text": tokenizer.detokenize(tokens),
        "tokens": tokens,
        "bytes_sent_per_token": {traffic: size for traffic, size in sent.items() if size},
        "ledger": ledger.rows(),
    }


def main() -> None:
    """Generate on all ranks; rank 0 prints and writes."""
    from megatron.compression import preflight
    from megatron.compression.errors import one_line_errors

    preflight.prepare()  # before megatron.training is imported

    import torch.distributed as dist

    from megatron.compression.huggingface.flags import expand
    from megatron.compression.startup import entrypoint

    with one_line_errors():
        if any(word.split("=")[0] == "--qwen-model" for word in sys.argv):
            sys.argv[1:], _ = expand(sys.argv[1:])
        sys.argv[1:1] = FILLERS
        args = entrypoint.parse_arguments(add_arguments)
        check(args)
        result = generate(args)
    if dist.get_rank() == 0:
        print(f"{result['prompt']}{result['text']}")
        for channel, size in result["bytes_sent_per_token"].items():
            print(f"{channel}: {size:,.0f} bytes sent by one rank for a new token")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
