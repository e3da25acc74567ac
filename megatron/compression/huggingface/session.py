"""Megatron's global state around a conversion: arguments, process groups, an empty model."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import destroy_global_vars
from megatron.training.models.gpt import GPTModelBuilder

from megatron.compression.huggingface.flags import add_qwen_arguments, as_arguments, tensor_parallel_size
from megatron.compression.huggingface.models import DenseModel, ModelError, megatron_flags
from megatron.compression.setup import add_arguments as add_compression_arguments
from megatron.compression.setup import complete
from megatron.compression.startup import entrypoint

PRECISION_FLAGS = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"], torch.float32: []}

TRACKER = "latest_checkpointed_iteration.txt"

# Needed by the parser, without effect on the weights: nothing is trained here.
_FILLERS = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--ckpt-format", "torch_dist"),
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "0", "--transformer-impl", "local"),
    *("--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng"),
]


@dataclass(frozen=True)
class Session:
    """A model ready to be filled or read."""

    args: Namespace
    chunks: list[torch.nn.Module]
    """This pipeline stage's, not wrapped."""
    groups: ProcessGroupCollection

    def save(self, folder: str) -> None:
        """Write a release checkpoint: weights alone, which training loads at iteration 0."""
        self.args.save = folder
        save_checkpoint(0, self.chunks, None, None, 0, release=True)

    def load(self, folder: str) -> None:
        """Read the weights of the newest checkpoint, saved at any parallel sizes."""
        self.args.load = folder
        load_checkpoint(self.chunks, None, None)


@contextlib.contextmanager
def conversion_session(
    model: DenseModel, dtype: torch.dtype, flags: list[str] | None = None
) -> Iterator[Session]:
    """Start Megatron, build the model with weights of no meaning, and take everything down again.

    A process group that is there already is used and left.

    Args:
        model, dtype: what to build, and of what the parameters are.
        flags: further Megatron flags: parallel sizes, ``--seq-length``, ``--transformer-impl``, ...
    Raises: ModelError: a dtype that Megatron cannot hold.
    """
    if dtype not in PRECISION_FLAGS:
        raise ModelError(f"weights of {dtype} are not covered; --dtype is bfloat16, float16 or float32")
    one_process = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "RANK": "0"}  # without torchrun
    for name, value in {**one_process, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    previous, sys.argv = sys.argv, [sys.argv[0], *_command_line(model, dtype, flags or [])]
    owns_process_group = not torch.distributed.is_initialized()
    try:
        args = entrypoint.parse_arguments(
            lambda parser: add_qwen_arguments(add_compression_arguments(parser))
        )
        training.initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = gpt_config_from_args(args)
        complete(config, args)
        config.transformer.perform_initialization = False
        chunks = GPTModelBuilder(config).build_distributed_models(
            groups, wrap_with_ddp=False, data_parallel_random_init=False
        )
        yield Session(args, unwrap_model(chunks), groups)
    finally:
        sys.argv = previous
        _take_down(owns_process_group)


def newest_iteration(load: str) -> Path:
    """The folder of a checkpoint's newest iteration.

    Raises: ModelError: there is no checkpoint.
    """
    tracker = Path(load) / TRACKER
    if not tracker.is_file():
        raise ModelError(f"--load {load}: {tracker} is missing, there is no Megatron checkpoint")
    newest = tracker.read_text().strip()
    folder = Path(load) / (newest if newest == "release" else f"iter_{int(newest):07d}")
    if not (folder / "metadata.json").is_file():
        raise ModelError(
            f"--load {load}: {folder} is no torch_dist checkpoint; save with --ckpt-format torch_dist"
        )
    return folder


def _command_line(model: DenseModel, dtype: torch.dtype, flags: list[str]) -> list[str]:
    """Fillers, then the model, then the caller's flags: the last of a kind wins."""
    tensor_parallel = tensor_parallel_size(flags)
    arguments = [*_FILLERS, "--seq-length", str(min(model.positions, 4096)), *PRECISION_FLAGS[dtype]]
    return [*arguments, *as_arguments(megatron_flags(model, tensor_parallel)), *flags]


def _take_down(owns_process_group: bool) -> None:
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    if owns_process_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
