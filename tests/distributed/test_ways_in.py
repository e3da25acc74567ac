"""The four ways in: an unedited entrypoint, two lines in another one, ours, and an own loop."""

import functools
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import (
    Run,
    environment,
    launched,
    pretrain,
    start,
    tiny_flags,
    torchrun,
)
from tests.distributed.spawn import spawn
from tests.distributed.test_matrix import check_channels, check_copies
from tests.distributed.transport_audit import TransportAudit, total_of

WAYS = "tests/distributed/ways_in"
TP = "--taco format=int8 --compression-min-mb 0 --tensor-model-parallel-size 2"
PP = "--pp-compression int8 --pipeline-model-parallel-size 2"
DP = "--dp-compression int8 --use-distributed-optimizer --bf16 --micro-batch-size 1"
LAYOUTS = {"tensor and pipeline": f"{TP} {PP}", "tensor and data": f"{TP} {DP}"}
SPEC = f"{TP} --spec tests.distributed.ways_in.own_layers"
TENSOR = ("tp.forward", "tp.backward")
COMPRESSED = {
    "tensor and pipeline": (*TENSOR, "pp.forward", "pp.backward"),
    "tensor and data": (*TENSOR, "dp.gradient"),
}


def train(flags: str, script: str = "pretrain_gpt.py", **options) -> Run:
    """Train three iterations, on the ranks that the layout takes.

    Args:
        flags: of the layout and the codecs.
        script: the entrypoint.
        options: of ``pretrain``.
    """
    command = tiny_flags(*flags.split(), hidden_size="64", train_iters="3")
    # A second kind of parallelism beside two tensor-parallel ranks.
    ranks = 4 if PP in flags or DP in flags else 2
    return pretrain(*command, ranks=ranks, script=script, **options)


by_ours = functools.cache(train)
"""Our entrypoint's runs, made once."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unedited_entrypoint_trains_as_ours(layout: str) -> None:
    """Way 1: losses, parameters and ledger are those of pretrain_gpt.py, to the last bit."""
    ours = by_ours(LAYOUTS[layout])
    theirs = train(
        LAYOUTS[layout], f"{WAYS}/unedited.py", through="megatron/compression/__main__.py"
    )
    assert len(ours.losses) == 3
    assert theirs.losses == ours.losses
    assert theirs.parameters == ours.parameters
    assert [rank.ledger for rank in theirs.ranks] == [rank.ledger for rank in ours.ranks]
    check_copies(theirs, tied=True)
    check_channels(theirs, COMPRESSED[layout])


def test_an_unedited_entrypoint_with_a_model_provider() -> None:
    """Way 1: megatron-core's own layers, made by the script, send the bytes that ours do."""
    layout = LAYOUTS["tensor and pipeline"]
    ours = by_ours(layout)
    script = f"{WAYS}/unedited_provider.py"
    theirs = train(layout, script, through="megatron/compression/__main__.py")
    assert len(theirs.losses) == 3
    assert theirs.losses == pytest.approx(ours.losses, rel=2e-3)
    assert [rank.ledger for rank in theirs.ranks] == [rank.ledger for rank in ours.ranks]
    check_copies(theirs, tied=True)


def test_two_lines_compress_from_the_start_iteration_on() -> None:
    """Way 2 trains as ours does."""
    flags = f"{TP} --compression-start-iteration 2"
    run = train(flags, f"{WAYS}/two_lines.py")
    ours = by_ours(flags)
    assert run.losses == ours.losses
    for rank in run.ranks:
        uncompressed_bytes = {"warmup": 0, "compressed": 0}
        for row in rank.ledger:
            if row["traffic"] in TENSOR:
                uncompressed_bytes[row["kind"]] += row["plain_bytes"]
        assert uncompressed_bytes["compressed"] > 0
        # Two iterations of three.
        assert uncompressed_bytes["warmup"] == 2 * uncompressed_bytes["compressed"]


