"""Whole runs of a small mixture of experts: losses, replicas, what is resumed, the audit of their bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedRun, RankResult, pretrain
from tests.distributed.launch import tiny_flags
from tests.distributed.test_matrix import check_replicas

EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
    --swiglu --normalization RMSNorm --expert-model-parallel-size 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --global-batch-size 8"""
STAGES = """--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1
    --recompute-granularity selective --recompute-modules moe --train-iters 2"""
REPLICAS = """--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --moe-shared-expert-intermediate-size 32 --train-iters 6 --lr 5e-3
    --mtp-num-layers 1 --position-embedding-type rope"""
LOSSY = "--ep-compression int8:group=32 --dp-compression sdp4bit"
ALL_FIVE = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --context-parallel-size 2 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --hidden-size 64 --global-batch-size 4 --train-iters 4 --lr 2e-3
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --taco group=32 --compression-min-mb 0 --pp-compression int8 --dp-compression sdp4bit
    --cp-compression int8 --ep-compression int8:group=32"""
OVERLAP = """--overlap-moe-expert-parallel-comm --bf16 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --moe-shared-expert-intermediate-size 32"""
UNKNOWN = "that the ledger does not know"


def train(directory: Path, *flags: str, ranks: int = 4, check: bool = True) -> ForkedRun:
    """The audit has nothing to say of the first iteration."""
    words = " ".join((EXPERTS, *flags)).split()
    run = pretrain(*tiny_flags(*words), ranks=ranks, directory=directory, check=check)
    assert UNKNOWN not in run.output
    return run


def calls(run: ForkedRun, traffic: str) -> int:
    """Messages of a class, all of them compressed."""
    rows = [row for rank in run.ranks for row in rank.ledger if row["traffic"] == traffic]
    assert {row["kind"] for row in rows} == {"compressed"}, traffic
    return sum(row["calls"] for row in rows)


def dense(rank: RankResult) -> RankResult:
    """Without the parameters of experts, of which ranks hold others."""
    return replace(rank, parameters={n: h for n, h in rank.parameters.items() if ".experts." not in n})


def last_kept(saved: Path, iteration: int, directory: Path) -> Path:
    """A copy of the checkpoints as this iteration left them."""
    name = f"iter_{iteration:07}"
    shutil.copytree(saved / name, directory / "saved" / name)
    (directory / "saved" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return directory / "saved"


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory) -> ForkedRun:
    """Two expert-parallel ranks, two replicas of each expert, four of everything else."""
    return train(tmp_path_factory.mktemp("plain"), REPLICAS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory) -> tuple[ForkedRun, Path]:
    """The same with tokens and gradients compressed, saved half-way, and the folder of its checkpoint."""
    directory = tmp_path_factory.mktemp("compressed")
    saved = f"--save {directory / 'saved'} --save-interval 3 --compression-report {directory / 'report'}"
    return train(directory, REPLICAS, LOSSY, saved), directory


@pytest.fixture(scope="module")
def resumed(compressed: tuple[ForkedRun, Path], tmp_path_factory) -> ForkedRun:
    """It goes on from there."""
    directory = tmp_path_factory.mktemp("resumed")
    load = f"--load {last_kept(compressed[1] / 'saved', 3, directory)}"
    return train(directory, REPLICAS, LOSSY, load)


def same(first: ForkedRun, second: ForkedRun) -> None:
    """Losses and every rank's parameters to the last bit."""
    assert first.losses and first.losses == second.losses
    for one, other in zip(first.ranks, second.ranks, strict=True):
        assert one.parameters == other.parameters


def test_identity_between_virtual_stages(tmp_path: Path) -> None:
    """Expert x pipeline parallelism, recomputed, several micro-batches: megatron-core's own run."""
    identity = train(tmp_path, STAGES, "--ep-compression identity")
    same(train(tmp_path, STAGES), identity)
    assert calls(identity, "ep.forward") == 2 * calls(identity, "ep.backward") > 0, "sent again"


def test_identity_with_the_distributed_optimizer(uncompressed: ForkedRun, tmp_path: Path) -> None:
    """Expert x data parallelism, gradients and weights of experts through the codec as well."""
    codecs = "--ep-compression identity --dp-compression identity identity"
    same(uncompressed, train(tmp_path, REPLICAS, codecs))


