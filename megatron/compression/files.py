"""Files of a run that are read and written: never half a file, and one kind of error for what is
unreadable."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON in UTF-8, or is nested deeper than Python can read.
    """
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or is nested deeper than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that readers see what was there before, or all of it, and never a part.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