def test_the_command_of_the_first_way(tmp_path: Path) -> None:
    """It runs as a user types it, under torchrun, in processes that have loaded nothing before.

    The Transformer Engine on their path cannot be imported.
    """
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("__version__ = '2.20.2'\n")
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text(
        "raise OSError('libcudnn.so.9: gone')"
    )
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    command = ["megatron.compression", f"{WAYS}/unedited.py"]
    command += tiny_flags(*TP.split(), hidden_size="64", train_iters="1")
    run = torchrun("-m", *command, processes=2, PYTHONPATH=path).finish(240)
    assert run.returncode == 0, run.output[-4000:]
    assert "Traceback" not in run.output, run.output[-4000:]
    assert "layers: torch-native (Transformer Engine needs CUDA" in run.output
    assert "tensor parallelism: taco:format=int8" in run.output
    assert list(run.log("lm loss")) == [1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: no script is named; usage: torchrun ... -m megatron.compression SCRIPT"),
        (["--taco"], "error: no script is named; usage: torchrun"),
        (["nothere.py", "--taco"], "error: nothere.py: no such file; usage: torchrun"),
    ],
    ids=["nothing", "a flag", "a missing file"],
)
def test_a_script_that_is_not_named_is_one_line(arguments: list[str], line: str) -> None:
    """All ranks together print one line: torchrun stops the others after the first one's."""
    run = start("megatron/compression/__main__.py", *arguments, processes=2).finish(60)
    assert run.returncode == 2
    assert len(run.errors) == 1
    assert run.errors[0].startswith(line)
    assert "Traceback" not in run.output


def test_linears_with_a_forward_of_their_own_are_refused() -> None:
    """The error is one line a rank, which names the module."""
    run = train(f"{SPEC} scaled", check=False)
    assert run.returncode != 0
    assert "Traceback" not in run.output
    assert run.errors, run.output[-3000:]
    module = "decoder.layers.0.mlp.linear_fc2"
    for line in run.errors:
        assert f"--tp-compression cannot compress {module}: ScaledRow has a forward" in line


def test_a_linear_of_ones_own_is_named_by_the_audit() -> None:
    """The first iteration's audit has the bytes that no site covers."""
    run = train(f"{SPEC} own_row")
    (line,) = [line for line in run.output.splitlines() if "that the ledger does not" in line]
    # Two layers and two micro-batches, forward alone: an all-reduce of [32, 2, 64] in fp32 over
    # two ranks.
    expected = 2 * 2 * 32 * 2 * 64 * 4
    (number,) = re.findall(r"tensor parallelism sent ([\d,]+) bytes", line)
    sent = int(number.replace(",", ""))
    assert expected <= sent < expected + 1000, "more than the sums and a few scalars"


@dataclass
class LoopOfARank:
    """What one rank of a loop over megatron-core has seen."""

    losses: list
    """Of three iterations; None where the rank is not on the last stage."""
    sent: dict
    """Bytes that c10d was given in the first two, by kind of parallelism."""
    counted: dict
    """Bytes that the ledger has counted in them."""
    kinds: set[tuple[str, str]]
    """(traffic, kind) of the ledger's rows."""
    resumed_loss: list
    """Of the third iteration, after a resume from the checkpoint behind the second."""
    resumed_kinds: set[str]
    """Kinds of what the resumed loop has sent, without scalars."""
    has_same_parameters: bool
    """Whether the resumed loop ends in the bits of the loop that went on."""


def loop_worker(rank: int, world_size: int, tensor: int, pipeline: int, folder: str) -> LoopOfARank:
    """Train three iterations, of which the first goes uncompressed, and resume from the second."""
    os.environ["RANK"] = str(rank)
    from megatron.core import parallel_state

    from examples.own_loop import COMPRESSED, Loop

    loop = Loop(tensor, pipeline, COMPRESSED)
    with TransportAudit(smallest=64) as audit:
        losses = [loop.iterate(0), loop.iterate(1)]
    rows = loop.compression.ledger.rows()
    loop.save(Path(folder))
    losses.append(loop.iterate(2))

    parallel_state.destroy_model_parallel()
    resumed = Loop(tensor, pipeline, COMPRESSED)
    resumed.load(Path(folder))
    resumed_loss = resumed.iterate(2)
    resumed_kinds = set()
    for row in resumed.compression.ledger.rows():
        if row["sent_bytes"] and not row["traffic"].endswith(".other"):
            resumed_kinds.add(row["kind"])
    parameters = zip(loop.model.parameters(), resumed.model.parameters(), strict=True)
    return LoopOfARank(
        losses=losses,
        sent=audit.sent,
        counted=total_of(rows),
        kinds={(row["traffic"], row["kind"]) for row in rows},
        resumed_loss=resumed_loss,
        resumed_kinds=resumed_kinds,
        has_same_parameters=all(torch.equal(first, second) for first, second in parameters),
    )


