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
    Speed,
    main,
    parse_megatron,
)
from megatron.compression.auto.messages import MessageKind
from megatron.compression.codecs import parse_codec
from megatron.compression.patches import symbols

BASE = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16
    --max-position-embeddings 2048 --micro-batch-size 4 --vocab-size 32000
    --transformer-impl local"""
"""Megatron's flags of the model that most of docs/choosing.md was measured with."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Megatron's checks set variables, and other tests' entrypoints check more."""
    symbols.take_out()
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def estimate_of(gpus: int, link: str, flags: str) -> Estimate:
    """Return the estimate of a cluster of nodes of 8 GPUs with Ethernet in between.

    Args:
        gpus: how many there are.
        link: name of the link inside of a node.
        flags: Megatron's, after ``BASE``.
    """
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
    """They are within a sixth of the table in docs/choosing.md."""
    estimate = estimate_of(gpus, link, flags)
    rows = estimate.rows(0.1, named=True)
    seconds = next(row.seconds for row in rows if row.name.endswith(recipe))
    assert estimate.uncompressed_seconds / seconds == pytest.approx(measured, rel=1 / 6)


@pytest.fixture(scope="module")
def tensor_parallel_estimate():
    """Four GPUs in tensor-parallel pairs over PCIe."""
    flags = "--tensor-model-parallel-size 2 --global-batch-size 16 --tp-compression-overlap weights"
    return estimate_of(4, "pcie", flags)


@pytest.fixture(scope="module")
def rows(tensor_parallel_estimate):
    """The rows of its table by name, within a budget of 0.1 %."""
    return {row.name: row for row in tensor_parallel_estimate.rows(0.1)}


SIX_BITS = "--tp-compression tensor-6bit"
EIGHT_BITS = "--tp-compression tensor-8bit"


def test_fewer_bits_are_faster_and_cost_more_loss(rows):
    assert rows[SIX_BITS].seconds < rows[EIGHT_BITS].seconds < rows["uncompressed"].seconds
    assert rows[SIX_BITS].loss == 0.123
    assert rows[EIGHT_BITS].loss == 0.018


def test_a_host_launches_more_where_messages_are_compressed(rows):
    assert rows[SIX_BITS].host_seconds == rows[EIGHT_BITS].host_seconds
    assert rows[SIX_BITS].host_seconds > rows["uncompressed"].host_seconds


def test_the_last_row_is_what_auto_would_choose(rows):
    name = list(rows)[-1]
    chosen = "--tp-compression tensor-8bit --dp-compression gradients-4bit"
    assert name == f"within 0.1 %: {chosen}"
    assert rows[name].seconds < rows[EIGHT_BITS].seconds
    assert rows[name].loss == pytest.approx(0.048)


def test_without_a_budget_only_lossless_is_chosen(tensor_parallel_estimate):
    last = tensor_parallel_estimate.rows(0.0)[-1]
    assert "within 0 %: --tp-compression lossless --dp-compression lossless" in last.name


HOST_BOUND = """--num-layers 24 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"""
"""A small model: kernels are shorter than the host needs to launch them."""


@pytest.fixture(scope="module")
def host_bound_rows():
    return estimate_of(2, "pcie", HOST_BOUND).rows(0.1)


def test_an_iteration_takes_as_long_as_a_host_that_launches_too_slowly(host_bound_rows):
    uncompressed = host_bound_rows[0]
    assert uncompressed.seconds == uncompressed.host_seconds
    assert uncompressed.host_seconds > uncompressed.gpu_seconds


def test_where_the_host_decides_no_codec_promises_a_gain(host_bound_rows):
    uncompressed, *compressed = host_bound_rows
    for row in compressed:
        assert row.seconds >= uncompressed.seconds, row.name
    assert compressed[-1].name == "within 0.1 %: nothing"


def test_the_table_says_that_the_host_decides(capsys):
    words = ["--gpus", "2", "--intra", "pcie", "--", *BASE.split(), *HOST_BOUND.split()]
    assert main(words) == 0
    text = capsys.readouterr().out
    table = [line for line in text.splitlines() if line.startswith("| ")]
    rows = len(table) - 1
    assert f"The host decides in {rows} of {rows} rows" in text


def test_with_graphs_of_whole_iterations_the_host_does_not_decide():
    flags = f"{HOST_BOUND} --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
    uncompressed, *_ = estimate_of(2, "pcie", flags).rows(0.1)
    assert uncompressed.host_seconds == 0
    assert uncompressed.seconds == uncompressed.gpu_seconds


