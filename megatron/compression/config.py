"""Everything that the settings say about compression: one frozen dataclass of the dimensions'.

    from megatron.compression import CompressionConfig, DataParallelConfig, TensorParallelConfig

    CompressionConfig(
        tensor_parallel=TensorParallelConfig(compression="taco"),
        data_parallel=DataParallelConfig(compression="int8", weights="lossless"),
        start_iteration=100,
    )

On the command line that is ``--taco --dp-compression int8 lossless --compression-start-iteration
100``: ``flags.resolve`` makes the same object of it.
"""

import dataclasses
import difflib
import math
import os
import re
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron.compression import graphs, loss_settings
from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.communication.policy import Rule
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import DimensionConfig, documented
from megatron.compression.errors import CompressionConfigError, SettingError, setting, spelled
from megatron.compression.expert_parallel import flex
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.local_steps.config import LocalStepsConfig
from megatron.compression.names import (
    ACTIVATIONS,
    COMMUNICATORS,
    FLAG_NAMES,
    FLAGS,
    NODE_SIZE,
    PARALLELISMS,
    PYTHON_NAMES,
    Names,
)
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from megatron.compression.versions import MEGATRON_CORE_AT_RISK

TransportChoice = Literal["auto", "collective", "symmetric", "host"]


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What is compressed and how. Built by ``flags.resolve`` or by hand; plain values all the way
    down."""

    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    pipeline_parallel: PipelineParallelConfig = field(default_factory=PipelineParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    expert_parallel: ExpertParallelConfig = field(default_factory=ExpertParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    caat_net: CaatNetConfig = field(default_factory=CaatNetConfig)
    local_steps: LocalStepsConfig = field(default_factory=LocalStepsConfig)

    # What is measured at the start (--compression auto)

    auto: tuple[str, ...] = ()
    """Dimensions (names of the fields above) that are decided at the start, by timing the run's own
    messages (``--compression auto``)."""

    loss_budget: float | None = documented(
        None,
        "How much validation loss --compression auto may spend over all dimensions together, in "
        "percent (default: 0.1).",
    )

    loss_interval: int | str | None = documented(
        None,
        "Measure every N iterations what compression costs in loss: the last micro-batch passes "
        "forward with and without codecs. Without N as often as takes 1 % of the time. The log has "
        "the cost and its standard error. With --compression auto a cost above the budget makes "
        "the run take safer codecs.",
    )

    # When compression is on

    start_iteration: int | None = documented(
        None,
        "Number of uncompressed iterations at the start (default: 0; TAGC: a fifth of the run, at "
        "most 1000).",
    )

    # How payloads travel

    transport: TransportChoice = documented(
        "auto",
        "How payloads travel; the results have the same bits. collective = torch.distributed. "
        "symmetric = one kernel for each collective, over the memory of the GPUs of one host with "
        "peer access; tensor and context parallelism only. host = through pinned host memory by "
        "the copy engines (only between GPUs of one host). auto = symmetric where possible, host "
        "on a host without peer access, else collective.",
    )

    communicators: int = 0
    """Communicators over which torch.distributed sends each payload, a share on each: one alone
    does not fill a TCP link. 0 takes 2 where the links are TCP and 1 elsewhere. A command line sets
    it by MEGATRON_COMPRESSION_COMMUNICATORS."""

    # What guards and reports a run

    error_bound: float | None = documented(
        None,
        "Largest relative error of one encoding, such as 0.05. A layer whose tensor-parallel or "
        "context-parallel messages exceed it sends them uncompressed from then on.",
    )

    validate_uncompressed: bool = documented(
        False, "Send activations uncompressed during evaluation, whatever training does."
    )

    report: str | None = documented(None, "Folder that the report is written to.")

    def __post_init__(self) -> None:
        """Check the values. Raises: SettingError: one is impossible, or would silently do
        nothing."""
        with spelled(PYTHON_NAMES):
            self._check_values()
            self._refuse_idle()

    def _check_values(self) -> None:
        """Refuse values that are impossible whatever is compressed."""

        def require(name: str, valid: bool, reason: str, fix: str) -> None:
            if not valid:
                raise SettingError(name, getattr(self, name), reason, fix)

        transports = get_args(TransportChoice)
        require(
            "transport",
            self.transport in transports,
            "is unknown",
            f"choose one of {', '.join(transports)}",
        )
        require(
            "start_iteration",
            self.start_iteration is None or self.start_iteration >= 0,
            "must be an iteration >= 0",
            "give 0 to compress from the first on",
        )
        require(
            "error_bound",
            self.error_bound is None or 0 < self.error_bound < math.inf,
            "must be a relative error > 0",
            "give a number such as 0.05",
        )
        require("report", self.report != "", "must be a folder", "name one, or drop the flag")
        require(
            "loss_budget",
            self.loss_budget is None or 0 <= self.loss_budget < math.inf,
            "must be a percentage >= 0",
            "give a number such as 0.1",
        )
        interval = self.loss_interval
        is_number = isinstance(interval, int) and not isinstance(interval, bool) and interval > 0
        require(
            "loss_interval",
            interval in (None, loss_settings.AUTO) or is_number,
            "must be a number of iterations >= 1, or auto",
            "give auto to have it take 1 % of the time",
        )
        # Halves overlap one half-batch's sums with the other's products, layer by layer; CAAT-Net
        # replaces the very layers that they need.
        if self.tensor_parallel.halves and self.caat_net.enabled:
            raise SettingError(
                "caat_net.sync_fraction",
                f"{self.caat_net.sync_fraction:g}",
                "has layers that halves do not cover",
                f"drop it or {setting('tensor_parallel.overlap')} halves",
            )

    def _refuse_idle(self) -> None:
        """Refuse a setting that is given and that nothing uses: a slip, or a script whose flag is
        missing."""
        tensor = setting("tensor_parallel.compression")
        stages = setting("pipeline_parallel.compression")
        experts = setting("expert_parallel.compression")
        # What --compression auto will choose is not known yet: it may use any setting.
        undecided = bool(self.auto)
        # Each pair below: a setting that was given, and whether anything will read it.
        compresses = undecided or self.enabled
        activations = undecided or any(getattr(self, name).enabled for name in ACTIVATIONS)

        if any(dimension.min_mb is not None for dimension in self.dimensions):
            _require_use("tensor_parallel.min_mb", compresses, tensor)
        if self.loss_budget is not None:
            _require_use("loss_budget", undecided, setting("auto"))
        if self.validate_uncompressed:
            _require_use("validate_uncompressed", activations, f"{tensor}, {stages} or {experts}")
        if self.loss_interval is not None:
            _require_use("loss_interval", activations, f"{tensor}, {stages} or {experts}")
        if self.error_bound is not None:
            _require_use("error_bound", self._layers_compress, _LAYERS)
        if self.start_iteration:
            _require_use("start_iteration", compresses, tensor)
        # "auto" falls back by itself, so it is never idle.
        if self.transport != "auto":
            self._refuse_idle_transport()

    def _refuse_idle_transport(self) -> None:
        """Refuse a transport other than "auto" that nothing would use.

        The kernels of ``symmetric`` send messages of layers alone. A transport named otherwise
        sends buckets of gradients and tokens as well. Between pipeline stages torch.distributed
        sends whatever is chosen, so pipeline compression alone uses no transport.
        """
        if self.transport == "symmetric":
            _require_use("transport", self._layers_compress, _LAYERS, self.transport)
            return
        experts = setting("expert_parallel.compression")
        data = setting("data_parallel.compression")
        used = self._layers_compress or self.data_parallel.enabled or self.expert_parallel.enabled
        _require_use("transport", used, f"{_LAYERS}, {experts} or {data}", self.transport)

    @property
    def _layers_compress(self) -> bool:
        """True where messages of layers are compressed, or may be."""
        return bool(self.auto) or self.tensor_parallel.enabled or self.context_parallel.enabled

    @property
    def dimensions(self) -> list[DimensionConfig]:
        """The settings of each dimension."""
        return [getattr(self, name) for name in PARALLELISMS]

    @property
    def enabled(self) -> bool:
        """True where any traffic is to be compressed."""
        return any(dimension.enabled for dimension in self.dimensions)

    def rules(self, train_iters: int | None = None) -> dict[str, Rule]:
        """The policy's rules by traffic class; see ``DimensionConfig.rules``."""
        # Traffic classes of two dimensions never have the same name: tp.forward, dp.gradient, ...
        rules: dict[str, Rule] = {}
        for dimension in self.dimensions:
            rules |= dimension.rules(self.start_iteration, train_iters)
        return rules

    def check(self, args: Namespace) -> None:
        """Refuse what cannot be honoured together with Megatron's arguments.

        Raises: SettingError: with the reason and the fix.
        """
        for dimension in self.dimensions:
            dimension.check(args)
        self.caat_net.check(args)
        self.local_steps.check(args)
        graphs.refuse_later_decisions(args, self)
        loss_settings.check(args, self)
        # With --skip-train there is no iteration that could be too late.
        last = None if getattr(args, "skip_train", False) else train_iterations(args)
        if last and self.start_iteration is not None and self.start_iteration >= last:
            raise SettingError(
                "start_iteration",
                self.start_iteration,
                f"is not before the last of {last} iterations, so nothing would be compressed",
                "lower it",
            )

    def asdict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values: what reports and checkpoints store."""
        stored = {**dataclasses.asdict(self), "auto": list(self.auto)}
        return {**stored, "taco_outliers": TACO_OUTLIERS}

    def disable_user_buffers(self, args: Namespace) -> list[str]:
        """Switch ``--tp-comm-overlap`` off in Megatron's arguments where it would send past the
        codecs.

        Returns: a line for the log if that was done.
        """
        # Undecided counts: buffers are made before --compression auto decides.
        if not self.tensor_parallel.enabled and "tensor_parallel" not in self.auto:
            return []
        # The flag has a dozen companions, tp_comm_overlap_ag, tp_comm_bulk_dgrad and so on, each a
        # buffer.
        for name, value in list(vars(args).items()):
            if name.startswith("tp_comm_") and value is True:
                setattr(args, name, False)
        return [
            "--tp-comm-overlap is switched off: its userbuffers send past the codecs. Leave it "
            "out to silence this line"
        ]

    def replace_flex_dispatcher(self, settings: Any) -> list[str]:
        """Have alltoall send experts' tokens where flex would send them past the codecs.

        Args:
            settings: Megatron's arguments, or the ``TransformerConfig`` of a model that is yet to
                be built.

        Returns: a line for the log if that was done, with references to settings.

        Raises:
            SettingError: settings that only flex has.
        """
        if not flex.sends_by_flex(settings):
            return []
        path = self.expert_parallel.path("compression")
        backend = flex.backend_of(settings)
        if self.expert_parallel.enabled:
            flex.refuse_settings_of_flex(settings, path)
            flex.switch_to_alltoall(settings)
            return [flex.switched(backend, path)]
        # --compression auto times both where flex runs (auto/dispatchers.py), and leaves a run
        # alone whose settings need flex.
        undecided = "expert_parallel" in self.auto and not flex.has_settings_of_its_own(settings)
        if undecided and not flex.can_run(backend):
            flex.switch_to_alltoall(settings)
            return [flex.not_compared(backend)]
        return []

    def describe(self, args: Namespace, names: Names | None = None) -> list[str]:
        """Describe for the log what is sent in which codec, and what has no effect here.

        Args:
            args: Megatron's arguments.
            names: what the user types for settings; by default the flags of the command line,
                ``--taco`` among them where ``args`` has it.
        """
        lines = [line for dimension in self.dimensions for line in dimension.lines(args)]
        lines += self.caat_net.lines(args)
        lines += self.local_steps.lines(args)
        lines += graphs.lines(args, self)
        lines += loss_settings.lines(args, self)
        lines += self._lines_of_whole_run(args)
        names = names_on_command_line(args) if names is None else names
        return [names.resolve(line) for line in lines]

    def _lines_of_whole_run(self, args: Namespace) -> list[str]:
        """The lines for the log on what concerns all dimensions."""
        lines = []
        if self.communicators:
            lines.append(f"{COMMUNICATORS}={self.communicators}")
        if self.data_parallel.node_size:
            lines.append(f"{NODE_SIZE}={self.data_parallel.node_size}")
        if self.enabled and self.start_iteration:
            lines.append(f"iterations 1 to {self.start_iteration} are uncompressed")
        if self.error_bound is not None:
            lines.append(
                f"a layer whose relative error exceeds {self.error_bound:g} is sent uncompressed "
                "from then on"
            )
        if self.validate_uncompressed:
            flag = setting("validate_uncompressed")
            # In a dimension of one rank nothing is sent, and gradients are not sent in evaluation.
            dimensions = [getattr(self, name) for name in ACTIVATIONS]
            if any(dimension.enabled and dimension.ranks(args) > 1 for dimension in dimensions):
                lines.append(f"evaluation sends activations uncompressed ({flag})")
            else:
                lines.append(f"{flag} has no effect here: no activations are sent compressed")
        return lines


_LAYERS = f"{setting('tensor_parallel.compression')} or {setting('context_parallel.compression')}"
"""What has messages of layers compressed, for messages."""


def _require_use(path: str, used: bool, users: str, value: str | None = None) -> None:
    """Refuse a setting that is given and that nothing uses.

    Args:
        path: the setting's.
        used: whether something uses it.
        users: settings that would use it, for the fix.
        value: what is shown after the name.

    Raises: SettingError: nothing uses it.
    """
    if not used:
        raise SettingError(path, value, "given, but nothing uses it", f"add {users}, or drop it")


def names_on_command_line(args: Namespace) -> Names:
    """The flags that a user has typed: ``--taco`` stands for ``--tp-compression`` where it was
    given."""
    if getattr(args, "taco", None) is None:
        return FLAG_NAMES
    return Names({**FLAG_NAMES.settings, "tensor_parallel.compression": "--taco"})


def from_environment(name: str) -> int | None:
    """The number >= 1 that a variable of the environment has; None where it is not set, or empty.

    Raises: CompressionConfigError: it is no such number, or a variable of ours is misspelt.
    """
    # A misspelt variable would silently do nothing.
    known = [*_VARIABLES, MEGATRON_CORE_AT_RISK]
    for variable in os.environ.keys() - set(known):
        if variable.startswith("MEGATRON_COMPRESSION_"):
            # cutoff 0.0: the nearest name is shown however far off it is.
            (near,) = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)
            raise CompressionConfigError(
                f"{variable} is unknown; did you mean {near}? If not, unset it"
            )
    text = os.environ.get(name, "")
    if not text:
        return None
    # Nine digits are more than any cluster has, and fit every integer they are put into.
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < 1:
        shown = text if len(text) < 20 else f"{text[:20]}..."
        raise CompressionConfigError(
            f"{name}={shown} must be a number >= 1; unset it for the default"
        )
    return int(text)


def train_iterations(args: Namespace) -> int | None:
    """Return how long the run is, in iterations; None where Megatron's flags leave it open."""
    iterations = getattr(args, "train_iters", None)
    samples = getattr(args, "train_samples", None)
    # Megatron sets train_iters itself only after the ranks know each other; settings are read
    # before.
    if iterations or not samples or not args.global_batch_size:
        return iterations
    if getattr(
        args, "step_batch_size_schedule", None
    ):  # the batch grows: its last size is not known
        return iterations
    return samples // args.global_batch_size


