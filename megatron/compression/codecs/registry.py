"""Codecs by name: one grammar for flags, Python, scripts, reports and tables.

    NAME[:SETTING=VALUE,...]     int6    taco:format=fp8-e5m2,group=256    tah-quant:ratio=0.5
    FIRST/SECOND                 two codecs: for the first and the second exchange of a collective
    MODULE:CLASS[:SETTING=...]   a codec of one's own that nothing has registered

A codec is a frozen dataclass whose fields are its settings. A package registers codecs of its own
by an entry point (group ``megatron_taco.codecs`` or ``megatron_taco.gradient_compressors``, the
name of the codec to ``module:Class``), or with the decorator.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import pkgutil
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from megatron.compression.errors import CompressionConfigError

_SWITCH = {"on": True, "true": True, "off": False, "false": False}
"""What a spec may say for a setting that is on or off."""


class Registry:
    """Dataclasses by name, and the strings that describe their instances.

    Args:
        noun: what an entry is called in errors.
        entry_points: the group of entry points under which other packages register theirs.
        modules: packages of ours; every module in them is imported before the first look-up.
    """

    def __init__(self, noun: str, entry_points: str, modules: tuple[str, ...]) -> None:
        self.noun = noun
        self._entry_points = entry_points
        self._modules = modules
        self._entries: dict[str, tuple[type, dict[str, Any]]] = {}
        """Class and fixed fields by name."""
        self._loaded = False
        self._names_everywhere: set[str] = set()
        """Names that every process knows. Those of a module that somebody has imported are not
        among them: a spec with such a name could not be parsed in another process, or after a
        restart."""

    def register(self, name: str, **fixed: Any) -> Callable[[type], type]:
        """Return a decorator that enters a frozen dataclass under a name.

        Args:
            name: in specs; what ``--...-compression`` takes.
            fixed: values of fields that the name stands for (``bits=6`` of ``int6``), which are no
                settings then.

        Raises:
            CompressionConfigError: another class has the name.
        """

        def enter(cls: type) -> type:
            known, _ = self._entries.get(name, (cls, {}))
            # The same class may come again, from a module that is loaded anew.
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise CompressionConfigError(
                    f"the {self.noun} {name!r} is {known.__module__}.{known.__qualname__} already, "
                    f"and {cls.__module__}.{cls.__qualname__} wants the name; choose another name, "
                    "or import the module under one name only"
                )
            self._entries[name] = (cls, fixed)
            return cls

        return enter

    def names(self) -> list[str]:
        """Return every name that can be given."""
        self._load()
        return sorted(self._entries)

    def entry(self, name: str) -> tuple[type, dict[str, Any]] | None:
        """Return the class of a name and the fields that the name fixes; None: unknown."""
        self._load()
        return self._entries.get(name)

    def parse(self, text: str, offered: Callable[[], list[str]] | None = None) -> Any:
        """Return the instance that a spec describes.

        Args:
            text: the spec, ``NAME[:SETTING=VALUE,...]`` or ``MODULE:CLASS[:SETTING=VALUE,...]``.
            offered: gives the names that may be given here, for errors.

        Raises:
            CompressionConfigError: an unknown name or setting, or a value that the class refuses.
        """
        name, cls, fixed, settings = self._look_up(text, offered)
        # Codecs are keys of dictionaries and caches: one that could change would be another in the
        # middle of a run.
        parameters = getattr(cls, "__dataclass_params__", None)
        # A subclass inherits its parent's; its own annotated fields would be no settings then.
        is_frozen = getattr(parameters, "frozen", False)
        if is_frozen and cls.__annotations__ and "__dataclass_params__" not in vars(cls):
            is_frozen = False
        if not is_frozen:
            raise CompressionConfigError(
                f"{text}: {cls.__qualname__} must be a frozen dataclass; put "
                "@dataclass(frozen=True) above the class"
            )
        values = _parse_settings(name, cls, fixed, settings)
        try:
            return cls(**fixed, **values)
        except (ValueError, TypeError, ArithmeticError) as error:
            # The kernels call these settings group_size and tile_size.
            reason = re.sub(r"\b(group|tile)_size=", r"\1=", str(error))
            raise CompressionConfigError(f"{text}: {reason}") from None

    def _look_up(
        self, text: str, offered: Callable[[], list[str]] | None
    ) -> tuple[str, type, dict[str, Any], str]:
        """Return the name in a spec, its class, the fields it fixes, and the text of its
        settings."""
        name, _, settings = text.partition(":")
        # Registered names go first: MODULE:CLASS has a colon like NAME:SETTING=VALUE.
        if (entry := self.entry(name)) is not None:
            return name, *entry, settings
        first_part = settings.partition(":")[0]
        if settings and "=" not in first_part:  # MODULE:CLASS
            name = text
            settings = ""
            if text.count(":") > 1:
                name, settings = text.rsplit(":", 1)
            return name, self._import(text, name), {}, settings
        known = self.names() if offered is None else offered()
        hint = ""
        if near := difflib.get_close_matches(name, known, n=1):
            hint = f"; did you mean {near[0]}?"
        raise CompressionConfigError(
            f"{self.noun} {name!r} is unknown; choose one of {', '.join(known)}, or "
            f"MODULE:CLASS{hint}"
        )

    def spec(self, entry: Any) -> str:
        """Return the canonical text of an instance, which parses back to an equal one."""
        self._load()
        cls = type(entry)
        text = f"{cls.__module__}:{cls.__qualname__}"
        fixed: dict[str, Any] = {}
        # A class may have several names, by its fixed fields: int4, int5, int6, int8.
        for name, (known, known_fixed) in self._entries.items():
            if known is not cls or name not in self._names_everywhere:
                continue
            if all(getattr(entry, key) == value for key, value in known_fixed.items()):
                text = name
                fixed = known_fixed
                break
        changed = []
        # What has its default is left out, so that one codec has one text.
        for field in settings_of(cls, fixed).values():
            value = getattr(entry, field.name)
            if value != field.default:
                changed.append(f"{field.name}={_text(value)}")
        if not changed:
            return text
        return f"{text}:{','.join(changed)}"

    def _import(self, text: str, path: str) -> type:
        """Return the class that ``MODULE:CLASS`` names, for a spec ``text``."""
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            fix = ""
            if isinstance(error, ModuleNotFoundError):
                fix = "; put its folder on PYTHONPATH"
            raise CompressionConfigError(f"{self.noun} {text!r}: {error}{fix}") from None

    def _load(self) -> None:
        """Import our modules and load other packages' entry points, once."""
        if self._loaded:
            return
        self._loaded = True  # before: a module that is being imported may look a name up
        try:
            points = self._load_entries()
        except BaseException:
            self._loaded = False  # else every later look-up would find the name unknown
            raise
        self._names_everywhere = {
            name
            for name, (cls, _) in self._entries.items()
            if name in points or cls.__module__.startswith(self._modules)
        }

    def _load_entries(self) -> set[str]:
        """Enter everything that is installed, and return the names of entry points."""
        # An import runs the decorators of a module. Names of ours go before those of other
        # packages.
        for package in map(importlib.import_module, self._modules):
            prefix = f"{package.__name__}."
            for module in pkgutil.iter_modules(getattr(package, "__path__", ()), prefix):
                importlib.import_module(module.name)
        points = importlib.metadata.entry_points(group=self._entry_points)
        for point in points:
            if point.name not in self._entries:
                self.register(point.name)(point.load())
        return {point.name for point in points}


