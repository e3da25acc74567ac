"""Whole runs of a small mixture of experts: losses, replicas, resumes, the audit of their bytes."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import UNKNOWN, Run, go_back_to, pretrain, tiny_flags
from tests.distributed.test_matrix import check_copies

EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --disable-bias-linear --swiglu --normalization RMSNorm --expert-model-parallel-size 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --global-batch-size 8"""
STAGES = """--pipeline-model-parallel-size 2 --num-layers 4
    --num-layers-per-virtual-pipeline-stage 1"""
RECOMPUTED_STAGES = f"""{STAGES} --recompute-granularity selective --recompute-modules moe
    --train-iters 2"""
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
REPLICAS = f"""--bf16 {SHARDED} --micro-batch-size 1 --moe-shared-expert-intermediate-size 32
    --train-iters 6 --lr 5e-3 --mtp-num-layers 1 --position-embedding-type rope"""
LOSSY = "--ep-compression int8:group=32 --dp-compression sdp4bit"
ALL_FIVE = f"""--tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2 --context-parallel-size 2 --bf16 {SHARDED}
    --hidden-size 64 --global-batch-size 4 --train-iters 4 --lr 2e-3
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --taco group=32 --compression-min-mb 0 --pp-compression int8 --dp-compression sdp4bit
    --cp-compression int8 --ep-compression int8:group=32"""
NO_OVERLAP = f"--bf16 {SHARDED} --moe-shared-expert-intermediate-size 32"
OVERLAP = f"--overlap-moe-expert-parallel-comm {NO_OVERLAP}"
DEEPSEEK = """--tensor-model-parallel-size 2 --sequence-parallel --bf16 --hidden-size 64
    --global-batch-size 4 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 1
    --moe-layer-freq [0,1] --moe-ffn-hidden-size 32 --expert-tensor-parallel-size 1
    --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4 --attention-dropout 0 --hidden-dropout 0 --lr 4e-3 --train-iters 3"""


def train(*flags: str, ranks: int = 4) -> Run:
    """Run a tiny mixture of experts; the audit of its first iteration names no unknown bytes."""
    run = pretrain(*tiny_flags(*" ".join((EXPERTS, *flags)).split()), ranks=ranks)
    assert UNKNOWN not in run.output
    return run


def rows_of(ledger: list[dict], traffic: str) -> list[dict]:
    """Return the rows of a traffic class that sent something."""
    return [row for row in ledger if row["traffic"] == traffic and row["sent_bytes"]]


def check_compressed(run: Run, traffic: str) -> None:
    """Assert that the first rank sent nothing of a traffic class but payloads."""
    assert {row["kind"] for row in rows_of(run.ranks[0].ledger, traffic)} == {"compressed"}


def total(ledger: list[dict], traffic: str, column: str) -> int:
    """Return the sum of a column over a traffic class's rows."""
    return sum(row[column] for row in ledger if row["traffic"] == traffic)


def messages(run: Run, traffic: str) -> int:
    """Return the number of messages of a traffic class, all of which are compressed."""
    rows = [row for rank in run.ranks for row in rank.ledger if row["traffic"] == traffic]
    assert {row["kind"] for row in rows} == {"compressed"}, traffic
    return sum(row["calls"] for row in rows)


def without_experts(parameters: dict[str, str]) -> dict[str, str]:
    """Return a rank's parameters but those of experts, of which ranks hold different ones."""
    return {name: bits for name, bits in parameters.items() if ".experts." not in name}


@pytest.fixture(scope="module")
def uncompressed() -> Run:
    """Two expert-parallel ranks, two replicas of each expert, four of everything else."""
    return train(REPLICAS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory) -> tuple[Run, Path]:
    """The same run with tokens and gradients compressed; the folder of checkpoint and report."""
    directory = tmp_path_factory.mktemp("compressed")
    saved = f"--save {directory / 'saved'} --save-interval 3"
    report = f"--compression-report {directory / 'report'}"
    return train(REPLICAS, LOSSY, saved, report), directory


def check_same_training(first: Run, second: Run) -> None:
    """Assert that losses and every rank's parameters are equal to the last bit."""
    assert first.losses
    assert first.losses == second.losses
    assert first.parameters == second.parameters


@pytest.fixture(scope="module")
def identity_stages() -> Run:
    """Expert x pipeline parallelism, recomputed, of several micro-batches, through identity."""
    return train(RECOMPUTED_STAGES, "--ep-compression identity")


def test_identity_between_virtual_stages_is_megatron_cores_run(identity_stages: Run) -> None:
    check_same_training(train(RECOMPUTED_STAGES), identity_stages)


