"""The command line: our flags beside Megatron's, and what they say as one config."""

import argparse
import dataclasses
import types
import typing
from argparse import ArgumentParser, Namespace
from typing import Any

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS
from megatron.compression.codecs.registry import field_docs, settings_of
from megatron.compression.config import ACTIVATIONS, CompressionConfig
from megatron.compression.data_parallel.presets import PRESETS
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.turns_checks import HALVES

COMPRESSION_3D = {"tensor_parallel": "taco", "data_parallel": "sdp4bit", "pipeline_parallel": "tah-quant"}
"""``--compression-3d``: the set-up of the TACO paper (arXiv 2604.24088), each codec as in its own paper."""

_WHERE_IN_USE = ("expert_parallel", "context_parallel")
"""What ``--compression auto`` decides beside those three, in runs that have it."""

_FIELDS = {
    "--tp-compression": "tensor_parallel.compression",
    "--tp-backward-compression": "tensor_parallel.backward",
    "--tp-compression-min-mb": "tensor_parallel.min_mb",
    "--tp-compression-layers": "tensor_parallel.layers",
    "--tp-compression-overlap": "tensor_parallel.overlap",
    "--pp-compression": "pipeline_parallel.compression",
    "--pp-backward-compression": "pipeline_parallel.backward",
    "--cp-compression": "context_parallel.compression",
    "--cp-backward-compression": "context_parallel.backward",
    "--ep-compression": "expert_parallel.compression",
    "--ep-backward-compression": "expert_parallel.backward",
    "--dp-compression": "data_parallel.compression",
    "--dp-weight-compression": "data_parallel.weights",
    "--dp-error-feedback": "data_parallel.error_feedback",
    "--dp-compression-node-size": "data_parallel.node_size",
    "--caat-net-sync-fraction": "caat_net.sync_fraction",
    "--compression-loss-budget": "loss_budget",
    "--compression-start-iteration": "start_iteration",
    "--compression-transport": "transport",
    "--compression-communicators": "communicators",
    "--compression-error-bound": "error_bound",
    "--validate-uncompressed": "validate_uncompressed",
    "--compression-report": "report",
}
"""Flag -> field of ``CompressionConfig``, whose type, default and description are the flag's."""