def _parse_settings(name: str, cls: type, fixed: dict[str, Any], settings: str) -> dict[str, Any]:
    """Return the values of ``SETTING=VALUE,...`` in a spec.

    Args:
        name: the entry's, for errors.
        cls: its dataclass.
        fixed: fields that the name fixes.
        settings: the text behind the name.

    Raises:
        CompressionConfigError: no such setting, no value, or one of another type.
    """
    open_settings = settings_of(cls, fixed)
    values = {}
    for assignment in filter(None, settings.split(",")):
        key, equals, value = assignment.partition("=")
        if key in open_settings and equals:
            values[key] = _value(f"{name}:{key}", open_settings[key].type, value)
            continue
        if key in open_settings:
            raise CompressionConfigError(f"{name}: {key} needs a value, as in {key}=VALUE")
        choice = ", ".join(open_settings) or "none"
        hint = ""
        if not equals and (meant := _settings_with(assignment, cls, fixed)):
            hint = f"; did you mean {' or '.join(meant)}?"
        raise CompressionConfigError(f"{name}: no setting {key!r}; choose among {choice}{hint}")
    for key, field in open_settings.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if key not in values and not has_default:
            raise CompressionConfigError(
                f"{name} needs a value for {key}, as in {name}:{key}=VALUE"
            )
    return values


CODECS = Registry("codec", "megatron_taco.codecs", ("megatron.compression.codecs",))
GRADIENT_COMPRESSORS = Registry(
    "gradient compressor", "megatron_taco.gradient_compressors", ("megatron.compression.tagc",)
)

register_codec = CODECS.register
"""``@register_codec("name")`` on a frozen dataclass that is a ``Codec``."""

register_gradient_compressor = GRADIENT_COMPRESSORS.register
"""``@register_gradient_compressor("name")`` on a frozen dataclass that is a
``GradientCompressor``."""


def settings_of(cls: type, fixed: dict[str, Any] | None = None) -> dict[str, dataclasses.Field]:
    """Return the settings of a registered dataclass by name, each field with its resolved type.

    Args:
        cls: the dataclass.
        fixed: fields that a name fixes, which are no settings.
    """
    # Fields hold their types as text where a module postpones annotations.
    hints = typing.get_type_hints(cls)
    settings = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in (fixed or {}):
            field.type = hints[field.name]
            settings[field.name] = field
    return settings


def _settings_with(value: str, cls: type, fixed: dict[str, Any]) -> list[str]:
    """Return the settings that a value without a name could be of: ``format=int8`` for ``int8``."""
    fitting = []
    # The class itself decides: a value that it takes could be meant.
    for name, field in settings_of(cls, fixed).items():
        try:
            cls(**fixed, **{name: _value(name, field.type, value)})
        except (ValueError, TypeError, ArithmeticError):
            continue
        fitting.append(f"{name}={value}")
    return fitting


def _text(value: Any) -> str:
    """Return a setting's value as specs have it; ``_value`` makes the same value of it again."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        short = f"{value:g}"  # six digits; a longer number would be another codec's
        return short if float(short) == value else repr(value)
    return str(value)


_TYPE_NAMES = {bool: "on or off", int: "a whole number", float: "a number"}


def _value(setting: str, value_type: Any, text: str) -> Any:
    """Return the value that a text stands for.

    Args:
        setting: what the value is of, for errors.
        value_type: the field's type; of ``X | None`` None is written ``auto``.
        text: as typed.

    Raises:
        CompressionConfigError: the text is no value of the type.
    """
    if isinstance(value_type, types.UnionType):
        if text == "auto":
            return None
        (value_type,) = (
            option for option in typing.get_args(value_type) if option is not type(None)
        )
    try:
        if value_type is bool:
            return _SWITCH[text]
        return value_type(text) if value_type in (int, float) else text
    except (ValueError, KeyError):
        hint = "; commas separate settings" if ":" in text else ""
        raise CompressionConfigError(
            f"{setting}={text} must be {_TYPE_NAMES[value_type]}{hint}"
        ) from None
