"""What our entrypoints give ``megatron.training.pretrain``: datasets, batches, the loss, the
forward step.

From ``gpt_dataset_config`` to ``forward_step`` this is what pretrain_gpt.py of the Megatron-LM
repository does, which the megatron-core wheel does not have: its behaviour is kept, so that a run's
losses are those of that script. Import it after ``megatron_lm.prepare()``: it loads
megatron.training.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import arguments, get_args, get_timers, get_tokenizer, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.compression.errors import InputError, raised_in
from megatron.compression.frontends.megatron_lm import enable
from megatron.compression.patches import loop

SPIKY_LOSS_FACTOR = 10
"""--check-for-spiky-loss: a loss this many times the largest seen is suspicious."""


def parse_arguments(
    add_arguments: Callable[[ArgumentParser], ArgumentParser] = enable.add_arguments,
) -> Namespace:
    """Parse and validate the command line: every Megatron-LM flag, and what `add_arguments` adds.

    Raises: InputError: an unknown flag; something that is not there, does not fit or is not served.
    """
    # Before the tokenizer is made of the arguments.
    loop.after_validating_arguments(check_supported_data)
    return arguments.parse_and_validate_args(add_arguments)


def check_supported_data(args: Namespace) -> None:
    """Refuse data flags of Megatron-LM that this entrypoint does not serve.

    Raises:
        InputError: one is set.
    """
    for name in ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is not supported by this entrypoint: remove the flag")


_SAME_NAME = (
    "split",
    "multiple_validation_sets",
    "full_validation",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "object_storage_cache_path",
    "data_parallel_size",
    "context_parallel_size",
)
"""Arguments whose name is the dataset's."""


def gpt_dataset_config(args: Namespace) -> GPTDatasetConfig:
    """The dataset's configuration from the command line."""
    # One blend that --split divides, or one for each split; the other is None.
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        **{name: getattr(args, name) for name in _SAME_NAME},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
    )


def _has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    """Return whether multi-token-prediction layers sit on this pipeline stage: they need tokens and
    labels."""
    return args.mtp_num_layers is not None and mtp_on_this_rank(
        mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def train_valid_test_datasets(sizes: tuple[int, int, int], vp_stage: int | None = None) -> list:
    """Build the train, validation and test sets (each may be None), with at least `sizes` samples.

    Every rank calls it; the data is built where a pipeline stage reads it, on tensor-parallel rank
    0.
    """
    args = get_args()

    def built_here() -> bool:
        # The first stage reads tokens, the last one labels; the other tensor-parallel ranks get
        # them by broadcast.
        reads = is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(args, vp_stage)
        return reads and mpu.get_tensor_model_parallel_rank() == 0

    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    # Also where nothing is built here: its cache is shared.
    config = gpt_dataset_config(args)
    return BlendedMegatronDatasetBuilder(dataset_class, sizes, built_here, config).build()


# Every rank must call the builder: it holds barriers between building the index and reading it.
train_valid_test_datasets.is_distributed = True


def get_batch(data_iterator, vp_stage: int | None = None) -> dict[str, torch.Tensor | None]:
    """The next micro-batch on this rank: tensor-parallel rank 0 reads it and broadcasts it to its
    group.

    Returns: tokens, labels, position_ids [b, s] int64, loss_mask [b, s] fp32, attention_mask [b, 1,
        s, s]
    bool; None for what this pipeline stage does not use.
    """
    args = get_args()
    mtp = _has_mtp(args, vp_stage)
    if not (is_first_or_last_pipeline_stage(vp_stage) or mtp):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        # The loader's tensors lie in pinned memory.
        batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    # Each context-parallel rank keeps two chunks of the sequence, an early and a late one.
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor):
    """(summed loss, number of tokens, {"lm loss": [summed loss, number of tokens]}) of [b, s] each.
    The schedule divides the first in place, hence the copy of what is logged."""
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    # In fp32 whatever the model computes in; masked tokens count nothing.
    loss = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    # The machine runs a suspicious iteration again, to tell a fault of the hardware from one of the
    # data.
    check = get_rerun_state_machine().validate_result
    if args.check_for_nan_in_loss_and_grad:
        check(loss, torch.isnan, "found NaN in the loss", tolerance=0.0, fatal=True)
        check(loss, torch.isinf, "found Inf in the loss", tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        large = partial(
            get_rerun_state_machine().is_unexpectedly_large,
            threshold=SPIKY_LOSS_FACTOR,
            context="loss",
        )
        check(loss, large, "spiky loss", tolerance=0.0, fatal=False)
    logged = torch.stack([loss.detach(), tokens.to(loss.dtype)]).clone()
    return loss, tokens, {"lm loss": logged}


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """One micro-batch forward. Returns: (per-token losses or the stage's output, the loss
    function).

    Args:
        return_schedule_plan: return the micro-batch's plan in place of its output, which the
            schedule of ``--overlap-moe-expert-parallel-comm`` executes node by node.
    """
    timers = get_timers()
    # Megatron's own names, which its log and its tools look for.
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),  # absent with --no-create-attention-mask-in-dataloader
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def train_to_the_end(pretrain: Callable[[], None]) -> None:
    """Call ``pretrain()``, destroy the process groups, also after an early exit of its loop, and
    leave, with its status. The exception's traceback would keep the data loaders' workers alive,
    which ignore the signal that ends them under --exit-signal-handler: the process would wait for
    them forever."""
    left_early = False
    status = None
    try:
        pretrain()
    except SystemExit as exit_:
        # Megatron's loop ends on all ranks at once; elsewhere one rank alone may leave.
        if not raised_in(exit_, "train"):
            raise
        left_early = True
        status = exit_.code
    # All ranks are here: nobody waits for a group that is gone.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if left_early:
        sys.exit(status)


def run(args: Namespace, model_config_cls: type[GPTModelConfig] = GPTModelConfig) -> None:
    """Build the configs from `args`, train, write the report, and leave the process groups."""
    model_config = gpt_config_from_args(args, model_config_cls=model_config_cls)
    enable.enable(args, model_config)
    # After enable, which completes the model's config.
    container = pretrain_cfg_container_from_args(args, model_config)
    model_type = ModelType.encoder_or_decoder
    train_to_the_end(
        lambda: training.pretrain(container, train_valid_test_datasets, model_type, forward_step)
    )