LOOPS = {
    "two stages": (2, 2, {"tp.forward", "tp.backward", "pp.forward", "pp.backward"}),
    "two replicas": (2, 1, {"tp.forward", "tp.backward", "dp.gradient", "dp.weight"}),
}
"""Layouts of four ranks: tensor and pipeline parallel sizes, and what is compressed."""


@functools.cache
def loop_of(layout: str) -> list[LoopOfARank]:
    """Train a loop once, and return its ranks."""
    tensor, pipeline, _ = LOOPS[layout]
    with tempfile.TemporaryDirectory() as folder:
        return spawn(loop_worker, 4, tensor, pipeline, folder)


@pytest.mark.parametrize("layout", LOOPS)
def test_the_ledger_of_a_loop_is_what_was_sent(layout: str) -> None:
    """Way 4: every byte that c10d was given is counted, and none else."""
    for rank in loop_of(layout):
        assert rank.sent == rank.counted


@pytest.mark.parametrize("layout", LOOPS)
def test_a_loop_compresses_all_kinds_of_traffic_of_its_layout(layout: str) -> None:
    _, _, expected = LOOPS[layout]
    compressed = set()
    for rank in loop_of(layout):
        compressed |= {traffic for traffic, kind in rank.kinds if kind == "compressed"}
        assert {kind for _, kind in rank.kinds} <= {"warmup", "compressed", "exact", "off"}
    assert compressed == expected


@pytest.mark.parametrize("layout", LOOPS)
def test_a_resumed_loop_ends_in_the_same_bits(layout: str) -> None:
    """It also knows that the uncompressed iterations are over."""
    for rank in loop_of(layout):
        assert rank.resumed_loss == rank.losses[2]
        assert rank.has_same_parameters
        assert rank.resumed_kinds <= {"compressed"}


@pytest.mark.parametrize("layout", LOOPS)
def test_losses_of_a_loop_are_numbers(layout: str) -> None:
    losses = loop_of(layout)[-1].losses
    assert len(losses) == 3
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)


@functools.cache
def example_of_a_loop() -> Run:
    """A run of examples/own_loop.py on four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")
        flags = ("--tensor", "2", "--iterations", "20", "--save", str(saved))
        run = start("examples/own_loop.py", *flags, processes=4).finish(240)
        assert run.returncode == 0, run.output[-3000:]
        assert any(saved.iterdir()), "the checkpoint"
    return run


def test_the_example_of_a_loop_learns() -> None:
    """Its data has a rule, so copies of it train: the loss halves within 20 iterations."""
    lines = re.findall(r"iteration (\d+): loss ([\d.]+)", example_of_a_loop().output)
    losses = [float(loss) for _, loss in lines]
    assert [int(iteration) for iteration, _ in lines] == list(range(1, 21))
    # ln(96) = 4.56 is the loss of guessing among 96 tokens.
    assert 4 < losses[0] < 5
    assert sum(losses[-3:]) / 3 < losses[0] / 2


def test_the_example_of_a_loop_says_what_it_sent() -> None:
    """Way 4: the summary has each kind of traffic, and their total."""
    rows = dict(re.findall(r"^([a-z.]+) .*ratio ([\d.]+)$", example_of_a_loop().output, re.M))
    assert {"tp.forward", "tp.backward", "dp.gradient", "dp.weight", "all"} <= set(rows)
    assert 1 < float(rows["all"]) < float(rows["tp.forward"])


def test_the_example_of_a_loop_does_without_megatron_training() -> None:
    modules = "[name for name in sys.modules if name.startswith('megatron.training')]"
    code = f"import examples.own_loop, sys; print({modules})"
    loaded = launched([sys.executable, "-W", "ignore", "-c", code], environment()).finish(240)
    assert loaded.output.splitlines()[-1] == "[]", loaded.output[-3000:]
