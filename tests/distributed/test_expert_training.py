"""Whole runs of a small mixture of experts: losses, replicas, what is resumed, the audit of their bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.launch import UNKNOWN, Run, go_back_to, pretrain, tiny_flags
from tests.distributed.test_matrix import check_copies

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
DEEPSEEK = """--tensor-model-parallel-size 2 --sequence-parallel --bf16 --hidden-size 64 --global-batch-size 4
    --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --qk-layernorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --mtp-num-layers 1 --moe-layer-freq [0,1] --moe-ffn-hidden-size 32 --expert-tensor-parallel-size 1
    --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --attention-dropout 0 --hidden-dropout 0 --lr 4e-3 --train-iters 3"""


def train(*flags: str, ranks: int = 4) -> Run:
    """The audit has nothing to say of the first iteration."""
    run = pretrain(*tiny_flags(*" ".join((EXPERTS, *flags)).split()), ranks=ranks)
    assert UNKNOWN not in run.output
    return run


def calls(run: Run, traffic: str) -> int:
    """Messages of a class, all of them compressed."""
    rows = [row for rank in run.ranks for row in rank.ledger if row["traffic"] == traffic]
    assert {row["kind"] for row in rows} == {"compressed"}, traffic
    return sum(row["calls"] for row in rows)


def dense(run: Run) -> Run:
    """Without the parameters of experts, of which ranks hold others."""

    def of(rank):
        kept_tensors = {
            name: bits for name, bits in rank.parameters.items() if ".experts." not in name
        }
        return replace(
            rank, parameters=kept_tensors, replicated=rank.replicated & kept_tensors.keys()
        )

    return replace(run, ranks=[of(rank) for rank in run.ranks])


@pytest.fixture(scope="module")
def uncompressed() -> Run:
    """Two expert-parallel ranks, two replicas of each expert, four of everything else."""
    return train(REPLICAS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory) -> tuple[Run, Path]:
    """The same with tokens and gradients compressed, saved half-way, and the folder of its checkpoint."""
    directory = tmp_path_factory.mktemp("compressed")
    saved = f"--save {directory / 'saved'} --save-interval 3 --compression-report {directory / 'report'}"
    return train(REPLICAS, LOSSY, saved), directory


def same(first: Run, second: Run) -> None:
    """Losses and every rank's parameters to the last bit."""
    assert first.losses and first.losses == second.losses and first.parameters == second.parameters


def test_identity_between_virtual_stages() -> None:
    """Expert x pipeline parallelism, recomputed, several micro-batches: megatron-core's own run."""
    identity = train(STAGES, "--ep-compression identity")
    same(train(STAGES), identity)
    assert calls(identity, "ep.forward") == 2 * calls(identity, "ep.backward") > 0, "sent again"


def test_identity_with_the_distributed_optimizer(uncompressed: Run) -> None:
    """Expert x data parallelism, gradients and weights of experts through the codec as well."""
    codecs = "--ep-compression identity --dp-compression identity identity"
    same(uncompressed, train(REPLICAS, codecs))


def test_lossy_codecs_train(uncompressed: Run, compressed: tuple[Run, Path]) -> None:
    """Close to the uncompressed run in fewer bytes, and replicas are alike: experts in pairs, others all."""
    run, _ = compressed
    assert (
        run.losses == pytest.approx(uncompressed.losses, rel=0.003)
        and run.losses != uncompressed.losses
    )
    assert run.parameters[:2] == run.parameters[2:]
    first, second, *_ = dense(run).parameters
    assert first == second and len(first) < len(run.parameters[0])
    assert run.parameters[0] != run.parameters[1], "two halves of the experts"
    for traffic in ("ep.forward", "ep.backward", "dp.gradient"):
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic]
        assert {row["kind"] for row in rows} == {"compressed"}
        assert sum(row["sent_bytes"] for row in rows) < 0.8 * sum(
            row["plain_bytes"] for row in rows
        )
    assert (
        "expert-parallel ratio:" in run.output
        and "tokens to experts and back as int8" in run.output
    )


