"""Command-line flags, generated from the dataclasses of config.py, and their check against Megatron's."""

import argparse

from megatron.training.argument_utils import ArgumentGroupFactory, _default_config_from_args

from megatron.compression.config import (
    CaatNetSettings,
    CompressionConfig,
    CompressionConfigError,
    DataParallelCompression,
    PipelineParallelCompression,
    ReportSettings,
    TensorParallelCompression,
)
from megatron.compression.data_parallel.checks import check_data_parallel
from megatron.compression.presets import HELP_3D, HELP_VALIDATION, name_codecs, tell_none_from_absent
from megatron.compression.tensor_parallel.caat_net_checks import check_caat_net

_GROUPS = {
    "tensor_parallel": TensorParallelCompression,
    "data_parallel": DataParallelCompression,
    "pipeline_parallel": PipelineParallelCompression,
    "caat_net": CaatNetSettings,
    "report": ReportSettings,
}

_GATHERED_BY_MEGATRON = {
    "mtp_num_layers": "the input of each multi-token-prediction layer",
    "distribute_saved_activations": "the inputs of recomputed layers",
}
"""Flags that make megatron-core communicate activations in a way that no site covers."""

_RESOLVED = (
    "dp_error_feedback",
    "quantized_weights",
    "quantized_gradients",
    "gradients_quantization_start_iteration",
)
"""Data-parallel flags that --dp-compression may decide."""


def add_compression_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser (an ``extra_args_provider``).

    Every flag but ``--taco`` and those of all dimensions is a field of a dataclass in config.py.
    """
    everything = parser.add_argument_group("compression (all dimensions)")
    everything.add_argument("--compression-3d", action="store_true", help=HELP_3D)
    everything.add_argument("--validate-uncompressed", action="store_true", help=HELP_VALIDATION)
    for name, config_class in _GROUPS.items():
        group = ArgumentGroupFactory(config_class).build_group(
            parser, title=f"compression ({name.replace('_', ' ')})"
        )
        if name == "tensor_parallel":
            group.add_argument(
                "--taco",
                action="store_true",
                help="Compress tensor-parallel traffic with TACO at the paper's settings: the same as "
                "--tp-compression taco. The --taco-* flags change single settings.",
            )
    tell_none_from_absent(parser)
    _escape_broken_help(parser)
    return parser


def _escape_broken_help(parser: argparse.ArgumentParser) -> None:
    """Let ``--help`` work: megatron-core has a help text with a bare percent sign, which argparse formats."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def compression_config_from_args(args: argparse.Namespace) -> CompressionConfig:
    """Build the frozen config from parsed flags and refuse what cannot be honoured.

    Args:
        args: the namespace of ``parse_and_validate_args``.

    Raises:
        CompressionConfigError: a setting that is impossible, alone or together with Megatron's flags.
    """
    if args.taco:
        if args.tp_compression == "auto":
            raise CompressionConfigError(
                "--taco is the paper's setting and --tp-compression auto another one; drop one of the two"
            )
        if args.tp_compression == "none":
            raise CompressionConfigError("--taco contradicts --tp-compression none; drop one of the two")
        args.tp_compression = "taco"
    if args.dp_compression is None and (args.quantized_weights or args.quantized_gradients):
        args.dp_compression = "sdp4bit"  # as in the scripts of its authors
    name_codecs(args)
    parts = {name: _default_config_from_args(config_class, args) for name, config_class in _GROUPS.items()}
    sharded = getattr(args, "use_distributed_optimizer", False)
    parts["data_parallel"] = parts["data_parallel"].resolved(sharded, _iterations(args))
    for name in _RESOLVED:  # for checkpoints and reports
        setattr(args, name, getattr(parts["data_parallel"], name))
    config = CompressionConfig(**parts, validate_uncompressed=args.validate_uncompressed)
    if config.tensor_parallel.enabled:
        _check_tensor_parallel(args)
        _check_layers(config.tensor_parallel, args.num_layers)
    if config.pipeline_parallel.enabled:
        _check_pipeline_parallel(args)
    check_data_parallel(config.data_parallel, args)
    check_caat_net(config.caat_net, args)
    return config


def _iterations(args: argparse.Namespace) -> int | None:
    """How long the run is; None where Megatron's flags leave it open."""
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    growing = getattr(args, "step_batch_size_schedule", None)  # global_batch_size is another one then
    if iterations or not samples or not args.global_batch_size or growing:
        return iterations
    return samples // args.global_batch_size


