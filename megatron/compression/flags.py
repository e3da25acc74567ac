"""The command line: our flags, added to Megatron's, and what they say as one config."""

import argparse
import types
import typing
from argparse import ArgumentParser, Namespace
from dataclasses import Field
from typing import Any

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, parse_codec
from megatron.compression.codecs.recipes import TACO_PAPER
from megatron.compression.codecs.registry import field_docs, settings_of
from megatron.compression.config import (
    COMMUNICATORS,
    DIMENSIONS,
    NODE_SIZE,
    CompressionConfig,
    from_environment,
)
from megatron.compression.dimension import naming_flags
from megatron.compression.errors import CompressionConfigError, InputError, naming
from megatron.compression.names import FLAGS

_METAVARS = {"--tp-compression-layers": "LAYERS", "--compression-report": "DIR"}

REMOVED = {
    "--compression-3d": "give --compression taco-paper",
    "--tp-backward-compression": "give it as the second value: --tp-compression SPEC BACKWARD",
    "--pp-backward-compression": "give it as the second value: --pp-compression SPEC BACKWARD",
    "--cp-backward-compression": "give it as the second value: --cp-compression SPEC BACKWARD",
    "--ep-backward-compression": "give it as the second value: --ep-compression SPEC BACKWARD",
    "--dp-weight-compression": "give it as the second value: --dp-compression SPEC WEIGHTS",
    "--dp-error-feedback": "drop it: codecs of gradients keep no error, and tagc has its own memory",
    "--tp-compression-min-mb": "give --compression-min-mb",
    "--dp-compression-node-size": f"set {NODE_SIZE} in the environment",
    "--compression-communicators": f"set {COMMUNICATORS} in the environment",
    "--tp-compression-chunks": "drop it, or give --tp-compression-overlap halves",
    "--ladder-residual": "drop it: the model with ladder residuals was removed",
    "--share-gpus": "start one rank a GPU",
}
"""Flags of earlier versions -> what to do instead."""


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser."""
    group = parser.add_argument_group(
        "compression",
        f"SPEC is CODEC[:SETTING=VALUE,...], CODEC one of {', '.join(CODECS.names())}, for --dp-compression "
        f"also {', '.join(sorted({*GRADIENT_COMPRESSORS.names()} - {*CODECS.names()}))}; "
        "none = uncompressed. See docs/choosing.md.",
    )
    group.add_argument(
        "--compression",
        type=_all_dimensions,
        default="none",
        metavar="{none,auto,taco-paper}",
        help="auto: time this run's own messages at the start, compress each kind of parallelism with what "
        "gains most within --compression-loss-budget, and leave uncompressed what would not gain. "
        "taco-paper: the TACO paper's codecs, --tp-compression taco, --dp-compression sdp4bit and "
        "--pp-compression tah-quant. A dimension's own flag takes precedence.",
    )
    group.add_argument(
        "--taco",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="Compress tensor-parallel traffic with TACO at the paper's settings: the same as "
        "--tp-compression taco[:SETTINGS], SETTINGS such as format=fp8-e5m2,group=256.",
    )
    for flag, paths in FLAGS.items():
        fields = [_field(path) for path in paths]
        texts = [text for _, text in fields]
        if len(paths) == 2:
            metavar = ("SPEC", fields[1][0].name.upper())
            group.add_argument(
                flag,
                nargs="+",
                action=_Specs,
                metavar=metavar,
                help=f"{texts[0]} {metavar[1]}: {texts[1]}",
            )
        else:
            group.add_argument(flag, help=texts[0], **_options(flag, fields[0][0]))
    for flag in REMOVED:
        group.add_argument(
            flag, nargs="*", action=_Removed, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    _escape_broken_help(parser)
    return parser


class _Specs(argparse.Action):
    """One spec or two."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if len(values) > 2:
            names = " [".join(typing.cast(tuple, self.metavar))
            raise argparse.ArgumentError(self, f"takes {names}], not {len(values)} values")
        setattr(namespace, self.dest, values)


