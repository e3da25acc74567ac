"""Everything that the settings say about compression: one frozen dataclass of the dimensions'."""

import dataclasses
import difflib
import math
import os
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron.compression import graphs
from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.communication.policy import Rule
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import DimensionConfig, naming_arguments
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.names import COMMUNICATORS, FLAGS, NODE_SIZE
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import HALVES, TensorParallelConfig

TransportChoice = Literal["auto", "collective", "symmetric", "host"]

ACTIVATIONS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
"""Dimensions that send activations."""
DIMENSIONS = (*ACTIVATIONS, "data_parallel")


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
        with naming_arguments():
            self._validate()
            self._refuse_idle()

    def _validate(self) -> None:
        choices, bound = get_args(TransportChoice), self.error_bound
        known, finite = (
            self.transport in choices,
            bound is None or (math.isfinite(bound) and bound > 0),
        )
        budget = 0 if self.loss_budget is None else self.loss_budget
        for name, valid, wanted in (
            ("transport", known, f"is unknown; choose one of {', '.join(choices)}"),
            ("start_iteration", (self.start_iteration or 0) >= 0, "must be an iteration >= 0"),
            ("error_bound", finite, "must be a relative error > 0, such as 0.05"),
            ("report", self.report != "", "must be a folder; name one, or drop the flag"),
            ("loss_budget", 0 <= budget < math.inf, "must be a percentage >= 0, such as 0.1"),
        ):
            if not valid:
                flag = f"--compression-{name.replace('_', '-')}"
                raise CompressionConfigError(f"{flag} {getattr(self, name)} {wanted}")
        fraction = self.caat_net.sync_fraction
        if self.tensor_parallel.halves and fraction < 1:
            raise CompressionConfigError(
                f"--caat-net-sync-fraction {fraction:g} has layers that halves do not cover; drop it or "
                f"{HALVES}"
            )

    def _refuse_idle(self) -> None:
        """Refuse a setting that would silently do nothing."""
        undecided = bool(self.auto)
        activations = undecided or any(getattr(self, part).enabled for part in ACTIVATIONS)
        sites = undecided or self.tensor_parallel.enabled or self.context_parallel.enabled
        rows = (
            self.data_parallel.enabled or self.expert_parallel.enabled
        )  # which no fused kernel sends
        fused = self.transport == "symmetric"
        layers = "--taco or --cp-compression"
        senders = layers if fused else "--taco, --cp-, --ep- or --dp-compression"
        evaluated = "--taco, --pp-compression or --ep-compression"
        transport, transported = (
            f"--compression-transport {self.transport}",
            sites or (rows and not fused),
        )
        least = any(part.min_mb is not None for part in self.dimensions)
        for given, needed, flag, fix in (
            (least, self.enabled or undecided, "--compression-min-mb", "--taco"),
            (
                self.loss_budget is not None,
                undecided,
                "--compression-loss-budget",
                "--compression auto",
            ),
            (self.validate_uncompressed, activations, "--validate-uncompressed", evaluated),
            (self.error_bound, sites, "--compression-error-bound", layers),
            (
                self.start_iteration,
                self.enabled or undecided,
                "--compression-start-iteration",
                "--taco",
            ),
            (self.transport != "auto", transported, transport, senders),
        ):
            if given and not needed:
                raise CompressionConfigError(
                    f"{flag} given, but nothing uses it; add {fix}, or drop it"
                )

    @property
    def dimensions(self) -> list[DimensionConfig]:
        """The settings of each dimension."""
        return [getattr(self, name) for name in DIMENSIONS]

    @property
    def enabled(self) -> bool:
        """Whether any traffic is to be compressed."""
        return any(part.enabled for part in self.dimensions)

    def rules(self, train_iters: int | None = None) -> dict[str, Rule]:
        """What the policy does with each traffic class."""
        parts = [part.rules(self.start_iteration, train_iters) for part in self.dimensions]
        return {traffic: rule for part in parts for traffic, rule in part.items()}

    def check(self, args: Namespace) -> None:
        """Raises: CompressionConfigError: what cannot be honoured together with Megatron's flags."""
        for part in self.dimensions:
            part.check(args)
        self.caat_net.check(args)
        graphs.refuse_later_decisions(args, self)
        last = None if getattr(args, "skip_train", False) else train_iterations(args)
        if last and self.start_iteration is not None and self.start_iteration >= last:
            raise CompressionConfigError(
                f"--compression-start-iteration {self.start_iteration} is not before the last of {last} "
                "iterations, so nothing would be compressed; lower it"
            )

    def asdict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values: what reports and checkpoints store."""
        return {**dataclasses.asdict(self), "auto": list(self.auto)}

    def without_user_buffers(self, args: Namespace) -> list[str]:
        """Switch ``--tp-comm-overlap`` off in Megatron's arguments where it would send past the codecs; a
        line for the log, if so."""
        if not self.tensor_parallel.enabled and "tensor_parallel" not in self.auto:
            return []
        settings = vars(args)
        settings |= {
            one: False for one in settings if one.startswith("tp_comm_") and settings[one] is True
        }
        return [
            "--tp-comm-overlap is switched off: userbuffers send past the codecs, and kept without them they "
            "took 311 to 381 ms an iteration and a gradient norm of 92, where NCCL took 284 ms and had 1"
        ]

    def describe(self, args: Namespace) -> list[str]:
        """Lines for the log: what travels how, and what has no effect here."""
        lines = [line for part in self.dimensions for line in part.lines(args)]
        lines += self.caat_net.lines(args)
        lines += graphs.lines(args, self)
        for name, number in (
            (COMMUNICATORS, self.communicators),
            (NODE_SIZE, self.data_parallel.node_size),
        ):
            if number:
                lines.append(f"{name}={number}")
        if self.enabled and self.start_iteration:
            lines.append(f"everything goes uncompressed up to iteration {self.start_iteration}")
        if self.error_bound is not None:
            lines.append(f"a layer compresses while its error is at most {self.error_bound:g}")
        if self.validate_uncompressed:
            parts = [getattr(self, name) for name in ACTIVATIONS]
            sent = any(part.enabled and part.ranks(args) > 1 for part in parts)
            effect = "evaluation sends activations uncompressed (--validate-uncompressed)"
            idle = "--validate-uncompressed has no effect here: no activations are sent compressed"
            lines.append(effect if sent else idle)
        return lines


def from_environment(name: str) -> int | None:
    """A number >= 1; None where the variable is not set, or empty. Refuses misspelt variables of ours."""
    for given in os.environ.keys() - _VARIABLES.keys():
        if given.startswith("MEGATRON_COMPRESSION_"):
            (near,) = difflib.get_close_matches(given, _VARIABLES, n=1, cutoff=0.0)
            raise CompressionConfigError(
                f"{given} is unknown; did you mean {near}? If not, unset it"
            )
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CompressionConfigError(
            f"{name}={text} must be a number >= 1; unset it for the default"
        )
    return int(text)


def train_iterations(args: Namespace) -> int | None:
    """How long the run is; None where Megatron's flags leave it open."""
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    growing = getattr(
        args, "step_batch_size_schedule", None
    )  # global_batch_size is another one then
    if iterations or not samples or not args.global_batch_size or growing:
        return iterations
    return samples // args.global_batch_size


SAME_RESULTS = {"transport", "report", "overlap"}
"""Settings of how a run gets to its results: they change at most the order in which it adds up."""

_VARIABLES = {COMMUNICATORS: ("communicators",), NODE_SIZE: ("data_parallel.node_size",)}
_TYPED = FLAGS | _VARIABLES | {"--compression auto": ("auto",)}


def changed_settings(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``--tp-compression taco -> int6`` for every flag or variable that decides results and differs."""
    found = []
    for name, paths in _TYPED.items():
        old, new = (_typed(config, paths) for config in (saved, now))
        if old and old != new and paths[0].rpartition(".")[2] not in SAME_RESULTS:
            found.append(f"{name} {old} -> {new}")
    return found


def _typed(config: dict[str, Any], paths: tuple[str, ...]) -> str:
    """What a stored config has in a flag's fields, as one types it; empty: it is older than they are."""
    places = [path.rpartition(".") for path in paths]
    values = [(config.get(part, {}) if part else config).get(name, "") for part, _, name in places]
    text = " ".join("default" if value is None else str(value) for value in values).strip()
    return text.removesuffix(" default")