def test_a_qwen_model_is_estimated_by_its_name(capsys):
    words = """--gpus 2 --intra pcie --
        --qwen-model 2.5-0.5b --tensor-model-parallel-size 2 --transformer-impl local
        --micro-batch-size 4 --global-batch-size 4 --seq-length 512 --bf16"""
    assert main(words.split()) == 0
    assert "| uncompressed " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dimension", "operation", "ranks", "ranks_of_a_node"),
    [
        ("tensor_parallel", "all_reduce", 4, 4),
        ("context_parallel", "all_reduce", 2, 2),
        ("data_parallel", "gradients", 8, 2),  # DP 4 x CP 2
        ("pipeline_parallel", "exchange", 2, 1),
    ],
)
def test_groups_lie_on_nodes_as_megatron_numbers_ranks(
    dimension, operation, ranks, ranks_of_a_node
):
    """64 GPUs in nodes of 8 at TP 4, CP 2, PP 2: TP x CP fill a node, so stages lie apart."""
    flags = """--tensor-model-parallel-size 4 --context-parallel-size 2
        --pipeline-model-parallel-size 2 --global-batch-size 64"""
    args = estimate_of(64, "nvlink", flags).args
    cluster = Cluster(8, SPEEDS["nvlink"], SPEEDS["ethernet"])
    message = MessageKind(dimension, "", operation, (4,), torch.float32, 1)
    group = Group.of(message, args, cluster)
    assert group.ranks == ranks
    assert group.local == ranks_of_a_node


@pytest.mark.parametrize(
    ("mapping", "data", "context", "stages"),
    [
        # Four stages of one node each: gradients of a context-parallel pair's two nodes' replicas.
        ("", (4, 4), (2, 2), 1),
        # A node holds the four stages, and each replica is a node of its own.
        ("--use-tp-pp-dp-mapping", (4, 2), (2, 2), 2),
    ],
)
def test_the_order_of_ranks_says_what_crosses_nodes(mapping, data, context, stages):
    """TP 1, CP 2, PP 4, DP 2 on 16 GPUs in nodes of 8."""
    flags = f"""--context-parallel-size 2 --pipeline-model-parallel-size 4
        --global-batch-size 64 {mapping}"""
    args = estimate_of(16, "nvlink", flags).args
    cluster = Cluster(8, SPEEDS["nvlink"], SPEEDS["ethernet"])
    groups = {
        dimension: Group.of(
            MessageKind(dimension, "", operation, (4,), torch.float32, 1), args, cluster
        )
        for dimension, operation in (
            ("data_parallel", "gradients"),
            ("context_parallel", "all_gather"),
            ("pipeline_parallel", "exchange"),
        )
    }
    assert (groups["data_parallel"].ranks, groups["data_parallel"].local) == data
    assert (groups["context_parallel"].ranks, groups["context_parallel"].local) == context
    assert groups["pipeline_parallel"].local == stages


IN_HALVES = "--tensor-model-parallel-size 2 --global-batch-size 16 --attention-dropout 0"
IN_A_GRAPH = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
HALVES = "--tp-compression-overlap halves"


@pytest.fixture(scope="module")
def halved_rows():
    """The rows of 8 layers of 4096 over PCIe, in a CUDA graph."""
    rows = estimate_of(2, "pcie", f"{IN_HALVES} {IN_A_GRAPH}").rows(0.1)
    return {row.name: row for row in rows}


@pytest.mark.parametrize(("name", "measured"), [(HALVES, 1.31), (f"{EIGHT_BITS} {HALVES}", 1.50)])
def test_halves_are_near_what_was_measured(halved_rows, name, measured):
    """Two H200: docs/results/graphs.md."""
    speed_up = halved_rows["uncompressed"].seconds / halved_rows[name].seconds
    assert speed_up == pytest.approx(measured, rel=1 / 6)


def test_in_halves_fewer_bits_gain_less(halved_rows):
    """The link is hidden, so the step from eight to six bits is a smaller part."""
    as_usual = halved_rows[EIGHT_BITS].seconds - halved_rows[SIX_BITS].seconds
    eight = halved_rows[f"{EIGHT_BITS} {HALVES}"].seconds
    assert eight - halved_rows[f"{SIX_BITS} {HALVES}"].seconds < as_usual


def test_what_auto_would_choose_is_near_the_fastest(halved_rows):
    choice = list(halved_rows)[-1]
    within_budget = [row.seconds for row in halved_rows.values() if row.loss <= 0.1]
    assert halved_rows[choice].seconds <= min(within_budget) * 1.03


def test_what_auto_would_choose_has_the_schedule():
    """A GPT of 1.3 B parameters: its link takes longer than its computation."""
    shape = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
    *_, choice = estimate_of(2, "pcie", f"{IN_HALVES} {IN_A_GRAPH} {shape}").rows(0.1)
    assert choice.name.startswith("within 0.1 %: ")
    assert choice.name.endswith(HALVES)


def test_over_nvlink_halves_are_not_chosen():
    *_, choice = estimate_of(2, "nvlink", f"{IN_HALVES} {IN_A_GRAPH}").rows(0.1)
    assert HALVES not in choice.name


def test_without_a_graph_the_host_launches_halves_twice(halved_rows):
    rows = {row.name: row for row in estimate_of(2, "pcie", IN_HALVES).rows(0.1)}
    assert rows[HALVES].host_seconds == 2 * rows["uncompressed"].host_seconds
    assert rows[HALVES].gpu_seconds == halved_rows[HALVES].gpu_seconds
    assert halved_rows[HALVES].host_seconds == 0