def test_recomputed_forward_passes_send_again(identity_stages: Run) -> None:
    backward = messages(identity_stages, "ep.backward")
    assert backward > 0
    assert messages(identity_stages, "ep.forward") == 2 * backward


def test_identity_with_the_distributed_optimizer_is_megatron_cores_run(uncompressed: Run) -> None:
    """Gradients and weights of experts go through the codec as well."""
    codecs = "--ep-compression identity --dp-compression identity identity"
    check_same_training(uncompressed, train(REPLICAS, codecs))


def test_lossy_codecs_train_near_the_uncompressed_run(
    uncompressed: Run, compressed: tuple[Run, Path]
) -> None:
    run, _ = compressed
    assert run.losses == pytest.approx(uncompressed.losses, rel=0.003)
    assert run.losses != uncompressed.losses, "nothing was compressed"


def test_replicas_of_experts_keep_their_bits(compressed: tuple[Run, Path]) -> None:
    """Ranks 0 and 2 hold one half of the experts, ranks 1 and 3 the other."""
    run, _ = compressed
    assert run.parameters[:2] == run.parameters[2:]
    assert run.parameters[0] != run.parameters[1]


def test_replicas_of_everything_else_keep_their_bits(compressed: tuple[Run, Path]) -> None:
    run, _ = compressed
    first, second, *_ = map(without_experts, run.parameters)
    assert first == second
    assert len(first) < len(run.parameters[0])


@pytest.mark.parametrize("traffic", ["ep.forward", "ep.backward", "dp.gradient"])
def test_lossy_codecs_send_fewer_bytes(compressed: tuple[Run, Path], traffic: str) -> None:
    run, _ = compressed
    ledger = run.ranks[0].ledger
    rows = [row for row in ledger if row["traffic"] == traffic]
    assert {row["kind"] for row in rows} == {"compressed"}
    assert total(ledger, traffic, "sent_bytes") < 0.8 * total(ledger, traffic, "plain_bytes")


def test_log_names_the_tokens_codec_and_ratio(compressed: tuple[Run, Path]) -> None:
    run, _ = compressed
    assert "expert-parallel ratio:" in run.output
    assert "tokens to experts and back as int8" in run.output


def test_resume_has_the_same_bits(compressed: tuple[Run, Path]) -> None:
    complete, directory = compressed
    go_back_to(3, directory / "saved")
    run = train(REPLICAS, LOSSY, f"--load {directory / 'saved'}")
    assert run.losses == {iteration: complete.losses[iteration] for iteration in (4, 5, 6)}
    assert run.parameters == complete.parameters


def report_of(compressed: tuple[Run, Path]) -> dict:
    """Return the report's figures."""
    _, directory = compressed
    return json.loads((directory / "report" / "report.json").read_text())


def test_the_report_has_the_ratio_of_tokens(compressed: tuple[Run, Path]) -> None:
    """A group of 32 values in int8 has a scale, and bf16 two bytes a value."""
    ratios = report_of(compressed)["summary"]["dimensions"]
    assert ratios["expert parallel"]["ratio"] > 1.3


def test_the_report_has_the_errors_of_every_layer(compressed: tuple[Run, Path]) -> None:
    """It has both directions of dispatch and combine, of the layer for a second token as well."""
    rows = report_of(compressed)["errors"]
    errors = {(row["site"], row["traffic"]): row["relative_error"] for row in rows}
    expected = set()
    for layer in ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.mtp_model_layer"):
        for step in ("dispatch", "combine"):
            expected.add((f"{layer}.mlp.{step}", "ep.forward"))
            expected.add((f"{layer}.mlp.{step}", "ep.backward"))
    assert errors.keys() == expected
    for site, error in errors.items():
        assert 0.004 < error < 0.007, site


class TestOverlapOfTwoMicroBatches:
    """One's forward pass is interleaved with the other's backward pass.

    Losses after the first differ with and without overlap, in megatron-core's own runs as well: it
    adds up gradients in another order.
    """

    SHORT = "--train-iters 2"
    INT8 = "--ep-compression int8:group=32"

    @pytest.fixture(scope="class")
    def overlapped(self) -> Run:
        return train(OVERLAP, self.SHORT, ranks=2)

    @pytest.fixture(scope="class")
    def overlapped_int8(self) -> Run:
        return train(OVERLAP, self.SHORT, self.INT8, ranks=2)

    @pytest.fixture(scope="class")
    def serial_int8(self) -> Run:
        """The same without overlap."""
        return train(NO_OVERLAP, self.SHORT, self.INT8, ranks=2)

    def test_identity_is_megatron_cores_run(self, overlapped: Run) -> None:
        identity = train(OVERLAP, self.SHORT, "--ep-compression identity", ranks=2)
        check_same_training(overlapped, identity)

    def test_int8_has_the_first_loss_of_a_run_without_overlap(
        self, overlapped: Run, overlapped_int8: Run, serial_int8: Run
    ) -> None:
        assert overlapped_int8.losses[1] == serial_int8.losses[1]
        assert overlapped_int8.losses[1] != overlapped.losses[1]

    def test_int8_trains_near_the_uncompressed_run(
        self, overlapped: Run, overlapped_int8: Run
    ) -> None:
        assert overlapped_int8.losses == pytest.approx(overlapped.losses, rel=0.003)

    def test_int8_sends_the_messages_of_a_run_without_overlap(
        self, overlapped_int8: Run, serial_int8: Run
    ) -> None:
        forward = messages(overlapped_int8, "ep.forward")
        assert forward == messages(serial_int8, "ep.forward")
        assert forward == messages(overlapped_int8, "ep.backward")


