"""A training loop over megatron-core alone, like the one of its quick start: nothing of megatron.training.

torchrun --nproc-per-node 4 examples/own_loop.py --tensor 2 --iterations 20

Compression takes five lines: ``attach``, ``attach_wrapped``, ``step``, its state in the checkpoint, and
``summary``, which says at the end what was sent. Without a GPU the ranks are CPU processes.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import host

host.install(training=False)  # without a GPU: torch.cuda's stand-ins

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
    """Model, optimizer and data of one rank of ``tensor`` and ``pipeline`` parallel sizes; the others are
    data-parallel."""

    def __init__(self, tensor: int, pipeline: int, compression: CompressionConfig) -> None:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        torch.manual_seed(123)
        self.config = TransformerConfig(
            **dict(
                num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True
            ),
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
        model.cuda()
        self.compression = attach([model], compression)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(
            self.config, ddp_config, Float16Module(self.config, model)
        )
        self.compression.attach_wrapped([self.model])
        optimizer_config = OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def batches(self, iteration: int):
        """Random tokens, the same on all ranks of one data-parallel rank."""
        for micro_batch in range(MICRO_BATCHES):
            seed = (
                iteration * MICRO_BATCHES + micro_batch
            ) * 8 + parallel_state.get_data_parallel_rank()
            generator = torch.Generator().manual_seed(seed)
            yield torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator).cuda()

    def forward_step(self, batches, model):
        """As megatron-core's schedules want it."""
        tokens = next(batches)
        positions = torch.arange(SEQUENCE, device=tokens.device).expand(SAMPLES, -1)
        mask = torch.ones(SEQUENCE, SEQUENCE, device=tokens.device).triu(1).bool()[None, None]
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (
            losses.float().mean(),
            {"loss": losses.detach().float().mean()},
        )

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
    """Train, and print the losses and what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--save", type=Path, help="folder of a checkpoint, written at the end")
    options = parser.parse_args()
    on_gpus = not host.is_active()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    loop = Loop(options.tensor, options.pipeline, COMPRESSED)
    for iteration in range(options.iterations):
        loss = loop.iterate(iteration)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print(f"iteration {iteration + 1}: loss {loss:.4f}", flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        loop.save(options.save)
    if torch.distributed.get_rank() == 0:
        print(
            f"rank 0 sent in {options.iterations} iterations:\n{loop.compression.summary()}",
            flush=True,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
