"""A training loop over megatron-core alone, like the one of its quick start: nothing of megatron.training.

Compression takes four lines: ``attach``, ``attach_wrapped``, ``step``, and its state in the checkpoint.
"""

import itertools
import os
import sys
from pathlib import Path

import torch

from megatron import host

host.install(training=False)

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron.compression import CompressionConfig, attach  # noqa: E402
from megatron.compression.data_parallel.config import DataParallelConfig  # noqa: E402
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig  # noqa: E402
from megatron.compression.tensor_parallel.config import TensorParallelConfig  # noqa: E402

VOCABULARY, SEQUENCE, SAMPLES, MICRO_BATCHES = 96, 32, 2, 2
COMPRESSED = CompressionConfig(
    tensor_parallel=TensorParallelConfig(compression="int6", min_mb=0.0),
    pipeline_parallel=PipelineParallelConfig(compression="int8"),
    data_parallel=DataParallelConfig(compression="int8", weights="int8"),
    start_iteration=1,
)


class Loop:
    """Model, optimizer and data of one rank.

    Args:
        tensor, pipeline: parallel sizes; the other ranks are data-parallel.
        compression: what is compressed.
    """

    def __init__(self, tensor: int, pipeline: int, compression: CompressionConfig) -> None:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        torch.manual_seed(123)
        self.config = TransformerConfig(
            **dict(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True),
            **dict(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline),
            **dict(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16),
            **dict(masked_softmax_fusion=False, persist_layer_norm=False),
            **dict(hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False),
        )
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        self.compression = attach([model], compression)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(self.config, ddp_config, Float16Module(self.config, model))
        self.compression.attach_wrapped([self.model])
        optimizer_config = OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def batches(self, iteration: int):
        """Random tokens, the same on all ranks of one data-parallel rank."""
        for micro_batch in range(MICRO_BATCHES):
            seed = (iteration * MICRO_BATCHES + micro_batch) * 8 + parallel_state.get_data_parallel_rank()
            generator = torch.Generator().manual_seed(seed)
            yield torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)

    def forward_step(self, batches, model):
        """As megatron-core's schedules want it."""
        tokens = next(batches)
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    def iterate(self, iteration: int) -> float | None:
        """One training iteration. Returns: the loss, on the last pipeline stage."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=itertools.chain(self.batches(iteration)),
            model=[self.model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        self.optimizer.step()
        self.compression.step()
        return sum(float(one["loss"]) for one in losses) / MICRO_BATCHES if losses else None

    def state(self, is_loading: bool = False) -> dict:
        """What a checkpoint holds."""
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
        )
        return {"model": model, "optimizer": optimizer, "compression": self.compression.state()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        dist_checkpointing.save(self.state(), str(folder))

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        loaded = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.compression.load_state(loaded["compression"])


def main() -> None:
    """Train on one process and say what of megatron.training was loaded."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}")
    loop = Loop(1, 1, COMPRESSED)
    losses = [loop.iterate(0) for _ in range(3)]
    assert losses[2] < losses[0], losses
    print("training:", sorted(name for name in sys.modules if name.startswith("megatron.training")))
    os._exit(0)


if __name__ == "__main__":
    main()