TACO_OUTLIERS = "on"
"""What ``taco`` means without its setting ``outliers``. Configs are stored with it: in those of
versions up to 0.3, which have no such entry, it meant off."""
SAME_RESULTS = {
    "transport",
    "report",
    "overlap",
    "loss_interval",
    "data_centre",
    "address",
    "timeout_minutes",
}
"""Settings of how a run gets to its results: they change at most the order in which it adds up."""

# How settings are called where a resumed run lists those that have changed.
_VARIABLES = {COMMUNICATORS: ("communicators",), NODE_SIZE: ("data_parallel.node_size",)}
_TYPED = FLAGS | _VARIABLES | {"--compression auto": ("auto",)}


def changed_settings(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the settings that decide results and differ between two stored configs.

    Args:
        saved: what ``CompressionConfig.asdict`` gave when a checkpoint was written.
        now: the same of this run.

    Returns: ``--tp-compression taco -> int6`` for each flag or variable.
    """
    changes = []
    # Compared as typed, so that two spellings of one default are no change. taco is compared with
    # its outliers, whose default differs between versions.
    saved_outliers = saved.get("taco_outliers", "off")
    for name, paths in _TYPED.items():
        old = _as_typed(saved, paths)
        new = _as_typed(now, paths)
        old_spelled = with_outliers(old, saved_outliers)
        new_spelled = with_outliers(new, TACO_OUTLIERS)
        decides_results = paths[0].rpartition(".")[2] not in SAME_RESULTS
        # A checkpoint that is older than a flag has no value for it: no change of the user's.
        if old and old_spelled != new_spelled and decides_results:
            if old == new:
                # The same words meant another codec.
                changes.append(f"{name} {old_spelled} -> {new_spelled}")
            else:
                changes.append(f"{name} {old} -> {new}")
    return changes


def with_outliers(spec: str, outliers: str) -> str:
    """Return a spec whose ``taco`` says ``outliers``, on or off, where it does not say it already.

    Args:
        spec: with parts by site and two hops, or two specs with a space between them; any other
            text comes back as it is.
        outliers: what a spec without the setting means.
    """

    def spelled(match: re.Match) -> str:
        settings = match[1] or ""
        if "outliers=" in settings:
            return match[0]
        separator = "," if settings else ":"
        return f"{match[0]}{separator}outliers={outliers}"

    # A codec's name begins a spec, a hop ("/") or a part by site (";", "SITE="); commas separate
    # its settings.
    return re.sub(r"(?<![^ ;/=])taco(:[^ ;/]*)?(?![^ ;/])", spelled, spec)


def _as_typed(config: dict[str, Any], paths: tuple[str, ...]) -> str:
    """The values that a stored config has for a flag, as one types them; empty where it is older
    than the flag."""
    values = []
    for path in paths:
        section, _, name = path.rpartition(".")
        owner = config.get(section, {}) if section else config
        value = owner.get(name, "")
        values.append("default" if value is None else str(value))
    return " ".join(values).strip().removesuffix(" default")
