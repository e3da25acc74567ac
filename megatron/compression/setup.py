"""Puts compression into a training run: config, hooks, patches, report. Two lines of an entrypoint's:

    args = parse_and_validate_args(extra_args_provider=compression.add_arguments)
    compression.enable(args, model_config)

``attach`` is for loops without megatron.training; see compression.py.
"""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from megatron.training import get_tokenizer, print_rank_0
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.training import num_floating_point_operations

from megatron import host
from megatron.compression import flags, graphs, repetition
from megatron.compression.auto.automatic import Automatic
from megatron.compression.caat_net.config import check_checkpoint
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.compression import STATE, Compression, groups_by_dimension
from megatron.compression.config import train_iterations
from megatron.compression.errors import InputError, OneLineParser, end_with_one_line
from megatron.compression.patches import gaps, loop, symbols
from megatron.compression.report import (
    Reporter,
    check_report_directory,
    megatron_seconds,
    megatron_track,
)
from megatron.compression.startup import checkpoints, checks  # noqa: F401  (they explain errors)
from megatron.compression.startup.implementation import (
    describe,
    missing_extension_overrides,
    transformer_engine,
)
from megatron.compression.torch_native.spec import apply_native_defaults, block_spec, is_covered


class _Log:
    """Prints our lines on rank 0: kept until training begins, so that they stand together, last before
    iteration 1."""

    def __init__(self) -> None:
        self._kept: list[str] | None = []

    def keep(self) -> None:
        """Keep lines from now on."""
        self._kept = self._kept or []

    def __call__(self, line: str) -> None:
        (print_rank_0 if self._kept is None else self._kept.append)(line)

    def show(self, *_: object) -> None:
        """Print what was kept, and every further line at once."""
        kept, self._kept = self._kept, None
        for line in kept or []:
            print_rank_0(line)


