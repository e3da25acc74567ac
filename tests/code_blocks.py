"""Runs the fenced code blocks of a page of docs in their order, as a reader would.

A block whose first line is ``# name.py`` becomes that file. Other ``python`` blocks run as scripts, ``bash``
blocks in a shell. Blocks of other languages (``text``, ``toml``, ``console``) are for reading.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.launch import REPO, START_FAST, launched

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is; None: it is to be run."""
        found = _FILE.match(self.text)
        return found and found[1]


def code_blocks(page: Path) -> list[Block]:
    """The ``python`` and ``bash`` blocks of a page."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text()) if found[0] in ("python", "bash")]


def run(block: Block, folder: Path, timeout: float = 400) -> str:
    """Write or run a block in ``folder``, which stands for the root of a clone; returns what it printed.

    Raises:
        AssertionError: it failed, with its output.
    """
    if block.file is not None:
        (folder / block.file).write_text(block.text)
        return ""
    words = [sys.executable, "-c", block.text]
    if block.language == "bash":  # what one block exports, the next ones have
        text = f"[ ! -f .exports ] || . ./.exports\n{block.text}\nexport -p >.exports"
        words = ["bash", "-euo", "pipefail", "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    imports = os.pathsep.join(map(str, (START_FAST, folder, REPO)))
    own = {"PATH": path, "PYTHONPATH": imports, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = launched(words, os.environ | own, folder).finish(timeout)
    assert run.returncode == 0, f"exit status {run.returncode} of\n{block.text}\n{run.output[-6000:]}"
    return run.output


def clone(folder: Path) -> Path:
    """Make ``folder`` look like the root of a clone, by links, so that blocks can write files beside it."""
    for entry in REPO.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (folder / entry.name).symlink_to(entry)
    return folder
