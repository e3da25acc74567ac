"""What both projects of this repository, megatron-taco and taco-kernels, say of themselves, once each."""

import re
import tomllib
from pathlib import Path

import pytest

from taco_kernels import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("pyproject.toml", "taco_kernels/pyproject.toml")


@pytest.mark.parametrize("path", PROJECTS)
def test_a_project_takes_its_version_from_the_package(path: str) -> None:
    """``taco_kernels.__version__`` is the one place; builds read it without importing the package."""
    description = tomllib.loads((ROOT / path).read_text())
    assert "version" not in description["project"]
    assert "version" in description["project"]["dynamic"]
    source = description["tool"]["setuptools"]["dynamic"]["version"]
    assert source == {"attr": "taco_kernels.__version__"}


def test_the_version_has_an_entry_in_the_changelog() -> None:
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_the_version() -> None:
    [version] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version == __version__


def test_taco_kernels_comes_with_the_licence() -> None:
    """A wheel can hold files of its own folder only, so there is a copy."""
    licence = (ROOT / "LICENSE").read_text()
    assert (ROOT / "taco_kernels" / "LICENSE").read_text() == licence


def test_taco_kernels_packages_all_of_its_folders() -> None:
    description = tomllib.loads((ROOT / "taco_kernels/pyproject.toml").read_text())
    packages = set()
    for module in (ROOT / "taco_kernels").rglob("__init__.py"):
        packages.add(".".join(module.parent.relative_to(ROOT).parts))
    assert set(description["tool"]["setuptools"]["packages"]) == packages
