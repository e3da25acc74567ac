"""scripts/setup.sh: which Python it takes, and its lines when something is missing. demo.sh."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[2]

SET_UP_READS = (
    "setup.py",
    "pyproject.toml",
    "constraints.txt",
    "megatron/compression/versions.py",
    "scripts/setup.sh",
)
"""In the order in which the stamp's hash has them."""

STAMP = ".megatron-taco-setup"


def copy_of_the_script(directory: Path) -> Path:
    """A checkout with only what set-up reads before it installs anything."""
    for name in SET_UP_READS:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((REPO / name).read_text())
    return directory / "scripts" / "setup.sh"


def executable(path: Path, body: str) -> Path:
    """Write a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {"HOME": str(script.parent), "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def stamped_venv(script: Path, *stamps: str) -> Path:
    """A .venv of this interpreter, beside the script, with these stamps of today's files."""
    clone = script.parents[1]
    venv = clone / ".venv"
    executable(venv / "bin" / "python", f'exec {sys.executable} "$@"')
    hashed = f"{clone.resolve()}\n".encode()
    for name in SET_UP_READS:
        hashed += (clone / name).read_bytes()
    for stamp in stamps:
        (venv / stamp).write_text(hashlib.sha256(hashed).hexdigest() + "\n")
    return venv


def interpreter(path: Path, version: tuple[int, int]) -> Path:
    """Write a stand-in that answers the question for a version as Python `version` does."""
    status = 0 if (3, 12) <= version <= (3, 13) else 1
    answers = f'case "$*" in *version_info*) exit {status};; --version) echo Python; exit 0;; esac'
    return executable(path, f"{answers}\necho made by $0; exit 9")


@pytest.fixture
def no_python(tmp_path) -> str:
    """A PATH with the shell's tools, and every Python on it too old."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "sha256sum", "cut", "bash", "sh"):
        (tools / name).symlink_to(shutil.which(name, path="/usr/bin:/bin"))
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
    stamped_venv(script, STAMP, f"{STAMP}-engine")
    done = run(script, *words, PATH=os.environ["PATH"])
    assert done.returncode == 0 and "up to date" in done.stdout


def test_a_checkout_that_was_moved_is_installed_again(tmp_path) -> None:
    """Its .venv knows it by its path. This one has no pip, and no way to get one."""
    script = copy_of_the_script(tmp_path / "clone")
    venv = stamped_venv(script, STAMP)
    interpreter(venv / "bin" / "python", (3, 12))
    (tmp_path / "clone").rename(tmp_path / "moved")
    done = run(tmp_path / "moved" / "scripts" / "setup.sh", PATH=os.environ["PATH"])
    assert done.returncode != 0 and "setup: installing" in done.stdout
    assert done.stderr.startswith("error: .venv has no pip; remove it")


def test_transformer_engine_needs_a_compiler(tmp_path) -> None:
    """A missing compiler is one line, before anything is installed."""
    script = copy_of_the_script(tmp_path / "clone")
    venv = stamped_venv(script, STAMP)
    done = run(script, "--with-transformer-engine", CXX="no-such-compiler")
    assert done.returncode != 0 and not (venv / f"{STAMP}-engine").exists()
    reason = "no C++ compiler; install one (apt-get install g++), or set CXX"
    if not torch.version.cuda.startswith("13."):  # which is looked at first
        cuda = torch.version.cuda
        reason = (
            f"torch {torch.__version__} is built for CUDA {cuda}, and this builds for CUDA 13: "
            "install a torch of CUDA 13"
        )
    assert done.stderr.splitlines()[-1] == f"error: --with-transformer-engine: {reason}"


@pytest.fixture
def demo(tmp_path) -> Path:
    """scripts/demo.sh with a set-up that does nothing and a Python that prints its arguments."""
    script = tmp_path / "scripts" / "demo.sh"
    executable(tmp_path / "scripts" / "setup.sh", "echo setup: done")
    executable(tmp_path / ".venv" / "bin" / "python", 'echo "python $*"; exit ${STATUS:-0}')
    shutil.copy(REPO / "scripts" / "demo.sh", script)
    return script


def test_the_demo_trains_without_and_with_both_codecs(demo) -> None:
    """The command line's own options come last, so that they win."""
    lines = run(demo, "--iterations", "8").stdout.splitlines()
    assert lines[0] == "setup: done"
    assert "scripts/losses.py --tensor-parallel 2 --codecs none taco int8" in lines[1]
    assert lines[1].endswith("--output runs/demo --iterations 8")


def test_the_demo_says_what_each_codec_is_for(demo) -> None:
    shown = run(demo).stdout
    assert (
        "taco   the FP8 codec of the TACO paper, with outliers stored separately. You type: --taco\n"
        in shown
    )
    assert "int8   for your own runs: " in shown and "You type: --tp-compression int8\n" in shown
    assert "Whole logs" in shown and "are in runs/demo" in shown


def test_a_demo_that_fails_has_its_status(demo) -> None:
    done = run(demo, STATUS="3")
    assert done.returncode == 3
    assert "the codec of the TACO paper" not in done.stdout
