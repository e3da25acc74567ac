"""What the docs name exists: flags, codecs, files, headings."""

import argparse
import re
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron.compression.codecs import CODECS, parse_codec, recipes
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.flags import REMOVED, add_flags
from megatron.compression.huggingface.models import add_qwen_arguments
from megatron.compression.setup import add_arguments

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
RESULTS = sorted((REPO / "docs" / "results").glob("*.md"))
CURRENT = [page for page in PAGES + RESULTS if page.name != "removed.md"]
"""Pages that name flags as they are; the changelog and removed.md name those that are gone."""

OTHERS = {  # flags of other programs
    *("--nproc-per-node", "--standalone", "--nnodes", "--nodes", "--help"),
    *("--fast", "--all", "--with-transformer-engine", "--pdb"),
    *(
        "--tensor-parallel",
        "--data-parallel",
        "--pipeline-parallel",
    ),  # scripts make them by dimension
    *(
        "--kitchen-config-file",
        "--kitchen-recipe-number",
    ),  # Megatron's where nvidia-kitchen is installed
}
SPEC_FLAG = re.compile(
    r"""--(tp|pp|dp|ep|cp)-compression[ =]["']?([^\s`,;:()|"']+(?::[^\s`;()|"']+)?)"""
)
NAMED = re.compile(r"`([a-z][a-z0-9-]*(?::[a-z]+=[^\s`]+)?(?:/[a-z][a-z0-9-]*)?)`")


def page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


def known_flags() -> set[str]:
    """Ours, Megatron's, and those of our scripts, which their sources spell out."""
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    for add in (add_megatron_arguments, add_arguments, add_qwen_arguments):
        add(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for folder in (
        "scripts",
        "examples",
        "taco_kernels",
        "megatron/compression/auto",
        "tests/kernels",
    ):
        for source in (REPO / folder).rglob("*.py"):
            flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)', source.read_text()))
    return flags - {*REMOVED} | OTHERS


@pytest.fixture(scope="module")
def flags() -> set[str]:
    return known_flags()


@pytest.mark.parametrize("page", CURRENT, ids=page_id)
def test_flags_exist(page, flags):
    named = set(re.findall(r"(?<![\w-])(--[a-z0-9][a-z0-9-]*)", page.read_text()))
    missing = {flag for flag in named if flag not in flags and flag.replace("_", "-") not in flags}
    if page in RESULTS:  # which keep what was measured of flags that are gone
        missing -= set(re.findall(r"--[a-z0-9-]+", (REPO / "docs/results/removed.md").read_text()))
    assert not missing, (
        f"{page_id(page)} names flags that nothing has: {', '.join(sorted(missing))}"
    )


def test_every_flag_of_ours_is_in_the_table():
    parser = add_flags(argparse.ArgumentParser(add_help=False))
    table = set(re.findall(r"^\| `(--[a-z0-9-]+)", (REPO / "docs" / "flags.md").read_text(), re.M))
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    ours = {flag for action in shown for flag in action.option_strings}
    assert table == ours


def specs(page: Path) -> set[tuple[str, str]]:
    """(dimension, spec) of every codec that a page names, behind a flag or by itself in code."""
    text = page.read_text()
    found = {(dimension, spec) for dimension, spec in SPEC_FLAG.findall(text)}
    found |= {
        ("tp", f"taco:{settings}")
        for settings in re.findall(r"--taco ([a-z]+=[^\s`]+)", text)
        if settings
    }
    for spec in NAMED.findall(text):
        if CODECS.entry(re.split("[:/]", spec)[0]) is not None:
            found.add(("tp", spec))
    example = {"SPEC", "none", "auto", "CODEC", "block8", "off"}  # block8 is the page's own
    return {
        (dimension, spec)
        for dimension, spec in found
        if spec not in example
        and not re.match(r"\w+:[A-Z]|my_", spec)  # MODULE:CLASS, of the reader's own
        and not re.search(r"=$|=,|[\[\]<]|\.\.\.", spec)  # placeholders
    }


@pytest.mark.parametrize("page", CURRENT, ids=page_id)
def test_specs_parse(page):
    for dimension, spec in sorted(specs(page)):
        if dimension == "dp" or "outer=" in spec:
            assert DataParallelConfig(compression=spec).enabled, spec
        elif spec not in recipes.NAMED:
            assert parse_codec(spec).name, spec


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, REPO / "CHANGELOG.md"], ids=page_id)
def test_links_resolve(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(other), f"{page_id(page)}: {target}"


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=page_id)
def test_files_named_in_code_exist(page):
    """Scripts and modules of commands: `python scripts/losses.py`, `python -m taco_kernels.benchmarks`."""
    text = page.read_text()
    for path in re.findall(r"(?<![\w/])((?:scripts|examples)/[\w/]+\.(?:py|sh|sbatch))", text):
        assert (REPO / path).exists(), path
    for module in re.findall(r"-m ((?:megatron|taco_kernels|scripts)[\w.]*\w)", text):
        path = REPO / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module
