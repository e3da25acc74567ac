"""Puts compression into a run of Megatron-LM's training loop. Two lines of an entrypoint:

    args = parse_and_validate_args(extra_args_provider=compression.add_arguments)
    compression.enable(args, model_config)

``attach`` is for loops without megatron.training; see frontends/own_loop.py.
"""

import sys
from argparse import ArgumentParser, Namespace

from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron import host
from megatron.compression import flags, megatron_checks  # noqa: F401  (the second explains errors)
from megatron.compression.auto.automatic import Automatic
from megatron.compression.config import names_on_command_line
from megatron.compression.errors import InputError, OneLineParser, end_with_one_line
from megatron.compression.expert_parallel.flex import sends_by_flex
from megatron.compression.frontends.megatron_lm import (
    checkpoints,  # noqa: F401  (it explains errors)
    checks,
)
from megatron.compression.frontends.megatron_lm.implementation import (
    describe,
    missing_extension_overrides,
    transformer_engine,
)
from megatron.compression.frontends.megatron_lm.loop import LOG, MegatronLoop
from megatron.compression.local_steps.samples import use_own_folders
from megatron.compression.patches import gaps, loop, running, symbols
from megatron.compression.session import Session
from megatron.compression.torch_native.spec import apply_native_defaults, block_spec, is_covered


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser (an ``extra_args_provider``), which may not have them
    already.

    ``--transformer-impl`` is Transformer Engine where it works and the script says nothing.
    Validated arguments are adapted to what the machine lacks (CUDA, apex, Transformer Engine), each
    change said in a line. From here on an ``InputError`` that the script does not catch ends the
    process with a line.
    """
    if "--taco" in parser._option_string_actions:
        raise InputError("the script has compression's flags itself; drop -m megatron.compression")
    # From here on: parsing itself raises the first of them.
    end_with_one_line()
    symbols.change_class(parser, OneLineParser)
    layers = "local" if transformer_engine().missing else "transformer_engine"
    # Megatron wants --spec local with --attention-backend local: apply_native_defaults removes it
    # again.
    parser.set_defaults(transformer_impl=layers, spec=["local"], tokenizer_type="GPT2BPETokenizer")
    # After the defaults: --help shows them.
    flags.add_flags(parser)
    gaps.build_gpt2_from_its_files()
    # What is refused comes before what is changed.
    # Before the folders are looked at.
    loop.after_validating_arguments(use_own_folders)
    loop.after_validating_arguments(checks.check_arguments)
    loop.after_validating_arguments(adapt_arguments)
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
    if args.num_experts is not None and sends_by_flex(args):
        names = names_on_command_line(args)
        lines += map(names.resolve, flags.resolve(args).replace_flex_dispatcher(args))
    LOG.keep()
    for line in lines:
        LOG(line)


def enable(args: Namespace, model_config: GPTModelConfig | None = None) -> Session:
    """Hook compression and the byte ledger into the run that ``args`` describe. Call it before
    ``pretrain``.

    Without a compression flag the hooks only count. A process may enable several runs, each with a
    model config of its own.

    Args:
        args: Megatron's arguments, validated.
        model_config: the model that Megatron is to build; None where ``pretrain`` gets a model
            provider.

    Returns:
        The session of the run, which is open.

    Raises:
        CompressionConfigError: a setting that cannot be honoured.
        InputError: Megatron's arguments name data that do not fit the tokenizer, or a report's
            folder that cannot be written.
    """
    # So that they come after Megatron's own start-up lines.
    LOG.keep()
    if model_config is not None:
        # Before the config is used: is_covered looks at its layers.
        complete(model_config, args)
    host_loop = MegatronLoop(args)
    config = host_loop.checked_config()
    # For entrypoints that have not called ``prepare``.
    gaps.use_shipped_helpers()
    gaps.make_torch_optimizers_resumable()
    gaps.fuse_torch_adam()
    gaps.launch_optimizers_together()
    session = Session(config, host_loop).open()
    loop.tell_sessions()
    if config.auto:
        # It decides when the first chunk is there: its layers say what is sent.
        session.automatic = Automatic(session, host_loop.flops)
    if model_config is None:
        session.awaits_provided_chunks = True
    else:
        running.mark(model_config, session.run)
        # Megatron's builder calls them before and after it wraps the chunks.
        model_config.pre_wrap_hooks.append(session.attach_model)
        model_config.post_wrap_hooks.append(session.attach_wrapped)
        if not is_covered(model_config.transformer):
            LOG(
                "compression: not a GPT that is covered: not all of its tensor-parallel traffic is "
                "counted"
            )
    if session.automatic is None:
        session.describe()
    return session


def complete(model_config: GPTModelConfig, args: Namespace) -> None:
    """Give a model config what ``gpt_config_from_args`` leaves out: our layers, and
    --rope-scaling-factor (without it every Llama 3.x would have 3.1's 8 in megatron-core
    0.19.2)."""
    if getattr(model_config, "transformer_layer_spec", "") is None:
        model_config.transformer_layer_spec = gpt_layer_spec
    if hasattr(model_config, "rope_scaling_factor"):
        model_config.rope_scaling_factor = args.rope_scaling_factor


def gpt_layer_spec(model_config: GPTModelConfig, vp_stage: int | None = None):
    """The block of layers of a GPT model, a ``GPTModelConfig.transformer_layer_spec``: our layers
    for ``--transformer-impl local``, megatron-core's own choice for everything else."""
    transformer = model_config.transformer
    if transformer.transformer_impl != "local" or not is_covered(transformer):
        return default_layer_spec(model_config, vp_stage)
    gaps.predict_with_own_layers()
    return block_spec(transformer, vp_stage)
