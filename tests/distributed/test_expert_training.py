"""Whole runs of a small mixture of experts: losses, replicas, what is resumed, the audit of their bytes."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedRun, pretrain
from tests.distributed.launch import tiny_flags

EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
    --swiglu --normalization RMSNorm --expert-model-parallel-size 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --global-batch-size 8"""
STAGES = """--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1
    --recompute-granularity selective --recompute-modules moe --train-iters 2"""
REPLICAS = """--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --moe-shared-expert-intermediate-size 32 --train-iters 6 --lr 5e-3"""
LOSSY = "--ep-compression int8:group=32 --dp-compression sdp4bit --dp-error-feedback fp32"
UNKNOWN = "that the ledger does not know"


def train(directory: Path, *flags: str) -> ForkedRun:
    """On four ranks; the audit has nothing to say of the first iteration."""
    words = " ".join((EXPERTS, *flags)).split()
    run = pretrain(*tiny_flags(*words), ranks=4, directory=directory)
    assert UNKNOWN not in run.output
    return run


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory) -> ForkedRun:
    """Two expert-parallel ranks, two replicas of each expert, four of everything else."""
    return train(tmp_path_factory.mktemp("plain"), REPLICAS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory) -> tuple[ForkedRun, Path]:
    """The same with tokens and gradients compressed, saved half-way, and the folder of its checkpoint."""
    directory = tmp_path_factory.mktemp("compressed")
    saved = directory / "saved"
    return train(directory, REPLICAS, LOSSY, f"--save {saved} --save-interval 3"), saved


def same(first: ForkedRun, second: ForkedRun) -> None:
    """Losses and every rank's parameters to the last bit."""
    assert first.losses and first.losses == second.losses
    for one, other in zip(first.ranks, second.ranks, strict=True):
        assert one.parameters == other.parameters


def test_identity_between_virtual_stages(tmp_path: Path) -> None:
    """Expert x pipeline parallelism, recomputed, several micro-batches: megatron-core's own run."""
    same(train(tmp_path, STAGES), train(tmp_path, STAGES, "--ep-compression identity"))


def test_identity_with_the_distributed_optimizer(uncompressed: ForkedRun, tmp_path: Path) -> None:
    """Expert x data parallelism, gradients and weights of experts through the codec as well."""
    codecs = "--ep-compression identity --dp-compression identity --dp-weight-compression identity"
    same(uncompressed, train(tmp_path, REPLICAS, codecs))


def test_lossy_codecs_train(uncompressed: ForkedRun, compressed: tuple[ForkedRun, Path]) -> None:
    """Close to the uncompressed run in fewer bytes, and replicas are alike: experts in pairs, others all."""
    run, _ = compressed
    assert run.losses == pytest.approx(uncompressed.losses, rel=0.003) and run.losses != uncompressed.losses
    for first, second in ((0, 2), (1, 3)):
        assert run.ranks[first].parameters == run.ranks[second].parameters
    dense = [{n: h for n, h in rank.parameters.items() if ".experts." not in n} for rank in run.ranks]
    assert dense[0] == dense[1] and len(dense[0]) < len(run.ranks[0].parameters)
    assert run.ranks[0].parameters != run.ranks[1].parameters, "two halves of the experts"
    for traffic in ("ep.forward", "ep.backward", "dp.gradient"):
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic]
        assert {row["kind"] for row in rows} == {"compressed"}
        assert sum(row["sent_bytes"] for row in rows) < 0.8 * sum(row["plain_bytes"] for row in rows)
    assert (
        "expert-parallel ratio:" in run.output and "tokens travel to experts and back as int8" in run.output
    )


def test_resume_is_exact(compressed: tuple[ForkedRun, Path], tmp_path: Path) -> None:
    """Error feedback of experts' gradients, which differ between expert-parallel ranks, comes back too."""
    run, saved = compressed
    shutil.copytree(saved / "iter_0000003", tmp_path / "saved" / "iter_0000003")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(tmp_path, REPLICAS, LOSSY, f"--load {tmp_path / 'saved'}")
    assert "error feedback: every rank took back its own" in resumed.output
    assert resumed.losses == {iteration: run.losses[iteration] for iteration in (4, 5, 6)}
    for before, after in zip(run.ranks, resumed.ranks, strict=True):
        assert before.parameters == after.parameters
