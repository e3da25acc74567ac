"""A tiny GPT under Megatron's DDP and optimizer, inside a spawned rank."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.compression.communication import Ledger, Policy, Run, Transports
from megatron.compression.data_parallel.config import DataParallelConfig
from tests.distributed.tiny_gpt import (
    SEQUENCE,
    VOCABULARY,
    device_of,
    inputs_of,
    transformer_config,
)


@dataclass(frozen=True)
class Setup:
    """One training run; what is not named is Megatron's default."""

    settings: dict = field(default_factory=dict)
    """Fields of ``DataParallelConfig``; empty: uncompressed."""
    start_iteration: int | None = None
    """The first iteration that compresses."""
    communicators: int = 0
    """Number of communicators that share a payload."""
    transport: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    distributed_optimizer: bool = True
    instances: int = 1
    """Instances of the distributed optimizer; the same as in ``start``."""
    overlap: bool = True
    fp32_gradients: bool = True
    average_in_collective: bool = False
    """Megatron's ``--ddp-average-in-collective``."""
    check_for_nan: bool = False
    """Megatron's ``--check-for-nan-in-loss-and-grad``."""
    micro_batches: int = 1
    bucket_size: int | None = 20_000
    loss_scale: float | None = None
    """Fixed loss scale of fp16."""
    softmax: str = "vanilla"
    """Megatron's ``softmax_type``."""


class Training:
    """A model, its optimizer and its compression on this rank; ``start`` must have run."""

    def __init__(self, rank: int, setup: Setup = Setup()) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron.compression.data_parallel.hooks import Gradients

        self.rank = rank
        self.setup = setup
        self.iteration = 0
        config = DataParallelConfig(**setup.settings)
        ledger = Ledger()
        policy = Policy(config.rules(setup.start_iteration), ledger, lambda: self.iteration)
        self.run = Run(policy, ledger, transports=Transports(setup.transport, setup.communicators))
        self.gradients = Gradients(config, self.run)
        self.model = build_model(rank, setup.dtype, setup.softmax)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=setup.fp32_gradients,
            overlap_grad_reduce=setup.overlap,
            overlap_param_gather=setup.overlap and setup.distributed_optimizer,
            use_distributed_optimizer=setup.distributed_optimizer,
            num_distributed_optimizer_instances=setup.instances,
            bucket_size=setup.bucket_size,
            average_in_collective=setup.average_in_collective,
            check_for_nan_in_grad=setup.check_for_nan,
        )
        self.ddp = DistributedDataParallel(self.model.config, ddp, self.model)
        self.gradients.attach_wrapped([self.ddp])
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=2e-3,
                weight_decay=0.01,
                clip_grad=1.0,
                bf16=setup.dtype == torch.bfloat16,
                fp16=setup.dtype == torch.float16,
                params_dtype=setup.dtype,
                loss_scale=setup.loss_scale,
                use_distributed_optimizer=setup.distributed_optimizer,
                overlap_param_gather=setup.overlap and setup.distributed_optimizer,
            ),
            [self.ddp],
        )

    @property
    def groups(self) -> list:
        """The bucket groups."""
        return self.ddp.bucket_groups

    @property
    def rows(self) -> list[dict]:
        """The ledger's rows."""
        return self.run.ledger.rows()

    def kinds(self, traffic: str = "dp.gradient") -> set[str]:
        """Return the ledger's kinds of a traffic class."""
        return {row["kind"] for row in self.rows if row["traffic"] == traffic}

    def step(self, spoil: Callable[[torch.nn.Module], None] | None = None) -> tuple[float, bool]:
        """Train one iteration.

        Args:
            spoil: damages a gradient: it is called with the model before the last micro-batch's
                backward pass.

        Returns:
            This rank's mean loss, and whether the optimizer has stepped.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = 0.0
        count = self.setup.micro_batches
        for number in range(count):
            last = number == count - 1
            if not last:
                with self.ddp.no_sync():
                    total += self._backward(number, None)
            else:
                total += self._backward(number, spoil)
        finalize_model_grads([self.ddp])
        updated, *_ = self.optimizer.step()
        self.iteration += 1
        return total / count, updated

    def _backward(self, number: int, spoil) -> float:
        from megatron.core import parallel_state

        replica = parallel_state.get_data_parallel_rank()
        batch = batch_of(self.iteration * self.setup.micro_batches + number, replica)
        loss = self.ddp(**batch).float().mean()
        if spoil is not None:
            spoil(self.model)
        self.optimizer.scale_loss(loss / self.setup.micro_batches).backward()
        return float(loss.detach())

    def settle(self) -> None:
        """Gather the weights that the last step has left to the next forward pass."""
        if self.setup.overlap and self.setup.distributed_optimizer:
            self.ddp.start_param_sync(force_sync=True)

    def digest(self) -> str:
        """Return the hash of every weight of this rank."""
        weights = [p.detach().float().view(-1) for p in self.model.parameters()]
        return digest(torch.cat(weights))


def digest(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's values."""
    return hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()


def start(rank: int, tensor_ranks: int = 1, instances: int = 1) -> None:
    """Make Megatron's tensor- and data-parallel groups; on a GPU, choose deterministic kernels.

    Args:
        rank: this rank.
        tensor_ranks: tensor-parallel size.
        instances: of the distributed optimizer.
    """
    from megatron.core import parallel_state, tensor_parallel

    if torch.cuda.is_available():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks, num_distributed_optimizer_instances=instances
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def build_model(rank: int, dtype: torch.dtype, softmax: str) -> torch.nn.Module:
    """Build megatron-core's own GPT of two layers, with the same weights on data-parallel ranks.

    Args:
        rank: this rank.
        dtype: of the parameters.
        softmax: Megatron's ``softmax_type``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(7)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    config = transformer_config(ranks, dtype, softmax_type=softmax)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=False)
    return model.to(device_of(rank), dtype)


def train(rank: int, setup: Setup, iterations: int) -> tuple[Training, list[float]]:
    """Train a fresh model and gather its weights.

    Args:
        rank: this rank.
        setup: the run's settings.
        iterations: number of steps.

    Returns:
        The training, and this rank's losses.
    """
    training = Training(rank, setup)
    losses = [training.step()[0] for _ in range(iterations)]
    training.settle()
    return training, losses


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return tokens that differ between ranks; each follows from the last, with noise."""
    generator = torch.Generator().manual_seed(1000 * (step % 8) + rank)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    is_regular = torch.rand(2, SEQUENCE, generator=generator) < 0.8
    for i in range(SEQUENCE):
        follows = (3 * tokens[:, i] + 1) % VOCABULARY
        tokens[:, i + 1] = torch.where(is_regular[:, i], follows, tokens[:, i + 1])
    return inputs_of(tokens, rank)


def same_everywhere(value: str) -> bool:
    """Return true if every rank has the same string."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return len(set(gathered)) == 1
