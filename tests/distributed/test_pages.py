"""The blocks of README and of the pages of docs/ run in order, on two CPU ranks.

A block whose first line is ``# name.py`` becomes that file. Other ``python`` blocks run as scripts,
``bash`` blocks in a shell. ``text`` blocks are for reading. ``console`` blocks are for the reader's
own machines: their launch lines, where nothing is left out, are given to Megatron's parser and to
ours.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.launch import REPO, START_FAST, environment, free_port, launched
from tests.distributed.spawn import spawn
from tests.distributed.test_examples import fake

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
_LEFT_OUT = re.compile(r"\.\.\.|<[\w' ]+>|your_|their_")
"""Parts of a launch line that the reader has to complete."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is; None: it is to be run."""
        match = _FILE.match(self.text)
        return match and match[1]


def blocks_of(name: str, *languages: str) -> list[Block]:
    """Return the blocks of these languages in README.md or a page of docs/."""
    page = REPO / name if name == "README.md" else REPO / "docs" / name
    blocks = [Block(*match) for match in _BLOCK.findall(page.read_text())]
    return [block for block in blocks if block.language in languages]


def run(block: Block, folder: Path, timeout: float = 400) -> str:
    """Write or run a block, and return its output.

    Args:
        block: of a page.
        folder: stands for the root of a clone.
        timeout: seconds.

    Raises:
        AssertionError: it failed, with its output.
    """
    if block.file is not None:
        (folder / block.file).write_text(block.text)
        return ""
    command = [sys.executable, "-c", block.text]
    if block.language == "bash":  # what one block exports, the next ones have
        text = f"[ ! -f .exports ] || . ./.exports\n{block.text}\nexport -p >.exports"
        command = ["bash", "-euo", "pipefail", "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    imports = os.pathsep.join(map(str, (START_FAST, folder, REPO)))
    variables = environment(PATH=path, PYTHONPATH=imports, MASTER_PORT=str(free_port()))
    run = launched(command, variables, folder).finish(timeout)
    assert run.returncode == 0, (
        f"exit status {run.returncode} of\n{block.text}\n{run.output[-6000:]}"
    )
    return run.output


def run_page(name: str, folder: Path) -> list[str]:
    """Run the ``python`` and ``bash`` blocks of a page in a clone, and return their outputs."""
    clone(folder)
    return [run(block, folder) for block in blocks_of(name, "python", "bash")]


def clone(folder: Path) -> Path:
    """Make ``folder`` look like the root of a clone by links, beside which blocks can write."""
    for entry in REPO.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_readme(tmp_path):
    _, training = run_page("README.md", tmp_path)
    assert float(re.findall(r"tensor-parallel ratio: ([\d.]+)", training)[-1]) > 1.5


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_quickstart(tmp_path):
    *outputs, own_loop = run_page("quickstart.md", tmp_path)
    for dimension, output in zip(("tensor", "pipeline", "data"), outputs, strict=True):
        assert f"{dimension}-parallel ratio" in output
    report = (tmp_path / "runs" / "quickstart" / "report.md").read_text()
    assert "What one GPU sends in one iteration" in report
    assert "iteration 4: loss" in own_loop and "rank 0 sent in 4 iterations" in own_loop


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_extending(tmp_path):
    _, tried, _, collective, training, gradients = run_page("extending.md", tmp_path)
    assert "relative error" in tried
    assert collective.count("relative error") == 2
    assert float(re.findall(r"tensor-parallel ratio: ([\d.]+)", training)[-1]) > 1.5
    assert "data-parallel ratio" in gradients


def rows_of(text: str) -> set[str]:
    """The rows of a table, without what aligns their columns."""
    lines = (re.sub(r" +", " ", line).strip() for line in text.splitlines())
    return {line for line in lines if line.startswith("|")}


def test_choosing(tmp_path):
    """The prediction for nodes with InfiniBand prints the rows that the page quotes of it; FSDP2's
    lines are valid Python."""
    predicted, _ = run_page("choosing.md", tmp_path)
    [quoted] = [block for block in blocks_of("choosing.md", "text") if "| predicted" in block.text]
    rows = rows_of(quoted.text)
    assert len(rows) >= 5
    assert rows <= rows_of(predicted), predicted


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_several_nodes(tmp_path):
    [output] = run_page("cluster.md", tmp_path)
    assert "a data-parallel group is 2 nodes of 1 rank" in output
    assert "between nodes:" in output


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_loss(tmp_path):
    [output] = run_page("loss.md", tmp_path)
    assert "training loss, iteration 6" in output and "x fewer" in output
    assert (tmp_path / "runs" / "loss-compared" / "comparison.md").exists()


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_experts(tmp_path):
    [output] = run_page("experts.md", tmp_path)
    assert float(re.findall(r"expert-parallel ratio: ([\d.]+)", output)[-1]) > 1.5


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_fsdp2(tmp_path):
    _, output = run_page("fsdp2.md", tmp_path)
    assert "step 4: loss" in output


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_ddp(tmp_path):
    _, output = run_page("ddp.md", tmp_path)
    rows = re.findall(r"^(\w+): \d+ ms a step .*, ([\d.]+) MB sent a step, loss", output, re.M)
    sent = {reduce: float(megabytes) for reduce, megabytes in rows}
    assert len(rows) == 6 and sent["none"] == 2 * sent["bf16"]
    assert 3.9 < sent["none"] / sent["int8"] < 4 and sent["powersgd"] < sent["sdp4bit"]


# Launch lines for the reader's machines.

KINDS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "context_parallel",
)
PIPELINE_6BIT = "int6:group=64,scales=single,normalize=standardize,outliers=on"
AUTO = ("tensor_parallel", "pipeline_parallel", "data_parallel")
"""What --compression auto decides where no experts and no context parallelism are in use."""


