"""scripts/setup.sh: which Python it takes, and what it says when something is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[2]

SET_UP_READS = (
    *("setup.py", "pyproject.toml", "constraints.txt", "megatron/compression/versions.py"),
    "scripts/setup.sh",
)

STAMP = ".megatron-taco-setup"


def copy_of_the_script(directory: Path) -> Path:
    """A checkout with only what set-up reads before it installs anything."""
    for name in SET_UP_READS:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((REPO / name).read_text())
    return directory / "scripts" / "setup.sh"


def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {"HOME": str(script.parent), "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def made(script: Path, *stamps: str) -> Path:
    """A .venv of this interpreter, beside the script, with these stamps of today's files."""
    clone = script.parents[1]
    venv = clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = f"{clone.resolve()}\n".encode()
    together = folder + b"".join((clone / name).read_bytes() for name in SET_UP_READS)
    digest = subprocess.run(
        ["sha256sum"], input=together, capture_output=True, check=True
    ).stdout.split()[0]
    for stamp in stamps:
        (venv / stamp).write_bytes(digest + b"\n")
    return venv


def interpreter(path: Path, version: tuple[int, int]) -> Path:
    """A stand-in that answers the version question like Python `version` and can do nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fits = int(not (3, 12) <= version <= (3, 13))
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *version_info*) exit {fits};; --version) echo Python; exit 0;; esac\n'
        "echo made by $0; exit 9\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def no_python(tmp_path) -> str:
    """A PATH with the shell's tools, and every Python on it too old."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "sha256sum", "cut", "bash", "sh"):
        found = next(
            Path(folder) / name for folder in ("/usr/bin", "/bin") if (Path(folder) / name).exists()
        )
        (tools / name).symlink_to(found)
    for name in ("python3", "python3.12", "python3.13"):
        interpreter(tools / name, (3, 11))
    return str(tools)


def test_without_a_fitting_python_it_says_what_to_install(tmp_path, no_python) -> None:
    """One error line with the versions and the ways to get one; nothing is made."""
    done = run(copy_of_the_script(tmp_path / "clone"), PATH=no_python)
    assert done.returncode != 0
    assert "no Python 3.12 or 3.13 found" in done.stderr and "pyenv install 3.12" in done.stderr
    assert not (tmp_path / "clone" / ".venv").exists()


@pytest.mark.parametrize("words", [(), ("--with-transformer-engine",)])
def test_a_second_run_does_nothing(tmp_path, words) -> None:
    """An up-to-date .venv is recognised by its stamps, without starting pip."""
    script = copy_of_the_script(tmp_path / "clone")
    made(script, STAMP, f"{STAMP}-engine")
    done = run(script, *words, PATH=os.environ["PATH"])
    assert done.returncode == 0 and "up to date" in done.stdout


def test_a_checkout_that_was_moved_is_installed_again(tmp_path) -> None:
    """Its .venv knows it by its path. This one has no pip, and no way to get one."""
    script = copy_of_the_script(tmp_path / "clone")
    venv = made(script, STAMP)
    interpreter(venv / "bin" / "python", (3, 12))
    (tmp_path / "clone").rename(tmp_path / "moved")
    done = run(tmp_path / "moved" / "scripts" / "setup.sh", PATH=os.environ["PATH"])
    assert done.returncode != 0 and "setup: installing" in done.stdout
    assert done.stderr.startswith("error: .venv has no pip; remove it")


def test_transformer_engine_needs_a_compiler(tmp_path) -> None:
    """What is missing to build it is one line, before anything is installed."""
    script = copy_of_the_script(tmp_path / "clone")
    venv = made(script, STAMP)
    done = run(script, "--with-transformer-engine", CXX="no-such-compiler")
    assert done.returncode != 0 and not (venv / f"{STAMP}-engine").exists()
    line = "error: --with-transformer-engine: no C++ compiler; install one (apt-get install g++), or set CXX"
    assert done.stderr.splitlines()[-1] == line