def test_lossy_codecs_train(uncompressed: ForkedRun, compressed: tuple[ForkedRun, Path]) -> None:
    """Close to the uncompressed run in fewer bytes, and replicas are alike: experts in pairs, others all."""
    run, _ = compressed
    assert run.losses == pytest.approx(uncompressed.losses, rel=0.003) and run.losses != uncompressed.losses
    for first, second in ((0, 2), (1, 3)):
        assert run.ranks[first].parameters == run.ranks[second].parameters
    first, second, *_ = (dense(rank).parameters for rank in run.ranks)
    assert first == second and len(first) < len(run.ranks[0].parameters)
    assert run.ranks[0].parameters != run.ranks[1].parameters, "two halves of the experts"
    for traffic in ("ep.forward", "ep.backward", "dp.gradient"):
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic]
        assert {row["kind"] for row in rows} == {"compressed"}
        assert sum(row["sent_bytes"] for row in rows) < 0.8 * sum(row["plain_bytes"] for row in rows)
    assert (
        "expert-parallel ratio:" in run.output and "tokens travel to experts and back as int8" in run.output
    )


def test_resume_is_exact(compressed: tuple[ForkedRun, Path], resumed: ForkedRun) -> None:
    """To the bit."""
    whole, run = compressed[0], resumed
    assert run.losses == {iteration: whole.losses[iteration] for iteration in (4, 5, 6)}
    for before, after in zip(whole.ranks, run.ranks, strict=True):
        assert before.parameters == after.parameters


def test_the_report_has_every_layer(compressed: tuple[ForkedRun, Path]) -> None:
    """Errors both ways of dispatch and combine, the layer that predicts a second token among them."""
    report = compressed[1] / "report"
    written = json.loads((report / "report.json").read_text())
    assert written["summary"]["dimensions"]["expert parallel"]["ratio"] > 1.3, "32 values and a scale"
    errors = {(row["site"], row["traffic"]): row["relative_error"] for row in written["errors"]}
    layers = ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.mtp_model_layer")
    sites = {f"{layer}.mlp.{way}" for layer in layers for way in ("dispatch", "combine")}
    assert errors.keys() == {(site, f"ep.{way}") for site in sites for way in ("forward", "backward")}
    assert all(0.004 < error < 0.007 for error in errors.values())


def test_two_micro_batches_overlap(tmp_path: Path) -> None:
    """One's forward pass is interleaved with the other's backward pass. With identity megatron-core's own
    run; with int8 the messages and the first loss of a run without overlap.

    Later losses differ with and without overlap, in megatron-core's own runs as well: it adds up gradients in
    another order.
    """
    short, int8 = "--train-iters 2", "--ep-compression int8:group=32"
    plain = train(tmp_path, OVERLAP, short, ranks=2)
    same(plain, train(tmp_path, OVERLAP, short, "--ep-compression identity", ranks=2))
    lossy = train(tmp_path, OVERLAP, short, int8, ranks=2)
    alone = train(tmp_path, OVERLAP.split(maxsplit=1)[1], short, int8, ranks=2)
    assert lossy.losses[1] == alone.losses[1] != plain.losses[1]
    assert lossy.losses == pytest.approx(plain.losses, rel=0.003)
    assert calls(lossy, "ep.forward") == calls(alone, "ep.forward") == calls(lossy, "ep.backward")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "codecs"),
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
            "--pp-compression identity --dp-compression identity identity",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
            "--tp-compression identity --compression-min-mb 0",
        ),
    ],
)
def test_overlap_with_other_dimensions(tmp_path: Path, layout: str, codecs: str) -> None:
    """All through identity, multi-token prediction too: megatron-core's own run."""
    more = "--train-iters 2 --global-batch-size 16 --mtp-num-layers 1 --position-embedding-type rope"
    plain = train(tmp_path, OVERLAP, layout, more)
    same(plain, train(tmp_path, OVERLAP, layout, more, codecs, "--ep-compression identity"))


@pytest.mark.thorough
def test_all_five_kinds_of_parallelism(tmp_path: Path) -> None:
    """One command line, TACO and full recomputation among its flags: all is compressed, replicas agree."""
    run = train(tmp_path, ALL_FIVE, ranks=8)
    assert run.losses[4] < run.losses[1] - 0.2
    for dimension in ("cp", "ep"):
        assert calls(run, f"{dimension}.forward") == 2 * calls(run, f"{dimension}.backward") > 0, "sent again"
    for traffic in ("tp.forward", "tp.backward", "pp.forward", "pp.backward"):
        assert calls(run, traffic) > 0
    for traffic in ("dp.gradient", "dp.weight"):  # an expert has one replica, and sends nothing
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic and row["sent_bytes"]]
        assert {row["kind"] for row in rows} == {"compressed"}
    check_replicas(replace(run, ranks=[dense(rank) for rank in run.ranks]), tied=True)
