"""Wheels of both projects build, install into an empty folder, and work outside the checkout.

Programs start with ``-S``: without the environment's own start-up files, which would make an
editable installation of this checkout importable. Dependencies come from the environment by its
path.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from taco_kernels import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("megatron", "taco_kernels", "pretrain_gpt.py", "pretrain_qwen.py")
"""What the wheel of the root project has at its top, beside its metadata."""
# Neither what was built and trained here, nor what is large and not packaged.
NOT_COPIED = (".git", ".venv", "*.egg-info", "__pycache__", "build", "dist", "runs", "results")

pytestmark = pytest.mark.thorough


class Installed(NamedTuple):
    """A wheel, and the folder that it is installed in."""

    wheel: Path
    folder: Path

    def names(self) -> set[str]:
        """Paths of the wheel's files."""
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


def run(*command: object, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; ``path`` becomes its PYTHONPATH, and nothing else of the tests' is left."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


def build(project: Path, output: Path) -> Path:
    """The wheel of ``project``, built from its source distribution, as ``python -m build`` does.

    The build backend is called directly: of that tool the environment has to have it alone.
    """
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    result = run(sys.executable, "-c", program, output, cwd=project)
    assert result.returncode == 0, result.stdout + result.stderr
    [source] = output.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", output)
    result = run(*pip, "wheel", *options, source, cwd=output)
    assert result.returncode == 0, result.stdout + result.stderr
    [wheel] = output.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty folder, without its dependencies: torch alone has gigabytes."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = ("--no-deps", "--no-index", "--target", folder)
    result = run(*pip, "install", *options, wheel, cwd=wheel.parent)
    assert result.returncode == 0, result.stdout + result.stderr


def built_and_installed(folder: Path, project: str) -> Installed:
    """Build and install the project in the folder ``project`` of a copy of this checkout."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (folder / "wheels").mkdir()
    wheel = build(source / project, folder / "wheels")
    install(wheel, folder / "installed")
    return Installed(wheel, folder / "installed")


@pytest.fixture(scope="module")
def megatron_taco(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return built_and_installed(tmp_path_factory.mktemp("megatron_taco"), ".")


@pytest.fixture(scope="module")
def taco_kernels(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return built_and_installed(tmp_path_factory.mktemp("taco_kernels"), "taco_kernels")


def python(installed: Installed, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an installed wheel and the environment's packages, without the checkout."""
    packages = sysconfig.get_path("purelib")
    path = os.pathsep.join((str(installed.folder), packages))
    return run(sys.executable, "-S", *arguments, cwd=cwd, path=path)


def modules_of(package: str) -> set[str]:
    """Paths of the Python files that a package of this checkout consists of."""
    files = (ROOT / package).rglob("*.py")
    return {file.relative_to(ROOT).as_posix() for file in files}


def test_the_wheel_of_megatron_taco_has_all_modules_and_nothing_else(
    megatron_taco: Installed,
) -> None:
    names = megatron_taco.names()
    for package in ("megatron/compression", "megatron/host", "taco_kernels"):
        assert modules_of(package) <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGED, f"megatron_taco-{__version__}.dist-info"}


def test_the_wheel_of_megatron_taco_stays_an_overlay(megatron_taco: Installed) -> None:
    """``megatron/__init__.py`` would hide the megatron-core wheel's half of the namespace."""
    assert "megatron/__init__.py" not in megatron_taco.names()


def test_the_wheel_of_taco_kernels_has_all_modules_and_nothing_else(
    taco_kernels: Installed,
) -> None:
    names = taco_kernels.names()
    assert modules_of("taco_kernels") <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"taco_kernels", f"taco_kernels-{__version__}.dist-info"}


def test_wheels_have_their_licence_and_say_that_they_are_typed(
    megatron_taco: Installed, taco_kernels: Installed
) -> None:
    assert {"megatron/compression/py.typed", "taco_kernels/py.typed"} <= megatron_taco.names()
    assert "taco_kernels/py.typed" in taco_kernels.names()
    for installed in (megatron_taco, taco_kernels):
        assert any(name.endswith("licenses/LICENSE") for name in installed.names())


def test_an_installed_megatron_taco_is_imported_from_its_folder(
    megatron_taco: Installed, tmp_path: Path
) -> None:
    """Beside megatron-core, which comes from the environment."""
    program = """
import importlib.metadata
import megatron.compression, megatron.core, pretrain_gpt, taco_kernels
print(importlib.metadata.version("megatron-taco"))
for module in (megatron.compression, taco_kernels, pretrain_gpt, megatron.core):
    print(module.__file__)
"""
    result = python(megatron_taco, tmp_path, "-c", program)
    assert result.returncode == 0, result.stderr
    version, *files, core = result.stdout.split()
    assert version == __version__
    for file in files:
        assert Path(file).is_relative_to(megatron_taco.folder)
    assert not Path(core).is_relative_to(megatron_taco.folder)


def test_every_module_of_taco_kernels_is_imported_without_megatron(
    taco_kernels: Installed, tmp_path: Path
) -> None:
    program = """
import importlib, pkgutil, sys
import taco_kernels
for module in pkgutil.walk_packages(taco_kernels.__path__, "taco_kernels."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
"""
    result = python(taco_kernels, tmp_path, "-c", program)
    assert result.returncode == 0, result.stderr
    assert "taco_kernels.symmetric_memory.kernels" in result.stdout.split()


def test_an_installed_codec_encodes_and_decodes(taco_kernels: Installed, tmp_path: Path) -> None:
    program = """
import torch
from taco_kernels.taco import CodecConfig, decode, encode
config = CodecConfig("int8", group_size=128)
x = torch.linspace(-1, 1, 4096)
assert (decode(encode(x, config), config, x.shape, x.dtype) - x).abs().max() < 0.05
"""
    result = python(taco_kernels, tmp_path, "-c", program)
    assert result.returncode == 0, result.stderr


def test_an_unmodified_script_runs_with_the_installed_wheel(
    megatron_taco: Installed, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('flags', *sys.argv[1:])\n")
    result = python(megatron_taco, tmp_path, "-m", "megatron.compression", "script.py", "--taco")
    assert result.returncode == 0, result.stderr
    assert "flags --taco" in result.stdout


def test_without_a_script_the_installed_entry_prints_its_usage(
    megatron_taco: Installed, tmp_path: Path
) -> None:
    result = python(megatron_taco, tmp_path, "-m", "megatron.compression")
    assert result.returncode == 2
    assert "-m megatron.compression SCRIPT" in result.stderr


@pytest.mark.parametrize(
    "module",
    [
        "megatron.compression.auto.estimate",
        "megatron.compression.report",
        "pretrain_gpt",
        "taco_kernels.benchmarks",
    ],
)
def test_installed_commands_print_their_help(
    module: str, megatron_taco: Installed, tmp_path: Path
) -> None:
    result = python(megatron_taco, tmp_path, "-m", module, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
