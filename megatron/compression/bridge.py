"""Compression in Megatron-Bridge: one callback for its ``pretrain``. Two lines of a script:

    from megatron.compression import bridge
    pretrain(cfg, forward_step, callbacks=[bridge.attach(cfg, tp="int6", dp="sdp4bit")])

Nothing of Megatron-Bridge is imported: the container and the callback's context are used by their fields.
"""

import json
import re
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression import graphs, repetition
from megatron.compression.codecs.registry import settings_of
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.compression import STATE, Compression, groups_by_dimension
from megatron.compression.config import CompressionConfig, train_iterations
from megatron.compression.dimension import naming_flags, print_on_first_rank, renaming
from megatron.compression.errors import CompressionConfigError
from megatron.compression.names import FLAGS
from megatron.compression.patches import gaps
from megatron.compression.report import Reporter, check_report_directory, track

STATE_FILE = f"{STATE}.json"
"""In the folder of a checkpoint's iteration: what ``Compression.state`` gives, and the settings."""

Spec = str | tuple[str, str]
"""A codec or recipe, or two: of activations and of gradients; ``dp``: of gradients and of weights."""

_NO = "none"
_PARTS = ["model", "ddp", "optimizer", "train", "validation", "checkpoint", "logger", "dist", "rng"]
_PARTS += ["rerun_state_machine"]
_FP32_SUM = "reduce_scatter_with_fp32_accumulation"
_RENAMED = {"num_experts": "num_moe_experts", f"ddp_{_FP32_SUM}": _FP32_SUM}
"""Megatron's argument -> the field of Megatron-Bridge's container."""


def attach(
    cfg: Any, *, tp: Spec = _NO, dp: Spec = _NO, pp: Spec = _NO, ep: Spec = _NO, min_mb=None, **more
) -> "BridgeCompression":
    """Compress what a run of Megatron-Bridge sends.

    Hooks are registered on ``cfg.model``. The container is checked when the model is built, since
    ``pretrain`` completes it. Without a codec the hooks only count.

    Args:
        cfg: the ``ConfigContainer``; give the same object to ``pretrain``.
        tp, dp, pp, ep: codecs of tensor-, data-, pipeline- and expert-parallel traffic (docs/choosing.md).
        min_mb: every dimension's.
        more: start_iteration, transport, communicators, error_bound, validate_uncompressed and report of
            ``CompressionConfig``.

    Returns: the callback for ``pretrain(cfg, forward_step, callbacks=[...])``.

    Raises: CompressionConfigError: an impossible setting; a compressor of gradients with a memory.
    """
    with renaming(OUR_NAMES), naming_flags():
        for name, spec in (("tensor", tp), ("data", dp), ("pipeline", pp), ("expert", ep)):
            first, second = (spec, None) if isinstance(spec, str) else spec
            kind: Any = settings_of(CompressionConfig)[f"{name}_parallel"].type
            other = {"weights" if name == "data" else "backward": second}
            more[f"{name}_parallel"] = kind(compression=first, min_mb=min_mb, **other)
        config = CompressionConfig(**more)
        check_report_directory(config.report, resuming=cfg.checkpoint.load is not None)
        compressor = config.data_parallel.compressor
    if config.auto or config.caat_net.enabled:
        raise CompressionConfigError(
            "auto and caat_net need pretrain_gpt.py; drop them in Megatron-Bridge"
        )
    if compressor is not None and compressor.has_memory:
        raise CompressionConfigError(
            f"dp {dp}: its memory of gradients would be lost on a resume, since Megatron-Bridge calls nobody "
            "when it loads a checkpoint; use a codec such as sdp4bit, or pretrain_gpt.py"
        )
    model = getattr(cfg.model, "transformer", cfg.model)
    having = [one for one in (model, cfg.comm_overlap) if getattr(one, "tp_comm_overlap", False)]
    for line in {line for one in having for line in config.disable_user_buffers(one)}:
        print_on_first_rank(f"compression: {line}")
    gaps.use_shipped_helpers()
    gaps.make_torch_adam_resumable()
    return BridgeCompression(cfg, config)


def _our_names() -> dict[str, str]:
    """Flag, or flag and second value -> the argument of ``attach``."""
    found = {"--taco": "tp"}
    for flag, paths in FLAGS.items():
        short = re.sub(r"^--(compression-)?|-compression$", "", flag).replace("-", "_")
        found |= {f"{flag} {path.rpartition('.')[2].upper()}": f"{short}[1]" for path in paths[1:]}
        found[flag] = short
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


OUR_NAMES = _our_names()


def megatron_settings(cfg: Any) -> tuple[Namespace, dict[str, str]]:
    """What a container says, under the names of Megatron's arguments, which the dimensions' checks read.

    A field that several parts have is set if one of them sets it.

    Returns: the settings; by Megatron's flag the field (``--seq-length`` -> cfg.model.seq_length).
    """
    settings: dict[str, Any] = {"data_parallel_size": cfg.data_parallel_size}
    places: dict[str, str] = {}
    for part in _PARTS:
        owner = getattr(cfg, part)
        for one in (owner, getattr(owner, "transformer", None)):  # a ModelConfig has it as a part
            for name, value in vars(one).items() if one is not None else ():
                if name not in settings or (value and not settings[name]):
                    settings[name], places[name] = value, f"cfg.{part}.{name}"
    for name, field in _RENAMED.items():
        settings[name], places[name] = settings[field], places[field]
    if not settings.get("expert_tensor_parallel_size"):
        settings["expert_tensor_parallel_size"] = settings["tensor_model_parallel_size"]
    flags = {
        f"--{name.replace('_', '-')}": place for name, place in places.items() if name[0] != "_"
    }
    return Namespace(**settings), flags


