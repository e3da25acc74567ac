"""The estimate: auto's messages over a described cluster, and speed-ups near the measured ones."""

import os
from pathlib import Path

import pytest
import torch

from megatron.compression.auto.estimate import (
    SPEEDS,
    Cluster,
    Estimate,
    Group,
    main,
    parse_megatron,
)
from megatron.compression.auto.messages import MessageKind
from megatron.compression.patches import symbols

BASE = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16
    --max-position-embeddings 2048 --micro-batch-size 4 --vocab-size 32000 --transformer-impl local"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Megatron's checks set variables, and other tests' entrypoints check more."""
    symbols.take_out()
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def made(gpus: int, link: str, flags: str) -> Estimate:
    cluster = Cluster(8, SPEEDS[link], SPEEDS["ethernet"])
    return Estimate(parse_megatron([*BASE.split(), *flags.split()], gpus), cluster, 720e12)


@pytest.mark.parametrize(
    ("gpus", "link", "flags", "recipe", "measured"),
    [
        (4, "pcie", "--tensor-model-parallel-size 4 --global-batch-size 16", "tensor-6bit", 1.96),
        (4, "pcie", "--tensor-model-parallel-size 4 --global-batch-size 16", "tensor-8bit", 1.60),
        (2, "pcie", "--tensor-model-parallel-size 2 --global-batch-size 16", "tensor-6bit", 1.46),
        (2, "nvlink", "--tensor-model-parallel-size 2 --global-batch-size 16", "tensor-8bit", 1.0),
        (
            2,
            "ethernet",
            "--use-distributed-optimizer --global-batch-size 8",
            "gradients-4bit",
            2.63,
        ),
    ],
)
def test_speed_ups_are_near_what_was_measured(gpus, link, flags, recipe, measured):
    """docs/choosing.md's table, of the model that most of it was measured with: within a sixth."""
    estimate = made(gpus, link, flags)
    rows = estimate.rows(0.1, named=True)
    seconds = next(row.seconds for row in rows if row.name.endswith(recipe))
    assert estimate.uncompressed_seconds / seconds == pytest.approx(measured, rel=1 / 6)


@pytest.fixture(scope="module")
def tensor_parallel_estimate():
    """Four GPUs in tensor-parallel pairs over PCIe."""
    return made(4, "pcie", "--tensor-model-parallel-size 2 --global-batch-size 16")


@pytest.fixture(scope="module")
def rows(tensor_parallel_estimate):
    """The rows of its table by name, within a budget of 0.1 %."""
    return {row.name: row for row in tensor_parallel_estimate.rows(0.1)}


SIX_BITS = "--tp-compression tensor-6bit"
EIGHT_BITS = "--tp-compression tensor-8bit"


def test_fewer_bits_are_faster_and_cost_more_loss(rows):
    assert rows[SIX_BITS].seconds < rows[EIGHT_BITS].seconds < rows["uncompressed"].seconds
    assert (rows[SIX_BITS].loss, rows[EIGHT_BITS].loss) == (0.067, 0.006)


def test_a_host_launches_more_where_messages_are_compressed(rows):
    assert rows[SIX_BITS].host_seconds == rows[EIGHT_BITS].host_seconds
    assert rows[SIX_BITS].host_seconds > rows["uncompressed"].host_seconds


def test_the_last_row_is_what_auto_would_choose(rows):
    name = list(rows)[-1]
    assert name == "within 0.1 %: --tp-compression tensor-6bit --dp-compression gradients-4bit"
    assert rows[name].seconds < rows[SIX_BITS].seconds
    assert rows[name].loss == pytest.approx(0.097)


def test_without_a_budget_only_lossless_is_chosen(tensor_parallel_estimate):
    last = tensor_parallel_estimate.rows(0.0)[-1]
    assert "within 0 %: --tp-compression lossless --dp-compression lossless" in last.name


HOST_BOUND = """--num-layers 24 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"""
"""A small model: kernels are shorter than the host needs to launch them."""


