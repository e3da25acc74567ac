"""Compression in Megatron-Bridge: one callback for its ``pretrain``. Two lines of a script:

    from megatron.compression import bridge
    pretrain(cfg, forward_step, callbacks=[bridge.attach(cfg, tp="int6", dp="sdp4bit")])

Nothing of Megatron-Bridge is imported: the container and the callback's context are used by their
fields.
"""

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.codecs.registry import settings_of
from megatron.compression.config import CompressionConfig
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import CompressionConfigError, SettingError, spelled
from megatron.compression.files import read_json, write_whole
from megatron.compression.names import FLAG_NAMES, PARALLELISMS, PYTHON_NAMES, Names
from megatron.compression.patches import gaps, running
from megatron.compression.report import check_report_directory, track
from megatron.compression.session import STATE, Host, Session

STATE_FILE = f"{STATE}.json"
"""In the folder of a checkpoint's iteration: what ``Session.state`` gives, and the settings."""

Spec = str | tuple[str, str]
"""A codec or recipe, or two: of activations and of gradients; ``dp``: of gradients and of
weights."""

_UNCOMPRESSED = "none"
_SECTIONS = (
    "model",
    "ddp",
    "optimizer",
    "train",
    "validation",
    "checkpoint",
    "logger",
    "dist",
    "rng",
    "rerun_state_machine",
)
"""Parts of a ``ConfigContainer`` that hold what Megatron has as arguments."""
_RENAMED = {
    "num_experts": "num_moe_experts",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
}
"""Megatron's argument -> the field of Megatron-Bridge's container."""


def _names_of_settings() -> dict[str, str]:
    """Return for each setting's path the argument of ``attach``: ``tp[1]`` is the second value of
    ``tp``."""
    names = {path: path for path in FLAG_NAMES.settings if "." not in path}
    for parallelism in PARALLELISMS.values():
        argument = parallelism.traffic.removesuffix(".")
        names[f"{parallelism.name}.compression"] = argument
        names[f"{parallelism.name}.{parallelism.second}"] = f"{argument}[1]"
    names["data_parallel.outer"] = "dp outer="
    names["tensor_parallel.min_mb"] = "min_mb"
    return {**PYTHON_NAMES.settings, **names}


NAMES = Names(_names_of_settings())
"""What the user of ``attach`` types for settings."""


def attach(
    cfg: Any,
    *,
    tp: Spec = _UNCOMPRESSED,
    dp: Spec = _UNCOMPRESSED,
    pp: Spec = _UNCOMPRESSED,
    ep: Spec = _UNCOMPRESSED,
    min_mb: float | None = None,
    **settings: Any,
) -> "BridgeCompression":
    """Compress what a run of Megatron-Bridge sends.

    Hooks are registered on ``cfg.model``. The container is checked when the model is built, since
    ``pretrain`` completes it. Without a codec the hooks only count.

    Args:
        cfg: the ``ConfigContainer``; give the same object to ``pretrain``.
        tp: codec of tensor-parallel traffic (docs/choosing.md).
        dp: codec of data-parallel traffic.
        pp: codec of pipeline-parallel traffic.
        ep: codec of expert-parallel traffic.
        min_mb: smaller messages, in MiB, go uncompressed; every dimension's.
        settings: start_iteration, transport, communicators, error_bound, validate_uncompressed and
            report of ``CompressionConfig``.

    Returns:
        The callback for ``pretrain(cfg, forward_step, callbacks=[...])``.

    Raises:
        CompressionConfigError: an impossible setting; a compressor of gradients with a memory.
    """
    with spelled(NAMES):
        config = CompressionConfig(
            tensor_parallel=_dimension("tensor_parallel", tp, min_mb),
            data_parallel=_dimension("data_parallel", dp, min_mb),
            pipeline_parallel=_dimension("pipeline_parallel", pp, min_mb),
            expert_parallel=_dimension("expert_parallel", ep, min_mb),
            **settings,
        )
        check_report_directory(config.report, resuming=cfg.checkpoint.load is not None)
        compressor = config.data_parallel.compressor
        if config.loss_interval is not None:
            raise SettingError(
                "loss_interval",
                config.loss_interval,
                "needs Megatron-LM's loop or one of your own: Megatron-Bridge hands its forward "
                "step and micro-batches to nobody",
                "drop it, or measure with pretrain_gpt.py",
            )
    if config.auto or config.caat_net.enabled:
        raise CompressionConfigError(
            "auto and caat_net need pretrain_gpt.py; drop them in Megatron-Bridge"
        )
    if compressor is not None and compressor.has_memory:
        raise CompressionConfigError(
            f"dp {dp}: its memory of gradients would be lost on a resume, since Megatron-Bridge "
            "calls nobody when it loads a checkpoint; use a codec such as sdp4bit, or "
            "pretrain_gpt.py"
        )
    # Before the model is built, which makes the buffers.
    _disable_user_buffers(cfg, config)
    _replace_flex_dispatcher(cfg, config)
    gaps.use_shipped_helpers()
    gaps.make_torch_optimizers_resumable()
    return BridgeCompression(cfg, config)