def check(cfg: Any, config: CompressionConfig) -> tuple[CompressionConfig, Namespace]:
    """Check settings against a container whose values are final.

    Returns: the settings as they are used; the container's as Megatron's arguments.

    Raises: CompressionConfigError: what cannot be honoured, by the container's fields and our arguments.
    """
    settings, names = megatron_settings(cfg)
    with renaming(OUR_NAMES | names), naming_flags():
        if cfg.dist.use_decentralized_pg:
            raise CompressionConfigError(
                "cfg.dist.use_decentralized_pg has groups not covered here; drop it"
            )
        if config.tensor_parallel.enabled and settings.tp_comm_overlap:
            raise CompressionConfigError(
                "--tp-comm-overlap was set after bridge.attach; set it before that"
            )
        config = replace(config, data_parallel=config.data_parallel.resolved(settings))
        config.check(settings)
    return config, settings


class BridgeCompression:
    """A callback of Megatron-Bridge's, and the hooks of its model. Made by ``attach``."""

    def __init__(self, cfg: Any, config: CompressionConfig) -> None:
        self.cfg, self.config = cfg, config
        self.compression: Any = None
        """There is one once the model is built."""
        self._state: Any = None
        self._seconds = self._began = 0.0
        for when, hook in (("pre", self._attach_model), ("post", self._attach_wrapped)):
            if hasattr(cfg.model, f"{when}_wrap_hooks"):  # a ModelConfig
                getattr(cfg.model, f"{when}_wrap_hooks").append(hook)
            else:
                getattr(cfg.model, f"register_{when}_wrap_hook")(hook)

    def _attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self.config, settings = check(self.cfg, self.config)
        config, say, interval = self.config, print_on_first_rank, self.cfg.logger.log_interval
        compression = self.compression = Compression(
            config, iteration=self._iteration, train_iters=train_iterations(settings), say=say
        )
        if config.report or config.error_bound is not None:
            compression.run.policy.meter.interval = interval
        graphs.follow(settings, compression.run, say)
        kept = {
            k: v
            for k, v in vars(settings).items()
            if isinstance(v, bool | int | float | str | None)
        }
        self._reporter = Reporter(
            compression.ledger,
            compression.run.policy.meter,
            log_interval=interval,
            settings={"compression": config.asdict(), "megatron": kept},
            directory=config.report,
            train_iters=lambda: self.cfg.train.train_iters,
            track=lambda *row: track(
                self._state.tensorboard_logger, self._state.wandb_logger, *row
            ),
            small_hint=f"min_mb={config.tensor_parallel.min_bytes / 2**20:g}",
            clock=lambda: self._seconds,
        )
        groups = partial(groups_by_dimension, settings.num_experts is not None)
        self._audit = BackendAudit(compression.ledger, groups)
        compression.on_attached(self._audit.start_with_first_forward)
        compression.on_attached(lambda _: repetition.attach(settings, config, compression.run, say))
        with renaming(OUR_NAMES), naming_flags():
            for line in config.describe(settings):
                say(f"compression: {line}")
            return compression.attach_model(chunks)

    def _attach_wrapped(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        with renaming(OUR_NAMES), naming_flags():
            return self.compression.attach_wrapped(chunks)

    def _iteration(self) -> int:
        return 0 if self._state is None else self._state.train_state.step

    def on_train_start(self, context: Any) -> None:
        """Continue as the run that saved the checkpoint, if one was loaded."""
        if self.compression is None:
            raise CompressionConfigError(
                "pretrain has another cfg than bridge.attach: give both one object"
            )
        self._state = context.state
        folder, iteration = self.cfg.checkpoint.load, self._iteration()
        if iteration and folder:
            saved: list[Any] = [None]
            file = Path(folder) / f"iter_{iteration:07d}" / STATE_FILE
            if dist.get_rank() == 0 and file.exists():
                saved = [json.loads(file.read_text())]
            dist.broadcast_object_list(saved)
            if saved[0] is not None:
                self.compression.resume({STATE: saved[0]})

    def on_train_step_start(self, context: Any) -> None:
        """Time the iteration."""
        self._began = time.perf_counter()

    def on_train_step_end(self, context: Any) -> None:
        """Count the iteration; at the log interval write what was sent to the log and the trackers."""
        self._seconds += time.perf_counter() - self._began
        for line in self._audit.finish():
            print_on_first_rank(f"compression: {line}")
        iteration = self._iteration() + 1
        self._reporter.on_training_log(
            iteration, {} if context.skipped_iter else context.loss_dict or {}
        )
        self.compression.on_training_log(iteration, self.cfg.logger.log_interval)

    def on_train_end(self, context: Any) -> None:
        """Write the report."""
        self._reporter.finish()

    def on_eval_start(self, context: Any, split: str = "valid") -> None:
        """Count an evaluation's traffic separately."""
        self._state = context.state
        self._reporter.before_evaluate(split)

    def on_test_start(self, context: Any) -> None:
        """As for a validation."""
        self.on_eval_start(context, "test")

    def on_eval_end(self, context: Any) -> None:
        """Store the evaluation's losses."""
        self._reporter.after_evaluate(context.total_loss_dict)

    on_test_end = on_eval_end

    def on_checkpoint_save(self, context: Any) -> None:
        """Save what a resume needs; the tracker names the iteration, which a save in the background began."""
        folder = Path(self.cfg.checkpoint.save)
        if dist.get_rank() != 0:
            return
        try:
            iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
            state = {"config": self.config.asdict(), **self.compression.state()}
            (folder / f"iter_{iteration:07d}" / STATE_FILE).write_text(json.dumps(state))
        except (OSError, ValueError) as error:
            print_on_first_rank(f"compression: its state was not saved ({error}); training goes on")
