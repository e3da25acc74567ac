"""What every config dataclass needs: the error, and how a field's name becomes a flag."""

from collections.abc import Iterable
from dataclasses import fields


class CompressionConfigError(ValueError):
    """A setting that cannot be honoured; the message names the flag and the fix."""


def flag_name(field_name: str) -> str:
    """``taco_group_size`` -> ``--taco-group-size``."""
    return "--" + field_name.replace("_", "-")


def changed_flags(settings, without: Iterable[str] = ()) -> list[str]:
    """Flags of a config dataclass that differ from their defaults, but for the fields in ``without``."""
    return [
        flag_name(field.name)
        for field in fields(settings)
        if field.name not in without and getattr(settings, field.name) != field.default
    ]