def _dimension(name: str, spec: Spec, min_mb: float | None) -> Any:
    """Return the settings of one kind of parallelism."""
    compression, second = (spec, None) if isinstance(spec, str) else spec
    config_class: Any = settings_of(CompressionConfig)[name].type
    settings = {"compression": compression, PARALLELISMS[name].second: second}
    return config_class(min_mb=min_mb, **settings)


def _disable_user_buffers(cfg: Any, config: CompressionConfig) -> None:
    """Switch off what sends past this project, before it is made; each change is printed once."""
    model = getattr(cfg.model, "transformer", cfg.model)
    lines: dict[str, None] = {}
    # ``pretrain`` sets the model's from the other.
    for owner in (model, cfg.comm_overlap):
        if getattr(owner, "tp_comm_overlap", False):
            lines.update(dict.fromkeys(config.disable_user_buffers(owner)))
    for line in lines:
        print_on_first_rank(f"compression: {line}")


def _replace_flex_dispatcher(cfg: Any, config: CompressionConfig) -> None:
    """Have alltoall send tokens that are to be compressed, before the model is built.

    Raises:
        SettingError: the container has settings of the flex dispatcher alone.
    """
    model = getattr(cfg.model, "transformer", cfg.model)
    # The container is not complete yet, so its fields are not looked up: these are a model's.
    names = Names(NAMES.settings, {name: f"cfg.model.{name}" for name in vars(model)})
    with spelled(names):
        for line in config.replace_flex_dispatcher(model):
            print_on_first_rank(f"compression: {names.resolve(line)}")


def megatron_settings(cfg: Any) -> tuple[Namespace, dict[str, str]]:
    """Return what a container says, under the names of Megatron's arguments, which checks read.

    A field that several parts have is set if one of them sets it.

    Returns:
        The settings; by Megatron's argument the field (``seq_length`` -> cfg.model.seq_length).
    """
    settings: dict[str, Any] = {"data_parallel_size": cfg.data_parallel_size}
    fields: dict[str, str] = {}
    for section in _SECTIONS:
        owner = getattr(cfg, section)
        values = dict(vars(owner))
        transformer = getattr(owner, "transformer", None)
        if transformer is not None:  # a ModelConfig has it inside
            for name, value in vars(transformer).items():
                values[name] = values.get(name) or value
        for name, value in values.items():
            # Several parts have use_distributed_optimizer, for example; one that is set counts.
            if name not in settings or (value and not settings[name]):
                settings[name] = value
                fields[name] = f"cfg.{section}.{name}"
    for name, field in _RENAMED.items():
        settings[name] = settings[field]
        # Messages name the field that the container has.
        fields[name] = fields[field]
    if not settings.get("expert_tensor_parallel_size"):
        settings["expert_tensor_parallel_size"] = settings["tensor_model_parallel_size"]
    return Namespace(**settings), fields


def check(cfg: Any, config: CompressionConfig) -> tuple[CompressionConfig, Namespace, Names]:
    """Check settings against a container whose values are final.

    Returns:
        The settings as they are used; the container's as Megatron's arguments; what the user calls
        both.

    Raises:
        CompressionConfigError: what cannot be honoured, by the container's fields and our
            arguments.
    """
    arguments, fields = megatron_settings(cfg)
    names = Names(NAMES.settings, fields)
    with spelled(names):
        if cfg.dist.use_decentralized_pg:
            raise CompressionConfigError(
                "cfg.dist.use_decentralized_pg has groups not covered here; drop it"
            )
        if config.tensor_parallel.enabled and arguments.tp_comm_overlap:
            raise SettingError(
                "args.tp_comm_overlap", None, "was set after bridge.attach", "set it before that"
            )
        config = replace(config, data_parallel=config.data_parallel.resolved(arguments))
        config.check(arguments)
    return config, arguments, names


class BridgeHost(Host):
    """Megatron-Bridge's training loop.

    Args:
        cfg: its ``ConfigContainer``.
        arguments: the container's values as Megatron's arguments.
        names: what the user calls settings and those arguments.
    """

    def __init__(self, cfg: Any, arguments: Namespace, names: Names) -> None:
        self.cfg = cfg
        self.arguments = arguments
        self.names = names
        self.log_interval = cfg.logger.log_interval
        self.iteration = self.current_iteration
        self.state: Any = None
        """Bridge's ``GlobalState``; None until training begins."""
        self.training_seconds = 0.0
        """Spent in iterations so far."""

    def current_iteration(self) -> int:
        """Return the zero-based iteration that runs; 0 before training begins."""
        return 0 if self.state is None else self.state.train_state.step

    def track(self, scalars: dict[str, float], iteration: int) -> None:
        track(self.state.tensorboard_logger, self.state.wandb_logger, scalars, iteration)

    def seconds(self) -> float:
        return self.training_seconds

    def train_iters(self) -> int | None:
        return self.cfg.train.train_iters

    def settings(self) -> dict[str, Any]:
        values = vars(self.arguments).items()
        return {name: value for name, value in values if isinstance(value, _JSON_TYPES)}


_JSON_TYPES = bool | int | float | str | None


