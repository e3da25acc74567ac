"""Everything that the settings say about compression: one frozen dataclass of the dimensions'."""

import dataclasses
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, get_args

from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.communication.policy import Rule
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import named_by_arguments
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig, expert_ranks, replicas
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import GATHERED_BY_MEGATRON, HALVES, TensorParallelConfig

COMMUNICATORS = "MEGATRON_COMPRESSION_COMMUNICATORS"
NODE_SIZE = "MEGATRON_COMPRESSION_NODE_SIZE"
"""Variables of the environment that set ``communicators`` and ``data_parallel.node_size``."""

TransportChoice = Literal["auto", "collective", "symmetric", "host"]

ACTIVATIONS: dict[str, Callable[[Namespace], int]] = {
    "tensor_parallel": attrgetter("tensor_model_parallel_size"),
    "pipeline_parallel": attrgetter("pipeline_model_parallel_size"),
    "context_parallel": attrgetter("context_parallel_size"),
    "expert_parallel": expert_ranks,
}
"""Dimensions that send activations, and the number of ranks in each."""


@named_by_arguments
@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What is compressed and how. Built by ``flags.resolve`` or by hand; plain values all the way down."""

    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    pipeline_parallel: PipelineParallelConfig = field(default_factory=PipelineParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    expert_parallel: ExpertParallelConfig = field(default_factory=ExpertParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    caat_net: CaatNetConfig = field(default_factory=CaatNetConfig)

    auto: tuple[str, ...] = ()
    """Dimensions (names of the fields above) that are decided at the start, by timing the run's own messages
    (``--compression auto``)."""

    loss_budget: float | None = None
    """Percent of validation loss that ``--compression auto`` may spend, over all dimensions together; by
    default 0.1."""

    start_iteration: int | None = None
    """Iterations that run uncompressed first; by default a codec's own choice, which is none but for TAGC."""

    transport: TransportChoice = "auto"
    """How payloads travel: collective = torch.distributed; symmetric = one kernel a collective over the
    memory of the ranks' GPUs, on one host with peer access, for tensor and context parallelism; host = by
    copy engines through the host's memory, what stays on one host; auto = symmetric where possible, host on
    a host without peer access. The results have the same bits."""

    communicators: int = 0
    """Communicators over which torch.distributed sends each payload, a share on each: one alone does not
    fill a TCP link. 0 takes 2 where the links are TCP and 1 elsewhere. A command line sets it by
    MEGATRON_COMPRESSION_COMMUNICATORS."""

    error_bound: float | None = None
    """Relative error of one encoding beyond which a layer's tensor-parallel or context-parallel traffic goes
    uncompressed."""

    validate_uncompressed: bool = False
    """Evaluation sends activations uncompressed, whatever training does."""

    report: str | None = None
    """Folder of the report."""

    def __post_init__(self) -> None:
        choices, bound = get_args(TransportChoice), self.error_bound
        known, finite = self.transport in choices, bound is None or (math.isfinite(bound) and bound > 0)
        for name, valid, wanted in (
            ("transport", known, f"is unknown; choose one of {', '.join(choices)}"),
            ("start_iteration", (self.start_iteration or 0) >= 0, "must be an iteration >= 0"),
            ("error_bound", finite, "must be a relative error > 0, such as 0.05"),
            ("loss_budget", _is_percent(self.loss_budget), "must be a percentage >= 0, such as 0.1"),
        ):
            if not valid:
                flag = f"--compression-{name.replace('_', '-')}"
                raise CompressionConfigError(f"{flag} {getattr(self, name)} {wanted}")
        self._refuse_idle()
        fraction = self.caat_net.sync_fraction
        if self.tensor_parallel.halves and fraction < 1:
            raise CompressionConfigError(
                f"--caat-net-sync-fraction {fraction:g} has layers that halves do not cover; drop it or "
                f"{HALVES}"
            )

    def _refuse_idle(self) -> None:
        """A setting that would silently do nothing."""
        tensors, undecided = "--taco", bool(self.auto)
        layers = "--taco or --cp-compression"
        activations = undecided or any(getattr(self, part).enabled for part in ACTIVATIONS)
        sites = undecided or self.tensor_parallel.enabled or self.context_parallel.enabled
        anything = self.enabled or undecided
        rows = self.data_parallel.enabled or self.expert_parallel.enabled  # which no fused kernel sends
        carried = sites or (rows and self.transport != "symmetric")
        carriers = layers if self.transport == "symmetric" else "--taco, --cp-, --ep- or --dp-compression"
        evaluated = "--taco, --pp-compression or --ep-compression"
        for given, needed, flag, fix in (
            (self.loss_budget is not None, undecided, "--compression-loss-budget", "--compression auto"),
            (self.validate_uncompressed, activations, "--validate-uncompressed", evaluated),
            (self.error_bound, sites, "--compression-error-bound", layers),
            (self.start_iteration, anything, "--compression-start-iteration", tensors),
            (self.transport != "auto", carried, f"--compression-transport {self.transport}", carriers),
        ):
            if given and not needed:
                raise CompressionConfigError(f"{flag} given, but nothing uses it; add {fix}, or drop it")

    @property
    def enabled(self) -> bool:
        """Whether any traffic is to be compressed."""
        return self.data_parallel.enabled or any(getattr(self, part).enabled for part in ACTIVATIONS)

    def rules(self, train_iters: int | None = None) -> dict[str, Rule]:
        """What the policy does with each traffic class."""
        start = self.start_iteration or 0
        return {
            **self.tensor_parallel.rules(start),
            **self.pipeline_parallel.rules(start),
            **self.context_parallel.rules(start),
            **self.expert_parallel.rules(start),
            **self.data_parallel.rules(self.start_iteration, train_iters),
        }

    def check(self, args: Namespace) -> None:
        """Refuse what cannot be honoured together with Megatron's flags.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        self.tensor_parallel.check(args)
        self.pipeline_parallel.check(args)
        self.context_parallel.check(args)
        self.expert_parallel.check(args)
        self.data_parallel.check(args)
        self.caat_net.check(args)
        last = None if getattr(args, "skip_train", False) else train_iterations(args)
        if last and self.start_iteration is not None and self.start_iteration >= last:
            raise CompressionConfigError(
                f"--compression-start-iteration {self.start_iteration} is not before the last of {last} "
                "iterations, so nothing would be compressed; lower it"
            )

    def asdict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values: what reports and checkpoints store."""
        return {**dataclasses.asdict(self), "auto": list(self.auto)}

    def describe(self, args: Namespace) -> list[str]:
        """Lines for the log: what travels how, and what has no effect here."""
        lines = [
            f"--{name.replace('_', '-')} gathers {what}, which is not counted"
            for name, what in GATHERED_BY_MEGATRON.items()
            if args.tensor_model_parallel_size > 1 and getattr(args, name, None)
        ]
        if args.tensor_model_parallel_size > 1 and args.cuda_graph_impl != "none":
            lines.append(
                f"--cuda-graph-impl {args.cuda_graph_impl}: what a replayed graph sends is not counted, only "
                "what its capture did"
            )
        ranks = {name: count(args) for name, count in ACTIVATIONS.items()}
        ranks["data_parallel"] = replicas(args)
        if args.num_experts:  # ranks that share an expert send each other tokens as tensor parallelism does
            ranks["tensor_parallel"] = max(ranks["tensor_parallel"], args.expert_tensor_parallel_size or 1)
        lines += [
            getattr(self, name).idle_reason(count) or getattr(self, name).describe()
            for name, count in ranks.items()
            if getattr(self, name).enabled or (name == "tensor_parallel" and self.tensor_parallel.halves)
        ]
        alltoall = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
        shared = alltoall and (args.expert_tensor_parallel_size or 1) > 1
        if shared and self.expert_parallel.enabled and not self.tensor_parallel.enabled:
            lines.append(
                "ranks that share an expert send each other tokens uncompressed: give --tp-compression, too"
            )
        if self.data_parallel.enabled and getattr(args, "skip_train", False):
            lines.append("--dp-compression has nothing to compress here: --skip-train sends no gradients")
        for name, number in ((COMMUNICATORS, self.communicators), (NODE_SIZE, self.data_parallel.node_size)):
            if number:
                lines.append(f"{name}={number}")
        if self.enabled and self.start_iteration:
            lines.append(f"everything goes uncompressed before iteration {self.start_iteration}")
        if self.error_bound is not None:
            lines.append(f"a layer compresses while its error is at most {self.error_bound:g}")
        if self.validate_uncompressed:
            sent = any(getattr(self, name).enabled and ranks[name] > 1 for name in ACTIVATIONS)
            idle = "--validate-uncompressed has no effect here: no activations are sent compressed"
            lines.append(
                "evaluation sends activations uncompressed (--validate-uncompressed)" if sent else idle
            )
        if self.caat_net.enabled:
            lines.append(self.caat_net.describe(args))
        return lines


def train_iterations(args: Namespace) -> int | None:
    """How long the run is; None where Megatron's flags leave it open."""
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    growing = getattr(args, "step_batch_size_schedule", None)  # global_batch_size is another one then
    if iterations or not samples or not args.global_batch_size or growing:
        return iterations
    return samples // args.global_batch_size


def _is_percent(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value >= 0)


SAME_RESULTS = {"transport", "report", "overlap"}
"""Settings of how a run gets to its results: they change at most the order in which it adds up."""


def changed_settings(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """``tensor_parallel.compression taco -> int6`` for everything that decides results and differs."""
    found = []
    for key, value in now.items():
        if key in SAME_RESULTS or key not in saved:
            continue
        if isinstance(value, dict):
            found += changed_settings(saved[key], value, f"{prefix}{key}.")
        elif saved[key] != value:
            found.append(f"{prefix}{key} {saved[key]} -> {value}")
    return found