def test_resume_is_exact(compressed: tuple[Run, Path]) -> None:
    """To the bit."""
    complete, directory = compressed
    go_back_to(3, directory / "saved")
    run = train(REPLICAS, LOSSY, f"--load {directory / 'saved'}")
    assert run.losses == {iteration: complete.losses[iteration] for iteration in (4, 5, 6)}
    assert run.parameters == complete.parameters


def test_the_report_has_every_layer(compressed: tuple[Run, Path]) -> None:
    """Errors both ways of dispatch and combine, the layer that predicts a second token among them."""
    report = compressed[1] / "report"
    written = json.loads((report / "report.json").read_text())
    assert written["summary"]["dimensions"]["expert parallel"]["ratio"] > 1.3, (
        "32 values and a scale"
    )
    errors = {(row["site"], row["traffic"]): row["relative_error"] for row in written["errors"]}
    layers = ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.mtp_model_layer")
    sites = {f"{layer}.mlp.{way}" for layer in layers for way in ("dispatch", "combine")}
    assert errors.keys() == {
        (site, f"ep.{way}") for site in sites for way in ("forward", "backward")
    }
    assert all(0.004 < error < 0.007 for error in errors.values())


def test_two_micro_batches_overlap() -> None:
    """One's forward pass is interleaved with the other's backward pass. With identity megatron-core's own
    run; with int8 the messages and the first loss of a run without overlap.

    Later losses differ with and without overlap, in megatron-core's own runs as well: it adds up gradients in
    another order.
    """
    short, int8 = "--train-iters 2", "--ep-compression int8:group=32"
    plain = train(OVERLAP, short, ranks=2)
    same(plain, train(OVERLAP, short, "--ep-compression identity", ranks=2))
    lossy = train(OVERLAP, short, int8, ranks=2)
    alone = train(OVERLAP.split(maxsplit=1)[1], short, int8, ranks=2)
    assert lossy.losses[1] == alone.losses[1] != plain.losses[1]
    assert lossy.losses == pytest.approx(plain.losses, rel=0.003)
    assert calls(lossy, "ep.forward") == calls(alone, "ep.forward") == calls(lossy, "ep.backward")


def test_the_shape_of_deepseek() -> None:
    """Latent attention, experts, a second token: near the uncompressed losses, in half of the bytes."""
    plain = train(DEEPSEEK, ranks=2)
    run = train(DEEPSEEK, "--tp-compression int8 --compression-min-mb 0", ranks=2)
    assert run.losses == pytest.approx(plain.losses, rel=0.003) and run.losses != plain.losses
    assert run.losses[3] < run.losses[1] - 0.2
    check_copies(run)
    for traffic in ("tp.forward", "tp.backward"):
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic]
        assert {row["kind"] for row in rows} == {"compressed"}
        expected = sum(
            row["plain_bytes"] for row in plain.ranks[0].ledger if row["traffic"] == traffic
        )
        assert sum(row["plain_bytes"] for row in rows) == expected
        assert sum(row["sent_bytes"] for row in rows) < 0.53 * expected


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
def test_overlap_with_other_dimensions(layout: str, codecs: str) -> None:
    """All through identity, multi-token prediction too: megatron-core's own run."""
    more = (
        "--train-iters 2 --global-batch-size 16 --mtp-num-layers 1 --position-embedding-type rope"
    )
    plain = train(OVERLAP, layout, more)
    same(plain, train(OVERLAP, layout, more, codecs, "--ep-compression identity"))


@pytest.mark.thorough
def test_all_five_kinds_of_parallelism() -> None:
    """One command line, TACO and full recomputation among its flags: all is compressed, replicas agree."""
    run = train(ALL_FIVE, ranks=8)
    assert run.losses[4] < run.losses[1] - 0.2
    for dimension in ("cp", "ep"):
        assert calls(run, f"{dimension}.forward") == 2 * calls(run, f"{dimension}.backward") > 0, (
            "sent again"
        )
    for traffic in ("tp.forward", "tp.backward", "pp.forward", "pp.backward"):
        assert calls(run, traffic) > 0
    for traffic in ("dp.gradient", "dp.weight"):  # an expert has one replica, and sends nothing
        rows = [
            row for row in run.ranks[0].ledger if row["traffic"] == traffic and row["sent_bytes"]
        ]
        assert {row["kind"] for row in rows} == {"compressed"}
    check_copies(run, tied=True)