class BridgeCompression:
    """A callback of Megatron-Bridge's, and the hooks of its model. Made by ``attach``."""

    def __init__(self, cfg: Any, config: CompressionConfig) -> None:
        self.cfg = cfg
        self.config = config
        self.compression: Session | None = None
        """There is one once the model is built."""
        self._host: BridgeHost  # there is one once the model is built
        self._iteration_began = 0.0
        self._is_at_work = False
        """True during a training step."""
        model = cfg.model
        if hasattr(model, "pre_wrap_hooks"):  # a ModelConfig
            # A ModelConfig has lists, a provider has methods.
            model.pre_wrap_hooks.append(self._attach_model)
            model.post_wrap_hooks.append(self._attach_wrapped)
        else:
            model.register_pre_wrap_hook(self._attach_model)
            model.register_post_wrap_hook(self._attach_wrapped)

    def _attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self.config, arguments, names = check(self.cfg, self.config)
        if self.compression is not None:  # the model is built a second time
            self.compression.close()
        self._host = BridgeHost(self.cfg, arguments, names)
        self.compression = Session(self.config, self._host)
        with spelled(names):
            self.compression.open()
            self.compression.describe()
            return self.compression.attach_model(chunks)

    def _attach_wrapped(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        with spelled(self._host.names):
            return self._session.attach_wrapped(chunks)

    @property
    def _session(self) -> Session:
        """The session of the model that has been built."""
        if self.compression is None:
            raise CompressionConfigError(
                "pretrain has another cfg than bridge.attach: give both one object"
            )
        return self.compression

    def on_train_start(self, context: Any) -> None:
        """Continue as the run that saved the checkpoint, if one was loaded."""
        session = self._session
        self._host.state = context.state
        folder = self.cfg.checkpoint.load
        iteration = self._host.current_iteration()
        if not iteration or not folder:
            return
        saved: list[Any] = [None]
        file = Path(folder) / f"iter_{iteration:07d}" / STATE_FILE
        if dist.get_rank() == 0 and file.exists():
            saved = [self._read_state(file)]
        # One rank reads, since folders may be local to a node.
        dist.broadcast_object_list(saved)
        if saved[0] is not None:
            session.resume({STATE: saved[0]})

    @staticmethod
    def _read_state(file: Path) -> dict[str, Any] | None:
        """Return what ``on_checkpoint_save`` has written; None, and a line: the file is damaged."""
        try:
            state = read_json(file)
            if isinstance(state, dict) and "config" in state:
                return state
            reason = "it holds no settings"
        except (OSError, ValueError) as error:
            reason = str(error)
        print_on_first_rank(
            f"compression: {file} cannot be read ({reason}); layers past the error bound are "
            "measured anew"
        )
        return None

    def on_train_step_start(self, context: Any) -> None:
        """Time the iteration, and put this run to work: of several in a process Megatron's own
        functions serve the one whose step it is."""
        if not self._is_at_work:  # a step that raised has no end
            running.begin(self._session.run)
            self._is_at_work = True
        self._iteration_began = time.perf_counter()

    def on_train_step_end(self, context: Any) -> None:
        """Tell the session that an iteration has ended; at the log interval it writes its line."""
        # Evaluation and saving lie between two of these calls, and are not counted, as in
        # Megatron's own time of an iteration.
        self._host.training_seconds += time.perf_counter() - self._iteration_began
        losses = {}
        if not context.skipped_iter and context.loss_dict:
            losses = context.loss_dict
        # Bridge counts the iteration only after its callbacks; the log counts from 1.
        self._session.iteration_ends(self._host.current_iteration() + 1, losses)
        self._rest()

    def on_train_end(self, context: Any) -> None:
        """Write the report."""
        self._rest()
        self._session.training_ends()

    def _rest(self) -> None:
        """Take this run from work, where it is."""
        if self._is_at_work:
            running.end()
            self._is_at_work = False

    def on_eval_start(self, context: Any, split: str = "valid") -> None:
        """Count an evaluation's traffic separately."""
        self._host.state = context.state
        self._session.split = split
        self._session.evaluation_begins()

    def on_test_start(self, context: Any) -> None:
        """Count a test's traffic separately."""
        self.on_eval_start(context, "test")

    def on_eval_end(self, context: Any) -> None:
        """Store the evaluation's losses."""
        self._session.evaluation_ends(context.total_loss_dict)

    on_test_end = on_eval_end

    def on_checkpoint_save(self, context: Any) -> None:
        """Save what a resume needs beside the checkpoint that is being written.

        The folder is that of the current iteration: with ``async_save`` the tracker still names the
        checkpoint before, until this one is complete.
        """
        if dist.get_rank() != 0:
            return
        iteration = context.state.train_state.step
        folder = Path(self.cfg.checkpoint.save) / f"iter_{iteration:07d}"
        state = {"config": self.config.asdict(), **self._session.state()}
        try:
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {folder}")
            write_whole(folder / STATE_FILE, json.dumps(state))
        except OSError as error:
            print_on_first_rank(f"compression: its state was not saved ({error}); training goes on")