def _check_tensor_parallel(args: argparse.Namespace) -> None:
    """Refuse ``--taco`` where some of the traffic would silently stay uncompressed."""
    if args.transformer_impl != "local":
        raise CompressionConfigError(
            f"--taco compresses the layers of --transformer-impl local, not of {args.transformer_impl}, "
            "which communicates inside its own kernels; use --transformer-impl local or drop --taco"
        )
    if args.num_experts is not None:
        raise CompressionConfigError(
            "--taco does not cover expert and router traffic; drop --num-experts or --taco"
        )
    if args.cuda_graph_impl != "none":
        raise CompressionConfigError(
            "--taco chooses, counts and measures on the host at each message, which a replayed graph leaves "
            "out; drop --cuda-graph-impl or --taco"
        )
    if args.taco_rounding != "nearest" and args.te_rng_tracker:
        raise CompressionConfigError(
            f"--taco-rounding {args.taco_rounding} takes its seeds from Megatron's default random state; "
            "drop --te-rng-tracker, or use --taco-rounding nearest"
        )
    for name, what in _GATHERED_BY_MEGATRON.items():
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise CompressionConfigError(
                f"{flag} gathers {what} over the tensor-parallel ranks, which --taco does not compress; drop "
                "one of the two"
            )
    for flag in (
        "multi_latent_attention",
        "experimental_attention_variant",
        "heterogeneous_layers_config_path",
        "use_kitchen",
    ):
        if getattr(args, flag, None):
            raise CompressionConfigError(
                f"--taco covers the dense GPT layers, not --{flag.replace('_', '-')}; drop one of the two"
            )


def _check_pipeline_parallel(args: argparse.Namespace) -> None:
    """Refuse ``--pp-compression`` where it would not see the messages of an iteration."""
    if args.cuda_graph_impl == "full_iteration":
        raise CompressionConfigError(
            "--pp-compression counts and chooses on the host, which a replayed graph leaves out; drop "
            "--cuda-graph-impl full_iteration or --pp-compression"
        )


def _check_layers(settings: TensorParallelCompression, num_layers: int) -> None:
    """Refuse a layer that the model does not have."""
    last = max((layer for layer in settings.layers or () if isinstance(layer, int)), default=0)
    if last >= num_layers:
        raise CompressionConfigError(
            f"--taco-layers {settings.taco_layers} names layer {last}, but --num-layers {num_layers} makes "
            f"{num_layers - 1} the last one (they count from 0)"
        )


def uncounted(args: argparse.Namespace) -> list[str]:
    """Lines about tensor-parallel traffic that runs without ``--taco`` and that the ledger does not see."""
    if args.tensor_model_parallel_size == 1:
        return []
    lines = [
        f"--{name.replace('_', '-')} gathers {what}, which is not counted"
        for name, what in _GATHERED_BY_MEGATRON.items()
        if getattr(args, name, None)
    ]
    if args.cuda_graph_impl != "none":
        lines.append(
            f"--cuda-graph-impl {args.cuda_graph_impl}: what a replayed graph sends is not counted, only "
            "what its capture did"
        )
    return lines


def pipeline_idle_reason(config: CompressionConfig, pipeline_model_parallel_size: int) -> str | None:
    """Why an enabled pipeline compression has nothing to do, or None."""
    if config.pipeline_parallel.enabled and pipeline_model_parallel_size == 1:
        return (
            "--pp-compression has no effect here: --pipeline-model-parallel-size is 1, so nothing goes from "
            "stage to stage"
        )
    return None


def validation_line(config: CompressionConfig, tensor_parallel: int, pipeline_parallel: int) -> str | None:
    """What the log says of ``--validate-uncompressed``; None without the flag.

    Args:
        tensor_parallel, pipeline_parallel: Megatron's sizes.
    """
    if not config.validate_uncompressed:
        return None
    compressed = [
        config.tensor_parallel.enabled and tensor_parallel > 1,
        config.pipeline_parallel.enabled and pipeline_parallel > 1,
    ]
    if any(compressed):
        return "evaluation sends activations uncompressed (--validate-uncompressed)"
    return "--validate-uncompressed has no effect here: no activations are sent compressed"


def idle_reason(config: CompressionConfig, tensor_model_parallel_size: int) -> str | None:
    """Why an enabled tensor-parallel compression has nothing to do, or None."""
    if config.tensor_parallel.enabled and tensor_model_parallel_size == 1:
        return (
            "--taco has no effect here: --tensor-model-parallel-size is 1, so there is no tensor-parallel "
            "traffic to compress"
        )
    return None