@pytest.mark.parametrize("flags", ["--micro-batch-size 1", "--tp-compression-overlap weights"])
def test_halves_that_are_not_covered_or_not_wanted_have_no_row(flags):
    rows = estimate_of(2, "pcie", f"{IN_HALVES} {flags}").rows(0.1)
    assert not any(HALVES in row.name for row in rows)


def test_the_flags_as_given_may_be_halves(capsys):
    words = ["--gpus", "2", "--intra", "pcie", "--", *BASE.split(), *IN_HALVES.split()]
    assert main([*words, *IN_A_GRAPH.split(), *HALVES.split()]) == 0
    table = capsys.readouterr().out.splitlines()
    cells = {row.split("|")[1].strip(): row.split("|")[2:] for row in table if row[:1] == "|"}
    assert cells["the flags as given"][:4] == cells[HALVES][:4]


def test_help_names_the_units(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for unit in ("--loss-budget PERCENT", "--gemm-tflops TFLOP/S", "latency in microseconds"):
        assert unit in text
    assert "400 Gbit/s = 50 GB/s" in text


LARGE_CLUSTER = [
    "--gpus",
    "4096",
    "--inter",
    "12.5:20",
    "--",
    *BASE.split(),
    *"--tensor-model-parallel-size 4 --global-batch-size 4096 --tp-compression int4".split(),
]


def test_the_table_has_a_row_of_the_flags_as_given(capsys):
    assert main(LARGE_CLUSTER) == 0
    table = capsys.readouterr().out
    assert table.startswith("| predicted ")
    assert "| the flags as given " in table


def test_the_picture_names_the_links(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.svg"
    assert main(["--plot", str(picture), *LARGE_CLUSTER]) == 0
    text = picture.read_text()
    assert "predicted" in text
    assert "nvlink in a node, 12.5:20 between nodes" in text


WITHOUT_VOCABULARY = BASE.replace("--vocab-size 32000", "")
WITHOUT_MICRO_BATCH = BASE.replace("--micro-batch-size 4", "")


@pytest.mark.parametrize(
    ("options", "megatron", "line"),
    [
        ("--gpus 0", BASE, "--gpus 0 must be above 0"),
        (
            "--inter fast",
            BASE,
            "--inter fast: give one of nvlink, pcie, ethernet, or GB/s and microseconds",
        ),
        ("--intra 0:3", BASE, "--intra 0:3: give one of"),
        (
            "--gpus 3",
            f"{BASE} --tensor-model-parallel-size 2",
            "Megatron refuses these flags on 3 GPUs: ",
        ),
        ("", f"{BASE} --vocab-size 0", "--vocab-size is missing"),
        ("", WITHOUT_VOCABULARY, "--vocab-size is missing"),
        ("", f"{BASE} --tp-compression int7", "codec 'int7' is unknown"),
        ("", f"{BASE} --no-such-flag", "--no-such-flag"),
        ("", WITHOUT_MICRO_BATCH, "GPUs: --micro-batch-size is missing: give it"),
        ("--plot /nowhere/at/all.png", BASE, "No such file or directory: '/nowhere/at/all.png'"),
    ],
)
def test_bad_input_is_one_line(options: str, megatron: str, line: str, capsys):
    assert main([*options.split(), "--", *megatron.split()]) == 2
    output = capsys.readouterr().err.splitlines()
    (error,) = [text for text in output if text.startswith("error: ")]
    assert line in error


FAST = Speed(1e9, 0.0)
SLOW = Speed(1.0, 0.0)
"""One byte a second, so that seconds are the bytes that a rank sends over the slower link."""


@pytest.mark.parametrize(
    ("operation", "inside", "between"),
    [
        # of eight ranks three others are inside the node, and four on the other
        ("all_to_all", 300, 400),
        # inside its node a rank sends as if there were no other, between nodes a fourth of what one does
        ("all_gather", 600, 100),
        ("all_reduce", 1200, 200),
    ],
)
def test_bytes_inside_a_node_and_between_two(operation: str, inside: int, between: int) -> None:
    """800 bytes over two nodes of four ranks."""
    slow_inside = Group(8, 4, Cluster(4, intra=SLOW, inter=FAST))
    slow_between = Group(8, 4, Cluster(4, intra=FAST, inter=SLOW))
    assert slow_inside.seconds(operation, 800) == pytest.approx(inside)
    assert slow_between.seconds(operation, 800) == pytest.approx(between)


def test_two_ranks_send_each_other_all_that_they_have() -> None:
    """A sum in one exchange: each sends the payload of the whole tensor."""
    codec = parse_codec("int8")
    values = 2**20
    group = Group(2, 2, Cluster(2, intra=SLOW, inter=FAST))
    seconds = group._sum_of_two(codec, values, torch.bfloat16)
    assert seconds == pytest.approx(codec.payload_bytes((values,)), rel=1e-4)
