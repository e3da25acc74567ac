"""A model of Megatron's without a training run: to convert its weights, or to compare it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.global_vars import destroy_global_vars
from megatron.training.models.gpt import GPTModelBuilder

from megatron.compression.frontends.megatron_lm import entrypoint
from megatron.compression.frontends.megatron_lm.enable import add_arguments, complete
from megatron.compression.huggingface.models import add_qwen_arguments, expand

_FILLERS = """--mock-data --tokenizer-type NullTokenizer --ckpt-format torch_dist
    --micro-batch-size 1 --seq-length 16 --train-iters 1 --lr 0 --transformer-impl local
    --no-load-optim --no-load-rng
    --no-save-optim --no-save-rng"""
"""Flags that Megatron's parser asks for, without effect on weights."""
_PRECISION_FLAGS = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"], torch.float32: []}


@contextlib.contextmanager
def built_model(
    name: str, dtype: torch.dtype, flags: list[str] | None = None
) -> Iterator[SimpleNamespace]:
    """Build a model in Megatron's global state, with weights of no meaning; undo both at the end.

    A process group that is there already is used and left.

    Args:
        name: the model, as ``--qwen-model`` takes it.
        dtype: of its parameters.
        flags: further flags of Megatron's, which win.

    Yields:
        A namespace with ``args``, ``chunks`` and ``groups``.
    """
    # One process is its own job, unless torchrun has started it.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29400")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    # Later flags win: the caller's come last.
    words = ["--qwen-model", name, *_FILLERS.split(), *_PRECISION_FLAGS[dtype], *(flags or [])]
    command_line = sys.argv
    sys.argv = [sys.argv[0], *expand(words)[0]]
    owns_process_group = not torch.distributed.is_initialized()
    try:
        args = entrypoint.parse_arguments(lambda parser: add_qwen_arguments(add_arguments(parser)))
        training.initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = gpt_config_from_args(args)
        complete(config, args)
        # The weights are replaced, and random ones of a large model take minutes.
        config.transformer.perform_initialization = False
        chunks = GPTModelBuilder(config).build_distributed_models(
            groups, wrap_with_ddp=False, data_parallel_random_init=False
        )
        yield SimpleNamespace(args=args, chunks=unwrap_model(chunks), groups=groups)
    finally:
        sys.argv = command_line
        # So that another model can be built in this process.
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        if owns_process_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