def test_a_host_that_launches_too_slowly_decides(capsys):
    """Its time is that of the iteration, speed-ups are of it, and the way out is named."""
    estimate = made(2, "pcie", HOST_BOUND)
    uncompressed, *compressed = estimate.rows(0.1)
    assert uncompressed.seconds == uncompressed.host_seconds > uncompressed.gpu_seconds
    assert all(row.seconds >= uncompressed.seconds for row in compressed), "no row promises a gain"
    assert compressed[-1].name == "within 0.1 %: nothing"
    words = ["--gpus", "2", "--intra", "pcie", "--", *BASE.split(), *HOST_BOUND.split()]
    assert main(words) == 0
    assert "The host decides here" in capsys.readouterr().out


def test_with_graphs_of_whole_iterations_the_host_does_not_decide():
    flags = f"{HOST_BOUND} --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
    uncompressed, *_ = made(2, "pcie", flags).rows(0.1)
    assert uncompressed.host_seconds == 0 and uncompressed.seconds == uncompressed.gpu_seconds


def test_a_qwen_model_is_estimated_by_its_name(capsys):
    words = "--gpus 2 --intra pcie -- --qwen-model 2.5-0.5b --tensor-model-parallel-size 2"
    more = "--micro-batch-size 4 --global-batch-size 4 --seq-length 512 --bf16"
    layers = "--transformer-impl local"
    assert main([*words.split(), *more.split(), *layers.split()]) == 0
    assert "| uncompressed " in capsys.readouterr().out


def test_groups_lie_on_nodes_as_megatron_numbers_ranks():
    """Of 64 GPUs in nodes of 8 at TP 4, CP 2, PP 2: DP 4 with CP 2 has two ranks a node."""
    layout = (
        "--tensor-model-parallel-size 4 --context-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    args = made(64, "nvlink", f"{layout} --global-batch-size 64").args
    cluster = Cluster(8, SPEEDS["nvlink"], SPEEDS["ethernet"])

    def group(dimension: str, operation: str = "all_reduce") -> tuple[int, int]:
        found = Group.of(
            MessageKind(dimension, "", operation, (4,), torch.float32, 1), args, cluster
        )
        return found.ranks, found.local

    assert group("tensor_parallel") == (4, 4) and group("context_parallel") == (2, 2)
    assert group("data_parallel", "gradients") == (8, 2) and group(
        "pipeline_parallel", "exchange"
    ) == (2, 1)


def test_table_and_picture(tmp_path: Path, capsys):
    """For up to 16,384 GPUs; with the flags as given."""
    pytest.importorskip("matplotlib")
    layout = "--tensor-model-parallel-size 4 --global-batch-size 4096 --tp-compression int4"
    words = [
        "--gpus",
        "4096",
        "--inter",
        "12.5:20",
        "--plot",
        str(tmp_path / "p.svg"),
        "--",
        *BASE.split(),
    ]
    assert main([*words, *layout.split()]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| predicted ") and "| the flags as given " in printed
    picture = (tmp_path / "p.svg").read_text()
    assert "predicted" in picture and "nvlink in a node, 12.5:20 between nodes" in picture


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--gpus 0", "--gpus 0 must be above 0"),
        (
            "--inter fast",
            "--inter fast: give one of nvlink, pcie, ethernet, or GB/s and microseconds",
        ),
        ("--intra 0:3", "--intra 0:3: give one of"),
        ("--gpus 3 -- --tensor-model-parallel-size 2", "Megatron refuses these flags on 3 GPUs: "),
        ("-- --vocab-size 0", "--vocab-size is missing"),
        ("-- --tp-compression int7", "codec 'int7' is unknown"),
        ("-- --no-such-flag", "--no-such-flag"),
        ("-- --micro-batch-size 4", "GPUs: --micro-batch-size is missing: give it"),
        ("--plot /nowhere/at/all.png", "No such file or directory: '/nowhere/at/all.png'"),
    ],
)
def test_bad_input_is_one_line(words: str, line: str, capsys):
    options, _, flags = words.partition("--" if words.startswith("-- ") else " -- ")
    given = BASE.replace(flags, "") if flags in BASE else f"{BASE} {flags}"
    assert main([*options.split(), "--", *given.split()]) == 2
    said = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert len(said) == 1 and line in said[0]
