"""A run's report on disk: a history of log intervals and evaluations, and report.json of a finished
run."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from megatron.compression.errors import SettingError
from megatron.compression.files import parse_json, read_json
from megatron.compression.report.figures import summarize

HISTORY_FILE = "history.jsonl"
REPORT_FILE = "report.json"
_REPORT_SECTIONS = {"settings": dict, "history": list, "summary": dict}
"""What a report.json holds at least, and its JSON type."""


def check_report_directory(directory: str | None, resuming: bool) -> None:
    """Make the report's folder, and refuse what would end a run later or mix two runs.

    Args:
        directory: the folder; None: the run writes no report.
        resuming: whether an earlier part of this run may be there.

    Raises:
        SettingError: the folder is a file, cannot be made or written to, or holds another run's
            history.
    """
    if directory is None:
        return
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise SettingError("report", directory, "is a file", "name a folder")
    # A resumed run goes on with its own history; a new one would mix its rows with another's.
    if (path / HISTORY_FILE).exists() and not resuming:
        raise SettingError(
            "report",
            directory,
            "already holds a run's report",
            "name another folder or remove it",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        # One byte, since a full disk may still let an empty file be made.
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
    except OSError as error:
        raise SettingError(
            "report", directory, f"cannot be written ({error.strerror})", "name another folder"
        ) from error


def to_json(value: Any, **options: Any) -> str:
    """Return ``json.dumps(value, **options)``, with null for NaN and infinities, which JSON
    lacks."""
    return json.dumps(_without_infinities(value), allow_nan=False, **options)


def _without_infinities(value: Any) -> Any:
    """Return the value with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def load_report(directory: Path) -> dict:
    """Return the report.json of a finished run, its summary made anew from its history.

    Raises:
        OSError: there is none.
        ValueError: the file is no report.
    """
    path = directory / REPORT_FILE
    report = read_json(path)
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report")
    for name, json_type in _REPORT_SECTIONS.items():
        if not isinstance(report.get(name), json_type):
            raise ValueError(f"{path} has no {name!r}")
    if not all(_is_row(row) for row in report["history"]):
        raise ValueError(f"{path} has a history with other rows")
    # The rows look right from outside. What is in them shows where it is used.
    try:
        report["summary"] = summarize(report)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has a history with other rows ({error})") from None
    return report


class History:
    """The rows of a run's report, in memory until they are on disk in ``history.jsonl``.

    A disk that is full for a while loses none of them.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._pending: list[dict] = []

    def append(self, row: dict) -> None:
        """Add a row.

        Raises:
            OSError: it could not be written; it is kept, and written with the next one.
        """
        if self.directory is None:
            return
        self._pending.append(row)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / HISTORY_FILE
        # Rows that could not be written before go first.
        text = "".join(to_json(pending) + "\n" for pending in self._pending)
        with open(path, "a+b") as file:
            if file.tell() > 0:
                # A write that failed half-way, or a killed run, has left a line without its end.
                file.seek(-1, 2)
                if file.read() != b"\n":
                    text = "\n" + text
            file.write(text.encode())
        self._pending = []

    def rows(self) -> list[dict]:
        """Return everything so far; see ``read_history``."""
        on_disk = read_history(self.directory / HISTORY_FILE) if self.directory else []
        return _last_of_each_iteration(on_disk + self._pending)


def read_history(path: Path) -> list[dict]:
    """Return the history's rows in order; where a resumed run repeated an iteration, its last row.

    Lines that are no row are left out: a line that a killed run cut off, or what somebody else
    wrote.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if _is_row(row):
            rows.append(row)
    return _last_of_each_iteration(rows)


def _is_row(row: Any) -> bool:
    """Return whether a JSON value is a row of a history."""
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
        return False
    return isinstance(row.get("losses", {}), dict)


def _last_of_each_iteration(rows: list[dict]) -> list[dict]:
    """Return the last row of each iteration and kind of evaluation, in the order of iterations."""
    # Later rows win: a resumed run repeats the iterations since its checkpoint.
    last = {(row["iteration"], row.get("split")): row for row in rows}
    return sorted(last.values(), key=lambda row: row["iteration"])
