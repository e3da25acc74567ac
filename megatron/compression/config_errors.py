"""What every config dataclass needs: how a field's name becomes a flag, what ``auto`` fills in."""

from collections.abc import Iterable
from dataclasses import fields

from megatron.compression.errors import CompressionConfigError


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
        if one.name in recommended:
            if getattr(config, one.name) != one.default:
                check_chosen(one.name, getattr(config, one.name), recommended, flag, codec)
            object.__setattr__(config, one.name, recommended[one.name])


def check_chosen(name: str, value: object, recommended: dict[str, object], flag: str, codec: str) -> None:
    """Refuse a value for field ``name`` that is not the one that ``flag auto`` chooses.

    Raises:
        CompressionConfigError: it is another one; says how to spell ``auto`` out.
    """
    if value != recommended[name]:
        spelt = [f"{flag_name(n)} {v}" for n, v in recommended.items() if v is not None]
        chosen = "leaves it out" if recommended[name] is None else f"chooses {recommended[name]}"
        raise CompressionConfigError(
            f"{flag_name(name)} {value} contradicts {flag} auto, which {chosen}; to choose for yourself, "
            f"change {' '.join([flag, codec, *spelt])}"
        )
