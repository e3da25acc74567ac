"""What docs/quickstart.md and docs/extending.md show works: their blocks run in order, on two CPU ranks.

A block whose first line is ``# name.py`` becomes that file. Other ``python`` blocks run as scripts, ``bash``
blocks in a shell. Blocks of other languages (``text``, ``toml``, ``console``) are for reading.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.launch import REPO, START_FAST, environment, launched

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]

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
    return [
        Block(*found)
        for found in _BLOCK.findall(page.read_text())
        if found[0] in ("python", "bash")
    ]


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
    run = launched(words, environment(PATH=path, PYTHONPATH=imports), folder).finish(timeout)
    assert run.returncode == 0, (
        f"exit status {run.returncode} of\n{block.text}\n{run.output[-6000:]}"
    )
    return run.output


def clone(folder: Path) -> Path:
    """Make ``folder`` look like the root of a clone, by links, so that blocks can write files beside it."""
    for entry in REPO.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (folder / entry.name).symlink_to(entry)
    return folder


def test_quickstart(tmp_path):
    folder = clone(tmp_path)
    outputs = [run(block, folder) for block in code_blocks(REPO / "docs" / "quickstart.md")]
    for dimension, output in zip(("tensor", "pipeline", "data"), outputs, strict=True):
        assert f"{dimension}-parallel ratio" in output
    assert (
        "What one GPU sends in one iteration"
        in (folder / "runs" / "quickstart" / "report.md").read_text()
    )


def test_extending(tmp_path):
    folder, blocks = clone(tmp_path), code_blocks(REPO / "docs" / "extending.md")
    _, tried, _, collective, training, gradients = [run(block, folder) for block in blocks]
    assert "relative error" in tried
    assert collective.count("relative error") == 2
    assert float(re.findall(r"tensor-parallel ratio: ([\d.]+)", training)[-1]) > 1.5
    assert "data-parallel ratio" in gradients
