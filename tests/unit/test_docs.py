"""The docs name what exists: flags, codecs, files, numbers; commands are tested or marked."""

import argparse
import csv
import importlib
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
import yaml
from megatron.training.arguments import add_megatron_arguments

import taco_kernels
from megatron import compression
from megatron.compression.codecs import CODECS, parse_codec, recipes
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.flags import REMOVED, add_flags
from megatron.compression.frontends.megatron_lm.enable import add_arguments
from megatron.compression.huggingface.models import add_qwen_arguments

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
RESULTS = sorted((REPO / "docs" / "results").glob("*.md"))
CURRENT = [page for page in PAGES + RESULTS if page.name != "removed.md"]
"""Pages that name flags as they are; the changelog and removed.md name those that are gone."""

OTHERS = set(
    """
    --nproc-per-node --standalone --nnodes --node-rank --master-addr --master-port --nodes --help
    --fast --all --with-transformer-engine --pdb
    --strict --site-dir --shm-size --pid --prefix
    --tensor-parallel --data-parallel --pipeline-parallel
    --kitchen-config-file --kitchen-recipe-number
    --output-logit-dtype --gtp-weight-remat-size
    --module --config
    """.split()
)
"""Flags of other programs, by line: launchers; scripts of ours in bash; mkdocs, docker, py-spy,
torchfrtrace; flags that scripts make by dimension; Megatron's where nvidia-kitchen is installed; those
of a Megatron that is not released; torchtitan's."""
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
    """Return (dimension, spec) of every codec on a page, behind a flag or by itself in code."""
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
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page_id(page)}: {target}"


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=page_id)
def test_files_named_in_code_exist(page):
    """Scripts and modules of commands count, and paths of sources."""
    text = page.read_text()
    for path in re.findall(r"(?<![\w/])((?:scripts|examples)/[\w/]+\.(?:py|sh|sbatch))", text):
        assert (REPO / path).exists(), path
    if page in PAGES:
        for path in re.findall(r"`((?:megatron|taco_kernels|tests|docs)/[\w/.-]+)`", text):
            assert (REPO / path).exists(), path
    for module in re.findall(r"-m ((?:megatron|taco_kernels|scripts)[\w.]*\w)", text):
        path = REPO / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_the_architecture_names_what_is_there():
    """Files and folders in its table, from the root or from megatron/compression."""
    page = REPO / "docs" / "architecture.md"
    for row in re.findall(r"^\| (`[^|]+) \|", page.read_text(), re.M):
        for name in re.findall(r"`([\w./]+(?:\.py|/))`", row):
            in_root = REPO / name
            in_package = REPO / "megatron" / "compression" / name
            assert in_root.exists() or in_package.exists(), name


# Blocks of code and how they are marked.

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RUN = ("bash", "python")
"""Languages of blocks that tests/distributed/test_pages.py runs."""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_run_or_marked(page):
    """Text is for reading; a console block says first what it needs that a test does not have."""
    for language, text in BLOCK.findall(page.read_text()):
        assert language in (*RUN, "console", "text"), (
            f"{page_id(page)}: {language or 'no language'}"
        )
        if language == "console":
            assert re.match(r"# needs: \w", text), f"{page_id(page)}: {text.splitlines()[0]}"


def test_blocks_that_run_are_on_pages_that_a_test_runs():
    source = (REPO / "tests" / "distributed" / "test_pages.py").read_text()
    for page in PAGES:
        if any(language in RUN for language, _ in BLOCK.findall(page.read_text())):
            assert f'"{page.name}"' in source, f"no test runs the blocks of {page_id(page)}"


