"""What every config dataclass needs: the error, how a field's name becomes a flag, what ``auto`` fills in."""

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


def fill_in(config: object, recommended: dict[str, object], flag: str, codec: str = "taco") -> None:
    """Set the recommended values of ``flag auto`` in a frozen dataclass.

    Args:
        config: its fields that ``recommended`` does not name stay as they are.
        recommended: values by field.
        flag: what ``auto`` was given to.
        codec: what to give to it instead, to choose for oneself.

    Raises:
        CompressionConfigError: a field that was set to something else, a contradiction; names its flag.
    """
    for one in fields(config):
        if one.name not in recommended:
            continue
        value, chosen = getattr(config, one.name), recommended[one.name]
        if value not in (one.default, chosen):
            raise CompressionConfigError(
                f"{flag_name(one.name)} {value} contradicts {flag} auto, which chooses {chosen}; "
                f"use {flag} {codec} to choose for yourself"
            )
        object.__setattr__(config, one.name, chosen)
