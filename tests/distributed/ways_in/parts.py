"""Datasets, batches and the loss of somebody's entrypoint, over Megatron and nothing else."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import is_first_or_last_pipeline_stage


def train_valid_test_datasets_provider(sizes, vp_stage=None):
    """Made-up data, where a stage reads it."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def built_here() -> bool:
        return (
            is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0
        )

    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, built_here, config).build()


train_valid_test_datasets_provider.is_distributed = True


def get_batch(data_iterator, vp_stage):
    """The next micro-batch, from tensor-parallel rank 0."""
    args = get_args()
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(names)
    rank = mpu.get_tensor_model_parallel_rank()
    batch = {name: value.cuda() for name, value in next(data_iterator).items()} if rank == 0 else {}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )


def loss_func(loss_mask, losses):
    """Sum of the losses that count, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)]).clone()}


def forward_step(data_iterator, model):
    """A micro-batch forward."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])