class _Removed(argparse.Action):
    """A flag of an earlier version."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        flag = self.option_strings[0]
        raise InputError(f"{flag} is gone; {REMOVED[flag]}")


def _all_dimensions(text: str) -> str:
    """The value of ``--compression``."""
    if text in ("none", "auto", "taco-paper"):
        return text
    hint = f"; one codec for one kind of parallelism: --tp-compression {text}"
    known = CODECS.entry(text.partition(":")[0]) is not None
    raise argparse.ArgumentTypeError(
        f"{text}: choose none, auto or taco-paper{hint if known else ''}"
    )


def _field(path: str) -> tuple[Field, str]:
    """A field of the config, and its description for ``--help``."""
    part, _, name = path.rpartition(".")
    owner: Any = settings_of(CompressionConfig)[part].type if part else CompressionConfig
    return settings_of(owner)[name], field_docs(owner)[name].replace("``", "").replace("%", "%%")


def _options(flag: str, field: Field) -> dict[str, Any]:
    """What argparse wants to know of a setting with one value."""
    if field.type is bool:
        return {"action": "store_true"}
    if typing.get_origin(field.type) is typing.Literal:
        return {"default": field.default, "choices": typing.get_args(field.type)}
    kind: Any = field.type
    if isinstance(kind, types.UnionType):
        kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
    if kind is not str:
        return {"default": field.default, "type": kind}
    return {"default": field.default, "metavar": _METAVARS[flag]}


@naming_flags()
def resolve(args: Namespace) -> CompressionConfig:
    """What the parsed flags and the environment say. Pure: nothing is written into ``args``.

    Raises: CompressionConfigError: a setting that is impossible, alone or together with Megatron's flags.
    """
    kinds: dict[str, Any] = {
        name: field.type for name, field in settings_of(CompressionConfig).items()
    }
    parts: dict[str, dict[str, Any]] = {}
    for flag, paths in FLAGS.items():
        given = getattr(args, flag.strip("-").replace("-", "_"))
        values = given if isinstance(given, list) else [given]
        for path, value in zip(paths, [*values, None], strict=False):
            part, _, name = path.rpartition(".")
            parts.setdefault(part, {})[name] = value
    parts["tensor_parallel"]["compression"] = _tensor_parallel_spec(args, parts["tensor_parallel"])
    auto = []
    for part in DIMENSIONS:
        settings = parts[part] | {"min_mb": args.compression_min_mb}
        if settings["compression"] is None:
            if args.compression == "auto" and (part in TACO_PAPER or kinds[part].ranks(args) > 1):
                auto.append(part)
            everywhere = TACO_PAPER if args.compression == "taco-paper" else {}
            settings["compression"] = everywhere.get(part, "none")
        parts[part] = settings
    parts["data_parallel"]["node_size"] = from_environment(NODE_SIZE)
    own = parts.pop("") | {"communicators": from_environment(COMMUNICATORS) or 0}
    configs = {part: kinds[part](**values) for part, values in parts.items()}
    configs["data_parallel"] = configs["data_parallel"].resolved(args)
    if args.compression == "auto" and not auto:
        raise CompressionConfigError(
            "--compression auto has nothing to decide: every kind of parallelism has its own flag; drop it"
        )
    config = CompressionConfig(**configs, **own, auto=tuple(auto))
    config.check(args)
    return config


def _tensor_parallel_spec(args: Namespace, given: dict[str, Any]) -> str | None:
    spec = given["compression"]
    if args.taco is None:
        return spec
    if spec not in (None, "taco"):
        raise CompressionConfigError(
            f"--taco is --tp-compression taco, not {spec}; drop one of the two"
        )
    spec = f"taco:{args.taco}" if args.taco else "taco"
    with naming("--taco"):
        parse_codec(spec)
    return spec


def _escape_broken_help(parser: ArgumentParser) -> None:
    """Let ``--help`` work: megatron-core has a help text with a bare percent sign, which argparse formats."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