_log = _Log()
"""One a process: lines come from parsing on, before there is a run."""


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser (an ``extra_args_provider``), which may not have them already.

    ``--transformer-impl`` is Transformer Engine where it works and the script says nothing. Validated
    arguments are adapted to what the machine lacks (CUDA, apex, Transformer Engine), each change said in a
    line. From here on an ``InputError`` that the script does not catch ends the process with a line.
    """
    if "--taco" in parser._option_string_actions:
        raise InputError("the script has compression's flags itself; drop -m megatron.compression")
    end_with_one_line()
    symbols.change_class(parser, OneLineParser)
    layers = "local" if transformer_engine().missing else "transformer_engine"
    # Megatron wants --spec local with --attention-backend local: apply_native_defaults removes it again.
    parser.set_defaults(transformer_impl=layers, spec=["local"], tokenizer_type="GPT2BPETokenizer")
    flags.add_flags(parser)
    gaps.build_gpt2_from_its_files()
    loop.after_validating_arguments(checks.check_arguments, adapt_arguments)
    return parser


def adapt_arguments(args: Namespace) -> None:
    """Change in ``args`` what this machine cannot do as asked, and say so. Idempotent."""
    lines = [describe(args, sys.argv)]
    if host.is_active():
        from megatron.host.engine import cpu_argument_overrides

        lines += cpu_argument_overrides(args)
    checks.check_local_layers(args)
    lines += missing_extension_overrides(args) + apply_native_defaults(args, sys.argv)
    if getattr(args, "tp_comm_overlap", False):
        lines += flags.resolve(args).disable_user_buffers(args)
    _log.keep()
    for line in lines:
        _log(line)


def enable(args: Namespace, model_config: GPTModelConfig | None = None) -> Compression:
    """Hook compression and the byte ledger into the run that ``args`` describe. Call it before ``pretrain``.

    Without a compression flag the hooks only count.

    Args:
        model_config: the model that Megatron is to build; None where ``pretrain`` gets a model provider.
    Returns: What was put into the run.
    Raises: CompressionConfigError: a setting that cannot be honoured.
    """
    _log.keep()
    config = flags.resolve(args)
    checks.check_evaluation(args)
    checks.check_vocabulary(args, get_tokenizer().vocab_size)
    check_report_directory(config.report, args.load is not None)
    gaps.use_shipped_helpers()
    gaps.make_torch_adam_resumable()
    gaps.fuse_torch_adam()
    compression = Compression(
        config,
        iteration=partial(current_iteration, args),
        train_iters=train_iterations(args),
        say=_log,
        broadcasts_batch=True,
    )
    if config.report or config.error_bound is not None:
        compression.run.policy.meter.interval = args.log_interval
    graphs.follow(args, compression.run, _log)
    settings = {"compression": config.asdict(), "megatron": _megatron_settings(args)}
    automatic = None
    if config.auto:
        flops = partial(num_floating_point_operations, args, args.global_batch_size)
        automatic = Automatic(args, compression, flops, _log, settings.update)
    if model_config is None:
        attach_next = automatic.attach_next if automatic else compression.attach_model
        loop.around_model_building(attach_next, compression.attach_wrapped)
    else:
        complete(model_config, args)
        attach_model = automatic.attach_model if automatic else compression.attach_model
        model_config.pre_wrap_hooks.append(attach_model)
        model_config.post_wrap_hooks.append(compression.attach_wrapped)
    reporter = Reporter(
        compression.run.ledger,
        compression.run.policy.meter,
        log_interval=args.log_interval,
        settings=settings,
        directory=config.report,
        train_iters=lambda: args.train_iters,
        track=megatron_track,
        small_hint=f"--compression-min-mb {config.tensor_parallel.min_bytes / 2**20:g}",
        clock=megatron_seconds,
    )
    _follow(args, compression, reporter, automatic)
    compression.on_attached(  # by then --compression auto has decided, too
        lambda chunks: repetition.attach(args, compression.config, compression.run, _log)
    )
    if model_config is not None and not is_covered(model_config.transformer):
        _log(
            "compression: not a GPT that is covered: not all of its tensor-parallel traffic is counted"
        )
    for line in [] if automatic else config.describe(args):
        _log(f"compression: {line}")
    return compression


def complete(model_config: GPTModelConfig, args: Namespace) -> None:
    """Give a model config what ``gpt_config_from_args`` leaves out: our layers, and --rope-scaling-factor
    (without it every Llama 3.x would have 3.1's 8 in megatron-core 0.19.2)."""
    if getattr(model_config, "transformer_layer_spec", "") is None:
        model_config.transformer_layer_spec = gpt_layer_spec
    if hasattr(model_config, "rope_scaling_factor"):
        model_config.rope_scaling_factor = args.rope_scaling_factor


def _follow(
    args: Namespace, compression: Compression, reporter: Reporter, auto: Automatic | None
) -> None:
    """Call the parts of a run where Megatron's loop comes by."""
    audit = BackendAudit(
        compression.ledger, lambda: groups_by_dimension(args.num_experts is not None)
    )
    compression.on_attached(audit.start_with_first_forward)

    def on_training_log(iteration: int, losses: dict) -> None:
        for line in audit.finish():
            _log(f"compression: {line}")
        reporter.on_training_log(iteration, losses)
        compression.on_training_log(iteration, args.log_interval)
        if auto is not None:
            auto.on_training_log(iteration)

    loop.on_training_log(on_training_log)

    def before_evaluate(split: str) -> None:
        _log.show()  # a run that only evaluates
        reporter.before_evaluate(split)

    loop.before_training(_log.show)
    loop.around_evaluate(before_evaluate, reporter.after_evaluate)
    loop.on_training_end(reporter.finish)

    resumed = False

    def on_resume(state_dict: dict | None) -> None:
        nonlocal resumed  # what is read first, the arguments, has it as well
        if state_dict is None:
            return
        if STATE in state_dict and not args.finetune and not resumed:
            resumed = True
            compression.resume(state_dict)
        for dimension in compression.dimensions.values():
            dimension.loaded(state_dict)

    loop.around_checkpoint_state(compression.add_state)
    loop.on_checkpoint_args(partial(check_checkpoint, args=args))
    loop.on_checkpoint_read(on_resume)


def current_iteration(args: Namespace) -> int:
    """Zero-based; known before the first message. A run that only evaluates sets args.iteration alone."""
    return max(getattr(args, "curr_iteration", 0), getattr(args, "iteration", 0))


def gpt_layer_spec(model_config: GPTModelConfig, vp_stage: int | None = None):
    """The block of layers of a GPT model, a ``GPTModelConfig.transformer_layer_spec``: our layers for
    ``--transformer-impl local``, megatron-core's own choice for everything else."""
    transformer = model_config.transformer
    if transformer.transformer_impl != "local" or not is_covered(transformer):
        return default_layer_spec(model_config, vp_stage)
    gaps.predict_with_own_layers()
    return block_spec(transformer, vp_stage)


def _megatron_settings(args: Namespace) -> dict:
    """Megatron's own arguments as JSON-ready values, without those of this machine and moment."""
    kept = (bool, int, float, str, type(None))
    ours = vars(flags.add_flags(ArgumentParser()).parse_args([]))
    return {
        name: value if isinstance(value, kept) else str(value)
        for name, value in sorted(vars(args).items())
        if name not in ours and not name.startswith("_") and name != "rank"
    }
