"""Codecs by name: one grammar for flags, Python, scripts, reports and tables.

    NAME[:SETTING=VALUE,...]     int6    taco:format=fp8-e5m2,group=256    tah-quant:ratio=0.5
    FIRST/SECOND                 two codecs: for the first and the second exchange of a collective
    MODULE:CLASS[:SETTING=...]   a codec of one's own that nothing has registered

A codec is a frozen dataclass whose fields are its settings. A package
registers codecs of its own by an entry point (group ``megatron_taco.codecs`` or
``megatron_taco.gradient_compressors``, the name of the codec to ``module:Class``), or with the decorator.
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

_ON = {"on": True, "true": True, "off": False, "false": False}


class Registry:
    """Dataclasses by name, and the strings that describe their instances; from packages of ours, ``modules``,
    and from the group of entry points of other packages."""

    def __init__(self, what: str, entry_points: str, modules: tuple[str, ...]) -> None:
        self.what, self._entry_points, self._modules = what, entry_points, modules
        self._entries: dict[str, tuple[type, dict[str, Any]]] = {}
        self._loaded = False
        self._lasting: set[str] = set()
        """Names that every process knows; those of a module that somebody has imported are not among them."""

    def register(self, name: str, **fixed: Any) -> Callable[[type], type]:
        """A decorator that enters a frozen dataclass under ``name``, as specs have it; ``fixed``: values of
        fields that the name stands for (``bits=6`` of ``int6``), which are no settings then."""

        def enter(cls: type) -> type:
            held = self._entries.get(name, (cls, {}))[0]
            if (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
                raise CompressionConfigError(
                    f"the {self.what} {name!r} is {held.__qualname__} already; choose another name"
                )
            self._entries[name] = (cls, fixed)
            return cls

        return enter

    def names(self) -> list[str]:
        """Every name that can be given."""
        self._load()
        return sorted(self._entries)

    def entry(self, name: str) -> tuple[type, dict[str, Any]] | None:
        """The class of a name and the fields that the name fixes; None: unknown."""
        self._load()
        return self._entries.get(name)

    def parse(self, text: str, offered: Callable[[], list[str]] | None = None) -> Any:
        """The instance that a spec describes; ``offered``: the names that may be given, for errors."""
        name, _, settings = text.partition(":")
        found = self.entry(name)
        if found is None and settings and "=" not in settings.partition(":")[0]:
            name, settings = text.rsplit(":", 1) if text.count(":") > 1 else (text, "")
            found = self._import(text, name), {}
        if found is None:
            known = (offered or self.names)()
            near = difflib.get_close_matches(name, known, n=1)
            raise CompressionConfigError(
                f"{self.what} {name!r} is unknown; choose one of {', '.join(known)}, or MODULE:CLASS"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        cls, fixed = found
        if not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
            raise CompressionConfigError(f"{text}: {cls.__qualname__} must be a frozen dataclass")
        values = {}
        open_settings = settings_of(cls, fixed)
        for part in filter(None, settings.split(",")):
            key, equals, value = part.partition("=")
            if key in open_settings and equals:
                values[key] = _value(f"{name}:{key}", open_settings[key].type, value)
                continue
            choice = ", ".join(open_settings) or "none"
            if key in open_settings:
                raise CompressionConfigError(f"{name}: {key} needs a value, as in {key}=VALUE")
            hint = ""
            if not equals and (meant := _settings_with(part, cls, fixed)):
                hint = f"; did you mean {' or '.join(meant)}?"
            raise CompressionConfigError(f"{name}: no setting {key!r}; choose among {choice}{hint}")
        try:
            return cls(**fixed, **values)
        except (ValueError, TypeError, ArithmeticError) as error:
            reason = re.sub(
                r"\b(group|tile)_size=", r"\1=", str(error)
            )  # the kernels' names of settings
            raise CompressionConfigError(f"{text}: {reason}") from None

    def spec(self, entry: Any) -> str:
        """The canonical text of an instance: parses back to an equal one."""
        self._load()
        text, taken = f"{type(entry).__module__}:{type(entry).__qualname__}", {}
        for name, (cls, fixed) in self._entries.items():
            same = type(entry) is cls and all(
                getattr(entry, key) == value for key, value in fixed.items()
            )
            if same and name in self._lasting:
                text, taken = name, fixed
                break
        changed = [
            f"{field.name}={_text(getattr(entry, field.name))}"
            for field in settings_of(type(entry), taken).values()
            if getattr(entry, field.name) != field.default
        ]
        return text + (":" + ",".join(changed) if changed else "")

    def _import(self, text: str, path: str) -> type:
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            where = (
                "; put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
            )
            raise CompressionConfigError(f"{self.what} {text!r}: {error}{where}") from None

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True  # before: a module that is being imported may look a name up
        try:
            for package in map(importlib.import_module, self._modules):
                for module in pkgutil.iter_modules(
                    getattr(package, "__path__", ()), package.__name__ + "."
                ):
                    importlib.import_module(module.name)
            points = importlib.metadata.entry_points(group=self._entry_points)
            for point in points:
                if point.name not in self._entries:
                    self.register(point.name)(point.load())
        except BaseException:
            self._loaded = False  # else every later look-up would find the name unknown
            raise
        self._lasting = {
            name
            for name, (cls, _) in self._entries.items()
            if cls.__module__.startswith(self._modules) or name in {point.name for point in points}
        }


CODECS = Registry("codec", "megatron_taco.codecs", ("megatron.compression.codecs",))
GRADIENT_COMPRESSORS = Registry(
    "gradient compressor", "megatron_taco.gradient_compressors", ("megatron.compression.tagc",)
)

register_codec = CODECS.register
"""``@register_codec("name")`` on a frozen dataclass that is a ``Codec``."""

register_gradient_compressor = GRADIENT_COMPRESSORS.register
"""``@register_gradient_compressor("name")`` on a frozen dataclass that is a ``GradientCompressor``."""


def settings_of(cls: type, fixed: dict[str, Any] | None = None) -> dict[str, dataclasses.Field]:
    """The settings of a registered dataclass by name, without the fields that its name fixes."""
    hints = typing.get_type_hints(cls)
    fields = [
        field for field in dataclasses.fields(cls) if field.init and field.name not in (fixed or {})
    ]
    for field in fields:
        field.type = hints[field.name]
    return {field.name: field for field in fields}


def _settings_with(value: str, cls: type, fixed: dict[str, Any]) -> list[str]:
    """The settings that a value without a name could be of: ``format=int8`` for ``int8``."""
    fitting = []
    for name, field in settings_of(cls, fixed).items():
        try:
            cls(**fixed, **{name: _value(name, field.type, value)})
        except (ValueError, TypeError, ArithmeticError):
            continue
        fitting.append(f"{name}={value}")
    return fitting


def _text(value: Any) -> str:
    """A setting's value as specs have it; ``_value`` makes the same value of it again."""
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "auto"}[value]
    if isinstance(value, float):
        short = f"{value:g}"  # six digits; a longer number would be another codec's
        return short if float(short) == value else repr(value)
    return str(value)


def _value(where: str, kind: Any, text: str) -> Any:
    """``text`` as a field's type says."""
    if isinstance(kind, types.UnionType):
        if text == "auto":
            return None
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    try:
        if kind is bool:
            return _ON[text]
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        hint = "; commas separate settings" if ":" in text else ""
        raise CompressionConfigError(f"{where}={text} must be {wanted}{hint}") from None