class TestDeepSeek:
    """Latent attention, experts and a second token under tensor parallelism."""

    @pytest.fixture(scope="class")
    def uncompressed_deepseek(self) -> Run:
        return train(DEEPSEEK, ranks=2)

    @pytest.fixture(scope="class")
    def compressed_deepseek(self) -> Run:
        return train(DEEPSEEK, "--tp-compression int8 --compression-min-mb 0", ranks=2)

    def test_it_learns(self, compressed_deepseek: Run) -> None:
        assert compressed_deepseek.losses[3] < compressed_deepseek.losses[1] - 0.2

    def test_it_trains_near_the_uncompressed_run(
        self, uncompressed_deepseek: Run, compressed_deepseek: Run
    ) -> None:
        losses = uncompressed_deepseek.losses
        assert compressed_deepseek.losses == pytest.approx(losses, rel=0.003)
        assert compressed_deepseek.losses != losses, "nothing was compressed"

    def test_copies_keep_their_bits(self, compressed_deepseek: Run) -> None:
        check_copies(compressed_deepseek)

    @pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward"])
    def test_it_sends_half_of_the_bytes(
        self, uncompressed_deepseek: Run, compressed_deepseek: Run, traffic: str
    ) -> None:
        ledger = compressed_deepseek.ranks[0].ledger
        expected = total(uncompressed_deepseek.ranks[0].ledger, traffic, "plain_bytes")
        kinds = {row["kind"] for row in ledger if row["traffic"] == traffic}
        assert kinds == {"compressed"}
        assert total(ledger, traffic, "plain_bytes") == expected
        assert total(ledger, traffic, "sent_bytes") < 0.53 * expected


OVERLAPS = {
    "pipeline": (STAGES, "--pp-compression identity --dp-compression identity identity"),
    "tensor": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
        "--tp-compression identity --compression-min-mb 0",
    ),
}
"""Dimensions beside overlapped experts: layout and codecs."""


@pytest.mark.thorough
@pytest.mark.parametrize("dimension", OVERLAPS)
def test_overlap_beside_another_dimension_is_megatron_cores_run(dimension: str) -> None:
    """Every message goes through the identity codec, multi-token prediction's too."""
    layout, codecs = OVERLAPS[dimension]
    more = "--train-iters 2 --global-batch-size 16 --mtp-num-layers 1"
    flags = (OVERLAP, layout, more, "--position-embedding-type rope")
    check_same_training(train(*flags), train(*flags, codecs, "--ep-compression identity"))


@pytest.mark.thorough
class TestAllFiveKindsOfParallelism:
    """One command line, TACO and full recomputation among its flags."""

    @pytest.fixture(scope="class")
    def run(self) -> Run:
        return train(ALL_FIVE, ranks=8)

    def test_it_learns(self, run: Run) -> None:
        assert run.losses[4] < run.losses[1] - 0.2

    @pytest.mark.parametrize("dimension", ["cp", "ep"])
    def test_recomputed_forward_passes_send_again(self, run: Run, dimension: str) -> None:
        backward = messages(run, f"{dimension}.backward")
        assert backward > 0
        assert messages(run, f"{dimension}.forward") == 2 * backward

    @pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward", "pp.forward", "pp.backward"])
    def test_every_message_is_compressed(self, run: Run, traffic: str) -> None:
        assert messages(run, traffic) > 0

    @pytest.mark.parametrize("traffic", ["dp.gradient", "dp.weight"])
    def test_data_parallelism_is_compressed(self, run: Run, traffic: str) -> None:
        """An expert has one replica, and sends nothing."""
        check_compressed(run, traffic)

    def test_copies_keep_their_bits(self, run: Run) -> None:
        check_copies(run, tied=True)