def launch_lines(name: str, folder: Path) -> list[list[str]]:
    """Return the arguments that the console blocks of a page give to torchrun.

    Blocks with something left out are passed over. torchrun, sbatch, ssh and mpirun are stand-ins:
    the first one writes its arguments down, the others run the command that they are to start.
    """
    file = folder / "torchrun.words"
    fake(folder, "torchrun", f'printf "%s\\n" "$@" END >>{file}')
    fake(folder, "sbatch", 'shift 3; NNODES=2 exec examples/"$@"')
    fake(folder, "ssh", 'exec bash -c "$2"')
    fake(folder, "mpirun", 'shift 8; OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 exec "$@"')
    for block in blocks_of(name, "console"):
        starts_training = re.search(r"torchrun|examples/.*\.sh|sbatch", block.text)
        if starts_training and not _LEFT_OUT.search(block.text):
            variables = environment(PATH=f"{folder}:{os.environ['PATH']}")
            run = launched(["bash", "-euo", "pipefail", "-c", block.text], variables, folder)
            finished = run.finish(60)
            assert finished.returncode == 0, f"{block.text}\n{finished.output}"
    lines = [[]]
    for argument in file.read_text().splitlines():
        if argument == "END":
            lines.append([])
        else:
            lines[-1].append(argument)
    return lines[:-1]


def parsed(rank: int, world_size: int, lines: list[list[str]]) -> list[dict[str, str]]:
    """Return the codec of each kind of parallelism that each line compresses.

    It runs in a process of its own, for Megatron's state is global.

    Args:
        rank: this rank.
        world_size: one.
        lines: arguments of torchrun.
    """
    import torch
    from megatron.training.arguments import parse_args, validate_args

    from megatron.compression.flags import resolve
    from megatron.compression.frontends.megatron_lm.enable import adapt_arguments, add_arguments
    from megatron.compression.huggingface.models import add_qwen_arguments, expand

    # The lines are for GPUs; Megatron asks for their generation before it takes grouped products.
    torch.cuda.get_device_capability = lambda *_: (9, 0)

    def arguments(parser):
        return add_qwen_arguments(add_arguments(parser))

    codecs = []
    for line in lines:
        launch = [argument.replace("_", "-") for argument in line[:10]]
        ranks_per_node = int(launch[launch.index("--nproc-per-node") + 1])
        nodes = int(launch[launch.index("--nnodes") + 1])
        os.environ["WORLD_SIZE"] = str(ranks_per_node * nodes)
        script = next(i for i, argument in enumerate(line) if "pretrain_" in argument)
        flags = line[script + 1 :]
        if "--qwen-model" in flags:
            flags = expand(flags)[0]
        sys.argv = ["pretrain.py", *flags]
        args = parse_args(arguments)
        validate_args(args)
        adapt_arguments(args)
        config = resolve(args)
        specs = {name: getattr(config, name).compression for name in KINDS}
        specs = {name: spec for name, spec in specs.items() if spec != "none"}
        codecs.append(specs | {name: "auto" for name in config.auto})
    return codecs


@pytest.mark.parametrize(
    ("page", "compressed"),
    [
        (
            "choosing.md",
            [
                {"tensor_parallel": "int8"},  # a box of 8 PCIe GPUs
                {"tensor_parallel": "int8"},  # a box of 4
                {"tensor_parallel": "int8"},  # in CUDA graphs with halves
                dict.fromkeys(AUTO, "auto"),  # InfiniBand, with SLURM
                dict.fromkeys(AUTO, "auto"),  # and without
                {"expert_parallel": "int8"},
                {"data_parallel": "sdp4bit"},  # experts on two nodes
                {"pipeline_parallel": PIPELINE_6BIT},  # a stage on each of two nodes
                {"data_parallel": "none:outer=int8"},  # two data centres
                {"data_parallel": "none:outer=int8"},  # with stages
            ],
        ),
        ("cluster.md", [{"data_parallel": "sdp4bit"}] * 4),
        (
            "two_data_centres.md",
            [{}, {}],
        ),  # one job in each; what crosses is no kind of parallelism
        (
            "quickstart.md",
            [
                {"tensor_parallel": "int8"},
                {"data_parallel": "sdp4bit"},
                {"data_parallel": "sdp4bit"},
            ],
        ),
    ],
)
def test_launch_lines_are_what_the_parsers_take(page, compressed, tmp_path):
    lines = launch_lines(page, clone(tmp_path))
    megatron_lines = []
    for line in lines:
        if any("pretrain_" in argument for argument in line):
            megatron_lines.append(line)
        else:
            assert "examples/fsdp2.py" in line
    [codecs] = spawn(parsed, 1, megatron_lines)
    assert codecs == compressed