def test_the_codec_of_the_readme_encodes_and_decodes():
    text = (REPO / "README.md").read_text()
    [source] = [block for language, block in BLOCK.findall(text) if language == "python"]
    module = types.ModuleType("my_codec")
    exec(compile(source, "my_codec.py", "exec"), vars(module))
    codec = module.RowInt8()
    x = torch.randn(3, 7, 100, generator=torch.Generator().manual_seed(0))
    payloads = codec.encode(x)
    assert payloads.dtype == torch.uint8 and payloads.shape == (3, codec.payload_bytes((7, 100)))
    decoded = codec.decode(payloads, (7, 100), torch.float32)
    assert 0 < (decoded - x).norm() / x.norm() < 0.01
    assert not codec.decode(codec.encode(x / 0), (7, 100), torch.float32).isfinite().any()


# What a run prints.

PRINTED = {
    "troubleshooting.md": (
        "payloads travel",
        "over symmetric memory between",
        "no host memory to share",
        "go uncompressed: these messages are under",
        "that the ledger does not know",
        "goes uncompressed after iteration",
        "switched off",
        "lost the connection to another rank",
        "did not answer within --distributed-timeout-minutes",
        "other settings than the checkpoint's",
        "is of another run",
        "every rank restored its memory",
    ),
    "choosing.md": ("through host memory between", "MiB uncompressed", "has no peer access to"),
    "cluster.md": ("data-parallel group is",),
    "two_data_centres.md": (
        "closed the connection",
        "whose newest exchange was after its iteration",
        "which has begun this exchange too, so the link is slow or lost",
        "has not answered for",
    ),
    "data_parallel.md": ("no fused kernels for these messages",),
}
"""By page: what it quotes of a run's log and errors."""


@pytest.fixture(scope="module")
def sources() -> str:
    """All of our sources, with string literals that continue on the next line put together."""
    folders = (REPO / "megatron", REPO / "taco_kernels")
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize(
    ("name", "quoted"), [(name, text) for name, texts in PRINTED.items() for text in texts]
)
def test_quoted_lines_are_what_a_run_prints(name, quoted, sources):
    page = re.sub(r"\s+", " ", (REPO / "docs" / name).read_text())
    assert quoted in page and quoted in sources


# Numbers and advice.

NUMBER = re.compile(r"\b\d\.\d\d\b")
COST = re.compile(r"\+\d\.\d+")
ADVICE = (
    "For your own runs over slow links take `int8`; over NVLink leave compression off. "
    "`--taco` is the FP8 codec of the TACO paper, with outliers stored separately; "
    "to reproduce the paper take `--taco outliers=off`. "
    "`int8` is smaller, as fast, and costs about a tenth of either in loss, or less"
)


def tables(page: Path) -> list[list[dict[str, str]]]:
    """The tables of a page: their rows, cells by the column's heading."""
    result = []
    for lines in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M):
        heading, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|\n"))]
            for line in lines.splitlines()
        ]
        result.append([dict(zip(heading, cells, strict=True)) for cells in rows])
    return result


def results_text() -> str:
    return "\n".join(page.read_text() for page in RESULTS)


@pytest.fixture(scope="module")
def measured() -> set[str]:
    """Speed-ups of today.csv."""
    with (REPO / "docs" / "results" / "today.csv").open(newline="") as stream:
        return {row["speed"] for row in csv.DictReader(stream)}


@pytest.mark.parametrize("name", ["README.md", "docs/choosing.md"])
def test_speed_ups_are_measured(name, measured):
    """A number is in today.csv, or on the page of results that its row links to."""
    page = REPO / name
    elsewhere = results_text()
    checked = 0
    for row in (row for table in tables(page) for row in table if "speed-up" in row):
        linked = re.findall(r"\]\(([^)#]+\.md)", " ".join(row.values()))
        text = "\n".join((page.parent / link).read_text() for link in linked)
        for number in NUMBER.findall(re.sub(r"\(.*?\)", "", row["speed-up"])):
            known = number in text if linked else number in measured or number in elsewhere
            assert known or number in measured, f"{name}: {row}"
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("name", ["README.md", "docs/choosing.md", "docs/loss.md"])
def test_costs_in_loss_are_measured(name):
    text = results_text()
    for table in tables(REPO / name):
        for row in table:
            for cost in COST.findall(" ".join(row.values())):
                assert cost in text or f"{cost}0" in text, f"{name}: {cost} of {row}"


