"""The command line: our flags, added to Megatron's, and what they say as one config.

    parser = add_flags(argparse.ArgumentParser())
    config = resolve(parser.parse_args(["--taco", "--dp-compression", "int8", "lossless", ...]))

A flag's description in ``--help``, its default and its choices are those of the field of
``CompressionConfig`` that it sets (``names.FLAGS``).
"""

import argparse
import types
import typing
from argparse import ArgumentParser, Namespace
from dataclasses import Field
from typing import Any

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, parse_codec
from megatron.compression.codecs.recipes import TACO_PAPER
from megatron.compression.codecs.registry import settings_of
from megatron.compression.config import CompressionConfig, from_environment
from megatron.compression.errors import (
    CompressionConfigError,
    InputError,
    SettingError,
    setting,
    spelled,
)
from megatron.compression.loss_settings import AUTO
from megatron.compression.names import COMMUNICATORS, FLAG_NAMES, FLAGS, NODE_SIZE, PARALLELISMS

_METAVARS = {
    "--tp-compression-layers": "LAYERS",
    "--caat-net-sync-fraction": "FRACTION",
    "--data-centres": "N",
    "--data-centre-rank": "I",
    "--local-steps": "H",
    "--outer-address": "HOST:PORT",
    "--outer-compression": "SPEC",
    "--outer-lr": "RATE",
    "--outer-momentum": "M",
    "--outer-fragments": "P",
    "--outer-delay": "N",
    "--outer-mixing": "SHARE",
    "--outer-timeout-minutes": "MINUTES",
    "--compression-min-mb": "MIB",
    "--compression-loss-budget": "PERCENT",
    "--compression-loss-interval": "N",
    "--compression-start-iteration": "N",
    "--compression-error-bound": "ERROR",
    "--compression-report": "DIR",
}

