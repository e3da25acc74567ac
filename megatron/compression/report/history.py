"""A run's report on disk: a history of log intervals and evaluations, and report.json of a finished run."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from megatron.compression.errors import CompressionConfigError

HISTORY_FILE = "history.jsonl"
REPORT_FILE = "report.json"


def check_report_directory(directory: str | None, resuming: bool) -> None:
    """Make the report's folder, and refuse what would end a run later or mix two runs.

    Args:
        resuming: whether an earlier part of this run may be there.
    Raises: CompressionConfigError: the folder is a file, cannot be made or written to, or holds another run's
    history.
    """
    if directory is None:
        return
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise CompressionConfigError(f"--compression-report {directory} is a file; name a folder")
    if (path / HISTORY_FILE).exists() and not resuming:
        raise CompressionConfigError(
            f"--compression-report {directory} already holds a run's report; name another folder or remove it"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
    except OSError as error:
        raise CompressionConfigError(
            f"--compression-report {directory} cannot be written ({error.strerror}); name another folder"
        ) from error


def to_json(value: Any, **options: Any) -> str:
    """``json.dumps`` with null where JSON has no word for a number (NaN, infinities)."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_report(directory: Path) -> dict:
    """A finished run's report.json.

    Raises: OSError, ValueError: there is none, or it is not one.
    """
    report = json.loads((directory / REPORT_FILE).read_text())
    if not isinstance(report, dict) or not {"settings", "history", "summary"} <= report.keys():
        raise ValueError(f"{directory / REPORT_FILE} is no report")
    return report


class History:
    """Rows in memory until they are on disk, in ``history.jsonl``: a disk that is full for a while loses none
    of them."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._pending: list[dict] = []

    def append(self, row: dict) -> None:
        """Add a row.

        Raises: OSError: it could not be written; it is kept, and written with the next one.
        """
        if self.directory is None:
            return
        self._pending.append(row)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / HISTORY_FILE
        text = "".join(to_json(pending) + "\n" for pending in self._pending)
        with open(path, "a+b") as file:
            if (
                file.tell()
            ):  # a write that failed half-way, or a killed run, leaves a line without its end
                file.seek(-1, 2)
                text = text if file.read() == b"\n" else "\n" + text
            file.write(text.encode())
        self._pending = []

    def rows(self) -> list[dict]:
        """Everything so far; see ``read_history``."""
        on_disk = read_history(self.directory / HISTORY_FILE) if self.directory else []
        return _last_of_each(on_disk + self._pending)


def read_history(path: Path) -> list[dict]:
    """The history's rows in order; where a resumed run repeated an iteration, its last row counts.

    A line cut off in the middle is left out.
    """
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return _last_of_each(rows)


def _last_of_each(rows: list[dict]) -> list[dict]:
    last = {(row["iteration"], row.get("split")): row for row in rows}
    return sorted(last.values(), key=lambda row: row["iteration"])
