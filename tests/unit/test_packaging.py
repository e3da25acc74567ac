"""What both projects of this repository, megatron-taco and taco-kernels, say of themselves."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from megatron.compression.versions import REQUIRED
from taco_kernels import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("pyproject.toml", "taco_kernels/pyproject.toml")


@pytest.mark.parametrize("path", PROJECTS)
def test_a_project_takes_its_version_from_the_package(path: str) -> None:
    """``taco_kernels.__version__`` is the only one; builds read it without an import."""
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


def test_the_example_of_taco_kernels_readme_runs() -> None:
    text = (ROOT / "taco_kernels" / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    exec(example, names)
    assert names["summed"].dtype == torch.uint8
    error = (names["y"] - names["x"]).float().norm() / names["x"].float().norm()
    assert error < 0.05, "int6"


def test_taco_kernels_asks_for_the_versions_that_megatron_taco_is_tested_with() -> None:
    description = tomllib.loads((ROOT / "taco_kernels/pyproject.toml").read_text())
    for requirement in description["project"]["dependencies"]:
        package, _, _ = requirement.partition(";")  # without "on Linux"
        assert package in (*REQUIRED, "numpy")