@pytest.mark.parametrize("name", ["README.md", "docs/choosing.md"])
def test_tables_of_numbers_have_one_a_cell(name):
    for table in tables(REPO / name):
        for column in ("speed-up", "cost in loss, %", "small model, %", "pretrained model, %"):
            for row in (row for row in table if column in row):
                assert len(re.findall(r"\d+\.\d+", row[column].split("(")[0])) <= 1, row


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/choosing.md"])
def test_pages_give_one_advice_on_the_codec(name):
    text = re.sub(r"\s+", " ", (REPO / name).read_text())
    assert ADVICE in text


REDUCE = {
    "nodes of several GPUs each": "sdp4bit",
    "nodes of one GPU each": "sdp4bit:intra=4",
    "one node": "int8",
}
"""By machines: the codec of FSDP2's gradients."""


@pytest.mark.parametrize("name", ["docs/fsdp2.md", "docs/choosing.md"])
def test_pages_give_one_rule_for_the_gradients_of_fsdp2(name):
    [table] = [
        table for table in tables(REPO / name) if {"your machines", "`reduce=`"} == {*table[0]}
    ]
    rule = {}
    for row in table:
        codec = re.search(r"`\"?([\w:=]+)\"?`", row["`reduce=`"])
        assert codec is not None, row
        rule[row["your machines"]] = codec[1]
    assert rule == REDUCE


def test_the_readme_gives_the_same_rule():
    text = (REPO / "README.md").read_text()
    assert (
        'Gradients: `reduce="sdp4bit"` where nodes have several GPUs, `"sdp4bit:intra=4"` where each '
        'node has one, `"int8"` inside one node.'
    ) in re.sub(r"\s+", " ", text)


def test_no_page_of_advice_has_macros():
    for page in PAGES:
        assert "<!--=" not in page.read_text(), page_id(page)


# The site and the project's own files.


def test_the_api_page_names_what_is_public():
    names = re.findall(r"^::: ([\w.]+)$", (REPO / "docs" / "api.md").read_text(), re.M)
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    public = {f"megatron.compression.{name}" for name in compression.__all__}
    assert public <= {*names}, f"missing: {', '.join(sorted(public - {*names}))}"


def test_the_site_lists_every_page():
    text = (REPO / "mkdocs.yml").read_text()
    listed = set(re.findall(r": ([\w/]+\.md)$", text, re.M))
    pages = {str(page.relative_to(REPO / "docs")) for page in (REPO / "docs").rglob("*.md")}
    assert listed == pages | {"index.md", "contributing.md", "changelog.md"}


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    built = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Parameters" in (tmp_path / "api" / "index.html").read_text()


def test_the_workflow_runs_the_tests():
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "tests.yml").read_text())
    job = workflow["jobs"]["tests"]
    commands = [step.get("run") for step in job["steps"]]
    assert "./scripts/test.sh" in commands
    [version] = [
        step["with"]["python-version"] for step in job["steps"] if "setup-python" in str(step)
    ]
    assert version == "3.12"


def test_pre_commit_runs_tools_of_the_environment():
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    [repo] = config["repos"]
    assert repo["repo"] == "local"
    setup = (REPO / "setup.py").read_text()
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff", "ruff-format", "mypy", "pydoclint"]
    for hook in repo["hooks"]:
        tool = hook["id"].removesuffix("-format")
        assert hook["language"] == "system" and tool in hook["entry"] and f'"{tool}"' in setup
    assert '"pre-commit"' in setup


def test_issue_templates_are_forms():
    for path in (REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert form["name"] and form["description"] and form["body"], path.name
            assert all(part["attributes"]["label"] for part in form["body"]), path.name


def test_the_citation_has_the_version():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert str(citation["version"]) == taco_kernels.__version__
    assert citation["license"] == project["license"]