REMOVED = {
    "--compression-3d": "give --compression taco-paper",
    "--tp-backward-compression": "give it as the second value: --tp-compression SPEC BACKWARD",
    "--pp-backward-compression": "give it as the second value: --pp-compression SPEC BACKWARD",
    "--cp-backward-compression": "give it as the second value: --cp-compression SPEC BACKWARD",
    "--ep-backward-compression": "give it as the second value: --ep-compression SPEC BACKWARD",
    "--dp-weight-compression": "give it as the second value: --dp-compression SPEC WEIGHTS",
    "--dp-error-feedback": "drop it: codecs of gradients keep no error, and tagc has its own "
    "memory",
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
    compressors = sorted(set(GRADIENT_COMPRESSORS.names()) - set(CODECS.names()))
    group = parser.add_argument_group(
        "compression",
        f"SPEC is CODEC[:SETTING=VALUE,...]. CODEC is one of {', '.join(CODECS.names())}; for "
        f"--dp-compression also {', '.join(compressors)}; none = uncompressed. Recipes are names "
        "of tested codecs. See docs/choosing.md.",
    )
    group.add_argument(
        "--compression",
        type=_all_dimensions,
        default="none",
        metavar="{none,auto,taco-paper}",
        help="One choice for all kinds of parallelism. auto: time this run's own messages at the "
        "start, and choose for each kind the codec that gains most within "
        "--compression-loss-budget, or none. taco-paper: the TACO paper's codecs (--tp-compression "
        "taco:outliers=off, --dp-compression sdp4bit, --pp-compression tah-quant). The flag of one kind of "
        "parallelism takes precedence.",
    )
    group.add_argument(
        "--taco",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="Compress tensor-parallel traffic with TACO's FP8 and, unlike the paper, outliers stored "
        "separately; the paper's codec is --taco outliers=off. --taco SETTINGS is the same as "
        "--tp-compression taco:SETTINGS, with SETTINGS such as format=fp8-e5m2,group=256.",
    )
    # The rest is what the table of names and the fields of the config say.
    for flag, paths in FLAGS.items():
        fields = [_field(path) for path in paths]
        if len(fields) == 2:
            first, second = fields
            names = ("SPEC", second.name.upper())
            group.add_argument(
                flag,
                nargs="+",
                action=_Specs,
                metavar=names,
                help=f"{_help(first)} {names[1]}: {_help(second)}",
            )
        else:
            group.add_argument(flag, help=_help(fields[0]), **_options(flag, fields[0]))
    # They are known, so that a script of an earlier version is told what to write instead.
    for flag in REMOVED:
        group.add_argument(
            flag, nargs="*", action=_Removed, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.formatter_class = _with_two_values(typing.cast(Any, parser.formatter_class))
    _escape_broken_help(parser)
    return parser


class _Specs(argparse.Action):
    """One spec or two."""

    @property
    def usage(self) -> str:
        """The values as ``--help`` shows them."""
        first, second = typing.cast(tuple[str, str], self.metavar)
        return f"{first} [{second}]"

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if len(values) > 2:
            raise argparse.ArgumentError(self, f"takes {self.usage}, not {len(values)} values")
        setattr(namespace, self.dest, values)


def _with_two_values(base: type[argparse.HelpFormatter]) -> type[argparse.HelpFormatter]:
    """A formatter of ``--help`` that shows one value or two, where argparse would show any
    number."""

    class Formatter(base):  # type: ignore[misc, valid-type]
        def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
            if isinstance(action, _Specs):
                return action.usage
            return super()._format_args(action, default_metavar)

    return Formatter


class _Removed(argparse.Action):
    """A flag of an earlier version, which says what to do instead."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        flag = self.option_strings[0]
        raise InputError(f"{flag} is gone; {REMOVED[flag]}")


def _all_dimensions(text: str) -> str:
    """The value of ``--compression``."""
    if text in ("none", "auto", "taco-paper"):
        return text
    hint = ""
    if CODECS.entry(text.partition(":")[0]) is not None:
        hint = f"; one codec for one kind of parallelism: --tp-compression {text}"
    raise argparse.ArgumentTypeError(f"{text}: choose none, auto or taco-paper{hint}")


def _interval(text: str) -> int | str:
    """The value of ``--compression-loss-interval``: a number of iterations, or ``auto``."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give a number of iterations, or auto") from None


def _field(path: str) -> Field:
    """The field of the config that has a setting's value."""
    section, _, name = path.rpartition(".")
    owner: Any = CompressionConfig
    if section:
        owner = settings_of(CompressionConfig)[section].type
    return settings_of(owner)[name]


def _help(field: Field) -> str:
    """The description of a field, as argparse formats it."""
    return field.metadata["help"].replace("%", "%%")


def _options(flag: str, field: Field) -> dict[str, Any]:
    """The keywords of ``add_argument`` for a setting with one value."""
    if field.type is bool:
        return {"action": "store_true"}
    if field.name == "loss_interval":
        return {"nargs": "?", "const": AUTO, "type": _interval, "metavar": _METAVARS[flag]}
    # float | None is a number that has no default.
    value_type: Any = field.type
    if typing.get_origin(value_type) in (types.UnionType, typing.Union):
        (value_type,) = (
            option for option in typing.get_args(value_type) if option is not types.NoneType
        )
    if typing.get_origin(value_type) is typing.Literal:
        return {"default": field.default, "choices": typing.get_args(value_type)}
    return {"default": field.default, "type": value_type, "metavar": _METAVARS[flag]}


def resolve(args: Namespace) -> CompressionConfig:
    """Make one config of the parsed flags and the environment. Nothing is written into ``args``.

    Raises: CompressionConfigError: a setting that is impossible, alone or together with Megatron's
    flags.
    """
    with spelled(FLAG_NAMES):
        config = _config_of(args)
        config.check(args)
    return config


def _config_of(args: Namespace) -> CompressionConfig:
    """The config before it is compared with Megatron's arguments."""
    values = _values_by_section(args)
    values["tensor_parallel"]["compression"] = _tensor_parallel_spec(args)
    # Two settings of the cluster, not of the run: they are variables, so that a job script sets
    # them once.
    values["data_parallel"]["node_size"] = from_environment(NODE_SIZE)
    values[""]["communicators"] = from_environment(COMMUNICATORS) or 0
    classes: dict[str, Any] = {
        name: field.type for name, field in settings_of(CompressionConfig).items()
    }
    auto = []
    for name in PARALLELISMS:
        dimension_values = values[name]
        dimension_values["min_mb"] = args.compression_min_mb
        if dimension_values["compression"] == "auto":
            raise SettingError(
                f"{name}.compression",
                "auto",
                "is neither a codec nor a recipe",
                f"drop it and give {setting('auto')}, which measures what gains most",
            )
        if dimension_values["compression"] is None:  # then --compression decides
            dimension_values["compression"] = "none"
            if args.compression == "taco-paper":
                dimension_values["compression"] = TACO_PAPER.get(name, "none")
            if args.compression == "auto" and _is_measured(name, classes[name], args):
                auto.append(name)
    if args.compression == "auto" and not auto:
        raise SettingError(
            "auto",
            None,
            "has nothing to decide: every kind of parallelism has its own flag",
            "drop it",
        )
    whole_run = values.pop("")
    sections = {name: classes[name](**section_values) for name, section_values in values.items()}
    # Which weights are compressed depends on Megatron's optimizer.
    sections["data_parallel"] = sections["data_parallel"].resolved(args)
    return CompressionConfig(**sections, **whole_run, auto=tuple(auto))


def _is_measured(name: str, config_class: Any, args: Namespace) -> bool:
    """Return whether ``--compression auto`` decides about a dimension: the three of the paper in
    any run, so that the log says what they have, context and expert parallelism where they have
    ranks."""
    return name in TACO_PAPER or config_class.ranks(args) > 1


def _values_by_section(args: Namespace) -> dict[str, dict[str, Any]]:
    """The flags' values by part of the config (empty: its own fields) and field; None where not
    given."""
    values: dict[str, dict[str, Any]] = {}
    for flag, paths in FLAGS.items():
        # argparse's name of a flag's value; one of two values is a list.
        typed = getattr(args, flag.strip("-").replace("-", "_"))
        if not isinstance(typed, list):
            typed = [typed]
        for number, path in enumerate(paths):
            section, _, name = path.rpartition(".")
            values.setdefault(section, {})[name] = typed[number] if number < len(typed) else None
    return values


def _tensor_parallel_spec(args: Namespace) -> str | None:
    """The spec of tensor parallelism, which ``--taco`` gives as well."""
    spec = args.tp_compression[0] if args.tp_compression else None
    if args.taco is None:
        return spec
    # --taco beside --tp-compression taco says the same twice, which a launch script may do.
    if spec not in (None, "taco"):
        raise CompressionConfigError(
            f"--taco is --tp-compression taco, not {spec}; drop one of the two"
        )
    spec = f"taco:{args.taco}" if args.taco else "taco"
    try:
        parse_codec(spec)
    except CompressionConfigError as error:
        raise CompressionConfigError(f"--taco: {error}") from None
    return spec


def _escape_broken_help(parser: ArgumentParser) -> None:
    """Let ``--help`` work: megatron-core has a help text with a bare percent sign, which argparse
    formats."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
