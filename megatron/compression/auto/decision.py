"""What ``--compression auto`` decides, and by which rule: pure values, no communication."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from megatron.compression.auto.candidates import CANDIDATES, SCHEDULES, Candidate

LEAST_GAIN = 0.02
"""Of an iteration, as the run itself measures it: a dimension that gains less stays uncompressed."""
TRIED = 0.005
"""Of an iteration, as predicted: what would gain less is not tried. Predictions are off by more than what
lies between these two."""
ALIKE = 0.005
"""Of an iteration: settings that differ by less count as equally fast, and the smaller loss decides."""

_COLUMNS = ("dimension", "link as measured", "choice", "expected gain", "cost in loss", "why")


@dataclass(frozen=True)
class Choice:
    """What one dimension does."""

    dimension: str
    link: str
    """As measured, uncompressed."""
    settings: dict[str, Any] | None
    """Fields of the dimension's config; None: not decided here, or uncompressed."""
    name: str
    """The codecs, or ``none``."""
    gain: float
    """Part of the uncompressed iteration that it is expected to save."""
    loss: float
    """Percent of validation loss that it costs."""
    why: str

    def switched_off(self, why: str) -> "Choice":
        """The same without compression."""
        return replace(self, settings=None, name="none", gain=0.0, loss=0.0, why=why)

    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        gain, loss = (f"{100 * self.gain:.1f} %", f"+{self.loss:.3g} %") if self.settings else ("-", "-")
        return self.dimension.replace("_", " "), self.link, self.name, gain, loss, self.why


@dataclass(frozen=True)
class Decision:
    """For the whole run; the same on all ranks."""

    choices: tuple[Choice, ...]
    budget: float
    """Percent."""
    iteration_ms: float
    """Of an uncompressed iteration, as predicted."""
    computation_ms: float
    """The part of it that is no communication."""
    seconds: float
    """That the timings took."""
    checked: bool = False
    """Whether the run has compared iterations with and without."""
    schedule: str | None = None
    """One of ``SCHEDULES``, by which tensor parallelism sends; None: none of them."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """Of the dimensions that compress."""
        return {one.dimension: one.settings for one in self.choices if one.settings}

    def asdict(self) -> dict[str, Any]:
        """JSON-ready; ``from_dict`` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Decision":
        """Raises: TypeError, KeyError: other values than ``asdict`` gives."""
        choices = tuple(_typed(Choice(**one)) for one in values["choices"])
        if values.get("schedule") not in (None, *SCHEDULES):
            raise TypeError(f"schedule {values['schedule']!r} is unknown")
        for one in choices:
            if one.dimension not in CANDIDATES:
                raise TypeError(f"dimension {one.dimension!r} is unknown")
            for name, value in dict(one.settings or {}).items():
                if not isinstance(value, _SETTINGS.get(name, ())):
                    raise TypeError(f"setting {name} {value!r} is impossible")
        return _typed(cls(**{**values, "choices": choices}))

    def after_check(self, useless: Mapping[str, str], schedule: str | None = None) -> "Decision":
        """The decision behind the run's own check.

        Args:
            useless: by dimension that does not gain, why.
            schedule: one of ``SCHEDULES``, which tensor parallelism takes.
        """

        choices = tuple(
            one.switched_off(useless[one.dimension]) if one.dimension in useless else one
            for one in self.choices
        )
        return replace(self, choices=choices, checked=True, schedule=schedule)

    def table(self) -> list[str]:
        """Lines for the log and the report."""
        if not self.choices:
            return ["ranks send each other nothing: there is nothing to compress"]
        rows = [_COLUMNS, *(one.row() for one in self.choices)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in rows
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return [*lines, f"tensor parallel by {self.schedule}"] if self.schedule else lines


_SETTINGS = {
    field: (int, float) if isinstance(value, float) else type(value)
    for known in CANDIDATES.values()
    for one in known
    for field, value in one.settings
}
"""Fields that a choice's settings may have, with their types."""


def _typed[T: (Choice, Decision)](made: T) -> T:
    """``made``, whose texts, numbers and switches are such. Raises: TypeError: one is not."""
    for one in fields(made):
        value, kind = getattr(made, one.name), one.type
        if kind in (str, float, bool) and not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"{one.name} {value!r} is no {kind.__name__}")
    return made


def choose(gains: Mapping[str, Mapping[Candidate, float]], budget: float) -> dict[str, Candidate]:
    """The settings with the largest gain whose losses add up to no more than the budget.

    Args:
        gains: by dimension, the part of an iteration that each candidate saves.
        budget: percent.
    Returns: By dimension; those that are left out stay uncompressed.
    """
    options: list[list[tuple[str, Candidate | None, float]]] = []
    for dimension, by_candidate in gains.items():
        good = [(dimension, one, gain) for one, gain in by_candidate.items() if gain >= TRIED]
        options.append([(dimension, None, 0.0), *good])
    found = []
    for combination in product(*options):
        loss = sum(one.loss for _, one, _ in combination if one is not None)
        if loss <= budget + 1e-9:
            found.append((sum(gain for _, _, gain in combination), loss, combination))
    most = max(gain for gain, _, _ in found)
    _, _, best = min((one for one in found if one[0] >= most - ALIKE), key=lambda one: (one[1], -one[0]))
    return {dimension: one for dimension, one, _ in best if one is not None}
