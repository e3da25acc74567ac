"""Compression in a model and its loop: what ``enable`` puts into Megatron's, and what an own loop calls.

A loop over megatron-core without megatron.training:

    compression = attach(model_chunks, CompressionConfig(...))     # before they are wrapped
    chunks = [DistributedDataParallel(...) for chunk in model_chunks]
    compression.attach_wrapped(chunks)                             # after
    ... forward_backward_func(...); optimizer.step(); compression.step()
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression import repetition
from megatron.compression.caat_net.hooks import CaatNet
from megatron.compression.codecs.contract import check_contract
from megatron.compression.codecs.grouped import fp8_in_software
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.transport import Transports
from megatron.compression.config import CompressionConfig, changed_settings
from megatron.compression.context_parallel.hooks import ContextParallel
from megatron.compression.data_parallel.hooks import Gradients
from megatron.compression.dimension import Dimension, naming_arguments, print_on_first_rank
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.hooks import ExpertParallel
from megatron.compression.patches import gaps
from megatron.compression.pipeline_parallel.hooks import PipelineParallel
from megatron.compression.tensor_parallel.hooks import TensorParallel

STATE = "megatron_taco"
"""Under this key a checkpoint holds the config, and what the error bound has decided."""


class Compression:
    """Compression of one training run, in all its dimensions.

    Args:
        config: what is compressed, and how; checked when it is made.
        iteration: the zero-based training iteration; None counts the calls of ``step``.
        train_iters: how long the run is, where it is known.
        say: prints a line; called on every rank. By default the first rank prints.
        broadcasts_batch: tensor-parallel rank 0 sends the batch to its group, which is counted then.
    """

    def __init__(
        self,
        config: CompressionConfig,
        *,
        iteration: Callable[[], int] | None = None,
        train_iters: int | None = None,
        say: Callable[[str], None] = print_on_first_rank,
        broadcasts_batch: bool = False,
    ) -> None:
        self.config, self._say, self._train_iters = config, say, train_iters
        self.steps = 0
        """Calls of ``step`` so far."""
        self._said_small = self._wrapped = False
        self._told = iteration is not None
        ledger, meter = Ledger(), ErrorMeter(config.error_bound)
        ledger.count_replays()
        rules, iteration = config.rules(train_iters), iteration or (lambda: self.steps)
        policy = Policy(rules, ledger, iteration, config.validate_uncompressed, meter)
        self.run = Run(
            policy, ledger, transports=Transports(config.transport, config.communicators)
        )
        tensor_parallel = TensorParallel(config.tensor_parallel, self.run, say)
        tensor_parallel.broadcasts_batch = broadcasts_batch
        self.gradients = Gradients(config.data_parallel, self.run, say)
        """The data-parallel part: the topology of its groups."""
        self.dimensions: dict[str, Dimension] = {
            "tensor_parallel": tensor_parallel,
            "context_parallel": ContextParallel(config.context_parallel, self.run, say),
            "expert_parallel": ExpertParallel(config.expert_parallel, self.run, say),
            "caat_net": CaatNet(config.caat_net, self.run, say),
            "pipeline_parallel": PipelineParallel(config.pipeline_parallel, self.run, say),
            "data_parallel": self.gradients,
        }
        """By the name of their settings in ``CompressionConfig``, in the order in which they are attached."""
        self._when_attached: list[Callable[[list[torch.nn.Module]], None]] = []

    @property
    def ledger(self) -> Ledger:
        """Bytes sent, by traffic class, reason and operation."""
        return self.run.ledger

    def adopt(self, config: CompressionConfig) -> None:
        """Use settings in place of the present ones; before anything is attached."""
        self.config = config
        policy = self.run.policy
        policy.rules, policy.meter.bound = config.rules(self._train_iters), config.error_bound
        for name, dimension in self.dimensions.items():
            dimension.adopt(getattr(config, name))

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook into the model chunks of this pipeline stage, before they are wrapped. Collective.

        Raises: CompressionConfigError: a layer communicates in a way that is not covered.
        """
        for dimension in self.dimensions.values():
            dimension.attach(chunks)
        return chunks

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook into the chunks that DDP has wrapped. Collective.

        Raises: CompressionConfigError: a part of a spec by site that meets no site on any rank.
        """
        codecs = [codec for rule in self.run.policy.rules.values() for codec in rule.codecs]
        check_contract(codecs)
        if line := fp8_in_software(codecs):
            self._say(f"compression: {line}")
        for dimension in self.dimensions.values():
            dimension.attach_wrapped(chunks)
        self._wrapped = True
        for follow in self._when_attached:
            follow(chunks)
        return chunks

    def on_attached(self, follow: Callable[[list[torch.nn.Module]], None]) -> None:
        """Call ``follow(chunks)`` with the wrapped chunks once there are any."""
        self._when_attached.append(follow)

    def refuse_missing_calls(self, *_: object) -> None:
        """Before a chunk runs in a loop of one's own: a call was left out that some compression needs."""
        if self.steps or not torch.is_grad_enabled():
            return
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        if self.config.data_parallel.enabled and replicas > 1 and not self._wrapped:
            raise CompressionConfigError(
                "gradients are not compressed: call compression.attach_wrapped(chunks) after "
                "DistributedDataParallel has wrapped the chunks"
            )
        later = any(rule.codecs and rule.start_iteration for rule in self.run.policy.rules.values())
        if (
            later
            and not self._told
            and any(sent for sent, _ in self.ledger.totals()["dp.gradient"].values())
        ):
            raise CompressionConfigError(
                "compression never begins, since no iteration is counted: call compression.step() after each "
                "iteration, or give attach(iteration=...)"
            )

    def summary(self) -> str:
        """What this rank has sent in training so far, and would have sent uncompressed: a line for each class
        of traffic, and one for all."""
        rows = {name: _sum(kinds.values()) for name, kinds in self.ledger.totals().items()}
        rows = {name: pair for name, pair in rows.items() if any(pair)}
        rows["all"] = _sum(rows.values())
        return "\n".join(
            f"{name:12s} {sent / 1e6:12.3f} MB sent, {plain / 1e6:12.3f} MB uncompressed, ratio "
            f"{plain / sent if sent else 1:.2f}"
            for name, (sent, plain) in rows.items()
        )

    def step(self) -> None:
        """An iteration has ended; for loops that do not tell the iteration otherwise."""
        self.steps += 1
        if self._said_small:
            return
        if small := sum(kinds["small"][0] for kinds in self.ledger.totals().values()):
            self._said_small = True
            least = f"min_mb = {self.config.tensor_parallel.min_bytes / 2**20:g}"
            line = f"{small / 1e6:.3f} MB so far are in messages under {least} and uncompressed"
            self._say(f"compression: {line}")

    def on_training_log(self, iteration: int, log_interval: int) -> None:
        """After an iteration, counted from 1: let the error bound decide at the log interval."""
        meter = self.run.policy.meter
        if meter.bound is None or iteration % log_interval:
            return
        sharing = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        new = meter.decide(sharing, parallel_state.get_pipeline_model_parallel_group())
        for (site, traffic), error in sorted(new.items()):
            self._say(
                f"compression: {site} {traffic} has a relative error of {error:.4g}, past "
                f"--compression-error-bound {meter.bound:g}; it goes uncompressed after iteration {iteration}"
            )

    def state(self) -> dict[str, Any]:
        """What a resume needs besides weights and optimizer: plain values, the same on every rank."""
        return {"steps": self.steps, "error_bound": self.run.policy.meter.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` gave."""
        self.steps = state.get("steps", 0)
        meter, off = self.run.policy.meter, state.get("error_bound")
        if meter.bound is not None and off:
            meter.restore(off)
            sites = ", ".join(f"{site} {traffic}" for site, traffic, _ in off)
            self._say(f"compression: uncompressed as when the checkpoint was saved: {sites}")

    def add_state(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put the config, ``state`` and the dimensions' own into a checkpoint of Megatron's."""
        if not is_loading:
            state_dict[STATE] = {"config": self.config.asdict(), **self.state()}
        for dimension in self.dimensions.values():
            dimension.add_state(state_dict, is_loading)

    def resume(self, state_dict: dict[str, Any]) -> None:
        """Continue as the run that saved this state dict, and say which settings are other ones."""
        saved = state_dict[STATE]
        if changed := changed_settings(saved["config"], self.config.asdict()):
            self._say(f"compression: other settings than the checkpoint's: {', '.join(changed)}")
        self.load_state(saved)


@naming_arguments()
def attach(chunks: list[torch.nn.Module], config: CompressionConfig, **options: Any) -> Compression:
    """Compress what megatron-core models send, in a loop of one's own; ``options`` as ``Compression`` has
    them.

    Args:
        chunks: the model chunks of this pipeline stage, built by megatron-core and not wrapped.

    Returns: the run's compression. Its ``attach_wrapped`` takes the chunks once they are wrapped by
    DistributedDataParallel; ``step`` is to be called after each iteration.

    Raises: CompressionConfigError: a layer communicates in a way that is not covered; settings left open.
    """
    for name in ("auto", "error_bound", "report"):
        if getattr(config, name):
            raise CompressionConfigError(
                f"CompressionConfig.{name} needs Megatron's loop and arguments, which enable() gets; drop it"
            )
    repetition.refuse_stages(config, "only Megatron's training loop repeats passes")
    gaps.make_torch_adam_resumable()
    compression = Compression(config, **options)
    for chunk in compression.attach_model(chunks):
        chunk.register_forward_pre_hook(compression.refuse_missing_calls)
    return compression


def groups_by_dimension(experts: bool) -> dict[str, list[dist.ProcessGroup]]:
    """This rank's process groups by dimension, for the audit; ``experts`` have groups of their own."""
    groups = {
        "expert parallel": [],
        "tensor parallel": [parallel_state.get_tensor_model_parallel_group()],
        "data parallel": [parallel_state.get_data_parallel_group(with_context_parallel=True)],
        "pipeline parallel": [parallel_state.get_pipeline_model_parallel_group()],
        "context parallel": [parallel_state.get_context_parallel_group()],
    }
    if experts:
        groups["expert parallel"] += [parallel_state.get_expert_tensor_and_model_parallel_group()]
        groups["tensor parallel"] += [parallel_state.get_expert_tensor_parallel_group()]
        groups["data parallel"] += [parallel_state.get_expert_data_parallel_group()]
    return groups


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = list(pairs)
    return sum(sent for sent, _ in pairs), sum(plain for _, plain in pairs)
