"""A whole training loop over megatron-core, without megatron.training, with compressed
communication.

    torchrun --nproc-per-node 4 examples/own_loop.py --tensor 2 --iterations 20

Compression takes five lines, which comments number: ``attach``, ``attach_wrapped``, ``step``, its
state in the checkpoint, and ``summary``. The rest is what any loop over megatron-core does. Without
a GPU the ranks are CPU processes.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron import host

# Without a GPU this puts stand-ins for torch.cuda in place. It comes before megatron-core is
# imported.
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

from megatron.compression import (  # noqa: E402
    CompressionConfig,
    DataParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
    attach,
)

VOCABULARY = 96
SEQUENCE = 32  # tokens
SAMPLES = 2  # sequences in a micro-batch
MICRO_BATCHES = 2  # of an iteration, on each data-parallel rank

COMPRESSED = CompressionConfig(
    # The messages of this tiny model are below 8 MiB, under which nothing is compressed by default.
    tensor_parallel=TensorParallelConfig(compression="int6", min_mb=0.0),
    pipeline_parallel=PipelineParallelConfig(compression="int8"),
    data_parallel=DataParallelConfig(compression="int8", weights="int8"),
    # The first iteration goes uncompressed.
    start_iteration=1,
)


class Loop:
    """Model, optimizer and data of one rank.

    Args:
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size. The remaining ranks are data-parallel.
        compression: what is compressed, and how.
    """

    def __init__(self, tensor: int, pipeline: int, compression: CompressionConfig) -> None:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        torch.manual_seed(123)
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # These need apex or Transformer Engine.
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
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
        # Compression, line 1 of 5: after the model is built, before it is wrapped.
        self.compression = attach([model], compression)

        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = Float16Module(self.config, model)
        self.model = DistributedDataParallel(self.config, ddp_config, wrapped)
        # Compression, line 2 of 5: after DDP, whose buckets of gradients it needs.
        self.compression.attach_wrapped([self.model])

        optimizer_config = OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def batches(self, iteration: int) -> Iterator[torch.Tensor]:
        """Yield the micro-batches of an iteration: tokens [samples, sequence + 1].

        Each token is the one before it plus 3, modulo the vocabulary. So there is something to
        learn, and the loss falls. Only the first token of a sequence is random.
        """
        # Ranks of one data-parallel rank need the same tokens, other ranks and iterations different
        # ones.
        ranks = parallel_state.get_data_parallel_world_size()
        seed = iteration * ranks + parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(seed)
        steps = 3 * torch.arange(SEQUENCE + 1)
        for _ in range(MICRO_BATCHES):
            first_tokens = torch.randint(VOCABULARY, (SAMPLES, 1), generator=generator)
            yield ((first_tokens + steps) % VOCABULARY).cuda()

    def forward_step(self, batches: Iterator[torch.Tensor], model: torch.nn.Module):
        """Run one micro-batch forward, as megatron-core's schedules call it.

        Returns:
            The model's output, and a function that turns it into the loss and a dict of values to
            report.
        """
        tokens = next(batches)
        positions = torch.arange(SEQUENCE, device=tokens.device).expand(SAMPLES, -1)
        # True where a token must not look: at those after it.
        mask = torch.ones(SEQUENCE, SEQUENCE, device=tokens.device).triu(1).bool()[None, None]
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

        def loss_function(losses: torch.Tensor):
            loss = losses.float().mean()
            # A copy, since the schedule divides the loss in place by the number of micro-batches.
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    def iterate(self, iteration: int) -> float | None:
        """Train one iteration and return its mean loss, or None where this is not the last stage."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        run_forward_and_backward = get_forward_backward_func()
        reports = run_forward_and_backward(
            forward_step_func=self.forward_step,
            data_iterator=self.batches(iteration),
            model=[self.model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        self.optimizer.step()
        # Compression, line 3 of 5: an iteration is over.
        self.compression.step()
        if not reports:
            return None
        return sum(float(report["loss"]) for report in reports) / MICRO_BATCHES

    def state(self, is_loading: bool = False) -> dict:
        """Return what a checkpoint holds, or where a checkpoint is loaded to."""
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
        )
        return {
            "model": model,
            "optimizer": optimizer,
            # Compression, line 4 of 5: its state, which ``load`` gives back.
            "compression": self.compression.state(),
        }

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an empty folder."""
        dist_checkpointing.save(self.state(), str(folder))

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        loaded = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.compression.load_state(loaded["compression"])


def main() -> None:
    """Train, and print each iteration's loss and at the end what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--save", type=Path, help="folder of a checkpoint, written at the end")
    options = parser.parse_args()

    if host.is_active():  # there is no GPU
        backend = "gloo"
    else:
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    rank = torch.distributed.get_rank()
    last_rank = torch.distributed.get_world_size() - 1

    loop = Loop(options.tensor, options.pipeline, COMPRESSED)
    for iteration in range(options.iterations):
        loss = loop.iterate(iteration)
        if rank == last_rank:  # it has the last pipeline stage, and so the loss
            print(f"iteration {iteration + 1}: loss {loss:.4f}", flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        loop.save(options.save)
    if rank == 0:
        # Compression, line 5 of 5: the bytes that this rank has sent, by kind of traffic.
        summary = loop.compression.summary()
        print(f"rank 0 sent in {options.iterations} iterations:\n{summary}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
