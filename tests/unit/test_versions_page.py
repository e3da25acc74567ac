"""What docs/versions.md says was run, what is declared and what is run every week: the same versions."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.compression.versions import MEGATRON_CORE_SERIES, REQUIRED
from taco_kernels.common.fast_launch import KNOWN_TRITON

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, REQUIRED)}
PAGE = ROOT / "docs" / "versions.md"
LATER = 6
"""Series after the last one that was run, which must not be declared."""


class Row(NamedTuple):
    """A combination of the table."""

    torch: str
    triton: str
    megatron_core: str
    python: str
    date: str
    passed: str
    failed: str


def rows() -> list[Row]:
    """Return the rows of the table, which scripts/test_versions.sh prints."""
    [section] = re.findall(r"## What was run\n(.*?)\n## ", PAGE.read_text(), re.S)
    lines = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    return [Row(*[cell.strip() for cell in line.strip("|").split("|")]) for line in lines]


def matrix() -> list[dict[str, str]]:
    """Return the combinations that the workflow runs."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    return workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]


def series(version: str) -> tuple[int, int]:
    """Return (2, 11) of 2.11.0."""
    return Version(version).release[:2]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.torch}-{row.python}")
def test_what_was_run_is_declared_and_passed(row: Row) -> None:
    """Or a note of the page says what failed."""
    assert REQUIREMENTS["torch"].specifier.contains(row.torch)
    assert REQUIREMENTS["triton"].specifier.contains(row.triton)
    assert REQUIREMENTS["megatron-core"].specifier.contains(row.megatron_core)
    assert int(row.passed) > 1000
    failed, _, note = row.failed.partition(" ")
    assert failed == "0" or re.search(rf"^{re.escape(note)} \w", PAGE.read_text(), re.M), row
    assert int(failed) <= 10 and (not note or re.fullmatch(r"\([a-z]\)", note))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)


@pytest.mark.parametrize("package, column", [("torch", "torch"), ("triton", "triton")])
def test_what_is_declared_was_run(package: str, column: str) -> None:
    """Every series that a range allows has a row, up to LATER series after the last."""
    run = {series(getattr(row, column)) for row in rows()}
    major = max(run)[0]
    allowed = {
        (major, minor)
        for minor in range(max(run)[1] + LATER)
        if REQUIREMENTS[package].specifier.contains(f"{major}.{minor}.0")
    }
    assert allowed == run
    for other_major in (major - 1, major + 1):
        assert not REQUIREMENTS[package].specifier.contains(f"{other_major}.99.0")


def test_series_that_are_declared_elsewhere() -> None:
    """Fast launches know the Tritons, the start-up check the megatron-core, of the table."""
    tritons = [series(row.triton) for row in rows()]
    assert KNOWN_TRITON == (min(tritons), max(tritons))
    assert {series(row.megatron_core) for row in rows()} == {series(MEGATRON_CORE_SERIES)}


@pytest.mark.parametrize("path", ["pyproject.toml", "taco_kernels/pyproject.toml"])
def test_pythons_that_are_declared_were_run(path: str) -> None:
    project = tomllib.loads((ROOT / path).read_text())["project"]
    declared = SpecifierSet(project["requires-python"])
    allowed = {f"3.{minor}" for minor in range(8, 24) if declared.contains(f"3.{minor}.1")}
    assert allowed == {row.python for row in rows()}


def test_the_workflow_runs_rows_of_the_table() -> None:
    """Each combination is a row; each torch, Triton and Python is among them."""
    run = {(row.torch, row.triton, row.python) for row in rows()}
    weekly = {(job["torch"], job["triton"], job["python"]) for job in matrix()}
    assert weekly <= run
    for column in range(3):
        assert {row[column] for row in weekly} == {row[column] for row in run}


def test_the_workflow_hands_them_to_the_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    steps = workflow["jobs"]["versions"]["steps"]
    [script] = [step["run"] for step in steps if "scripts/test_versions.sh" in step.get("run", "")]
    assert script == (
        './scripts/test_versions.sh ${{ matrix.torch }} ${{ matrix.triton }} "" python'
    )
    [python] = [step["with"] for step in steps if "setup-python" in step.get("uses", "")]
    assert python == {"python-version": "${{ matrix.python }}"}