_METAVARS = {"--dp-error-feedback": "{none,fp32,int8}[:average=A,reset=N]"}


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser."""
    group = parser.add_argument_group(
        "compression",
        f"SPEC is CODEC[:SETTING=VALUE,...], CODEC one of {', '.join(CODECS.names())}, for --dp-compression "
        f"also {', '.join(sorted({*GRADIENT_COMPRESSORS.names(), *PRESETS} - {*CODECS.names()}))}; "
        "none = uncompressed. See docs/choosing.md.",
    )
    group.add_argument(
        "--taco",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="Compress tensor-parallel traffic with TACO at the paper's settings: the same as "
        "--tp-compression taco[:SETTINGS], SETTINGS such as format=fp8-e5m2,group=256.",
    )
    group.add_argument(
        "--compression-3d",
        action="store_true",
        help="Compress three dimensions as the TACO paper does: --tp-compression taco, --dp-compression "
        "sdp4bit, --pp-compression tah-quant. A dimension's own flag beside it wins.",
    )
    group.add_argument(
        "--compression",
        choices=["none", "auto"],
        default="none",
        help="auto: time this run's own messages at the start, compress each kind of parallelism with what "
        "gains most within --compression-loss-budget, and leave alone what would not gain. A dimension's own "
        "flag beside it wins.",
    )
    for flag, path in _FIELDS.items():
        part, _, name = path.rpartition(".")
        owner: Any = settings_of(CompressionConfig)[part].type if part else CompressionConfig
        text = field_docs(owner)[name].replace("``", "").replace("%", "%%")
        group.add_argument(flag, help=text, **_options(flag, settings_of(owner)[name]))
    _escape_broken_help(parser)
    return parser


def _options(flag: str, field: dataclasses.Field) -> dict[str, Any]:
    """What argparse wants to know of a setting."""
    if field.type is bool:
        return {"action": "store_true"}
    if typing.get_origin(field.type) is typing.Literal:
        return {"default": field.default, "choices": typing.get_args(field.type)}
    given = isinstance(field.type, types.UnionType)
    kind = (
        next(one for one in typing.get_args(field.type) if one is not types.NoneType) if given else field.type
    )
    if kind is not str:
        return {"default": field.default, "type": kind}
    default = None if field.name == "compression" else field.default  # --compression-3d gives way to any
    if flag.startswith("--compression-report"):
        return {"default": default, "metavar": "DIR"}
    return {
        "default": default,
        "metavar": _METAVARS.get(flag, "LAYERS" if field.name == "layers" else "SPEC"),
    }


def resolve(args: Namespace) -> CompressionConfig:
    """What the parsed flags say. Pure: nothing is written into ``args``.

    Raises: CompressionConfigError: a setting that is impossible, alone or together with Megatron's flags.
    """
    parts: dict[str, dict[str, Any]] = {}
    for flag, path in _FIELDS.items():
        part, _, name = path.rpartition(".")
        parts.setdefault(part, {})[name] = getattr(args, flag.strip("-").replace("-", "_"))
    parts["tensor_parallel"]["compression"] = _tensor_parallel_spec(args)
    for part, settings in parts.items():
        if "compression" in settings and settings["compression"] is None and args.compression_3d:
            settings["compression"] = COMPRESSION_3D.get(part)
    open_parts = []
    if args.compression == "auto":
        used = (part for part in _WHERE_IN_USE if ACTIVATIONS[part](args) > 1)
        open_parts = [part for part in (*COMPRESSION_3D, *used) if _is_open(parts, part)]
    for settings in parts.values():
        if "compression" in settings and settings["compression"] is None:
            settings["compression"] = "none"
    own = parts.pop("")
    kinds: dict[str, Any] = {name: field.type for name, field in settings_of(CompressionConfig).items()}
    configs = {part: kinds[part](**values) for part, values in parts.items()}
    configs["data_parallel"] = configs["data_parallel"].resolved(args)
    if args.compression == "auto" and not open_parts:
        raise CompressionConfigError(
            "--compression auto has nothing to decide: every kind of parallelism has its own flag; drop it"
        )
    if configs["tensor_parallel"].halves and "tensor_parallel" in open_parts:
        raise CompressionConfigError(
            f"--compression auto tries halves by itself, where they can be had; drop {HALVES}, or name a "
            "codec with --tp-compression"
        )
    config = CompressionConfig(**configs, **own, auto=tuple(open_parts))
    config.check(args)
    return config


def _is_open(parts: dict[str, dict[str, Any]], part: str) -> bool:
    """Whether no flag says how this dimension is compressed."""
    return all(parts[part].get(name) is None for name in ("compression", "backward", "weights"))


def compresses_tensors(args: Namespace) -> bool:
    """Whether the flags ask for tensor-parallel compression; ``resolve`` says which."""
    given = args.taco, args.tp_compression, args.tp_backward_compression
    asked = any(spec not in (None, "none") for spec in given)
    return asked or (args.compression_3d and args.tp_compression is None)


def train_iterations(args: Namespace) -> int | None:
    """How long the run is; None where Megatron's flags leave it open."""
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    growing = getattr(args, "step_batch_size_schedule", None)  # global_batch_size is another one then
    if iterations or not samples or not args.global_batch_size or growing:
        return iterations
    return samples // args.global_batch_size


def _tensor_parallel_spec(args: Namespace) -> str | None:
    if args.taco is None:
        return args.tp_compression
    if args.tp_compression not in (None, "taco"):
        raise CompressionConfigError(
            f"--taco is --tp-compression taco, not {args.tp_compression}; drop one of the two"
        )
    return f"taco:{args.taco}" if args.taco else "taco"


def _escape_broken_help(parser: ArgumentParser) -> None:
    """Let ``--help`` work: megatron-core has a help text with a bare percent sign, which argparse formats."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
