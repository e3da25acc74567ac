"""pretrain_gpt.py with and without --taco: golden losses, resuming, what the report counts."""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.launch import pretrain
from tests.distributed.server import MOCK_DOCUMENTS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "losses.json"
GOLDEN_ITERATIONS = 12
HIDDEN, SEQUENCE, MICRO_BATCH = 64, 32, 2
GPT = [
    *("--hidden-size", str(HIDDEN), "--seq-length", str(SEQUENCE), "--micro-batch-size", str(MICRO_BATCH)),
    *("--global-batch-size", "4", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--use-cpu-initialization", "--seed", "5"),
]
TP_2 = [*GPT, "--tensor-model-parallel-size", "2"]
EVERY_MESSAGE = ["--taco", "--compression-min-mb", "0"]


def read_report(run) -> dict:
    """The report.json of a run with ``exact=True``."""
    return json.loads((run.report / "report.json").read_text())


def golden_run(flags: list[str]) -> dict[int, float]:
    """Losses of the run on record, at tensor-parallel 2."""
    options = {"train_iters": str(GOLDEN_ITERATIONS), "exact": True, "env": {MOCK_DOCUMENTS: "100000"}}
    return pretrain(*TP_2, *flags, **options).exact_losses()


@pytest.mark.parametrize(
    ("name", "flags", "tolerance"),
    [
        # fp32, so that only the order of BLAS's sums differs from machine to machine.
        ("uncompressed", [], 1e-6),
        # A last-digit difference can move a value to the next grid point.
        ("taco", EVERY_MESSAGE, 2e-4),
    ],
)
def test_golden_losses(name: str, flags: list[str], tolerance: float) -> None:
    """The losses are those on record, which are stored with every digit."""
    golden = {int(iteration): loss for iteration, loss in json.loads(GOLDEN.read_text())[name].items()}
    assert golden_run(flags) == pytest.approx(golden, rel=tolerance)
    assert golden[GOLDEN_ITERATIONS] < golden[1] - 0.5, "the golden run has learnt something"


def test_resume_with_two_codecs_is_exact(tmp_path) -> None:
    """Losses after a resume equal the uninterrupted run's to the last digit."""
    saved, codecs = (
        tmp_path / "checkpoints",
        ("--tp-compression", "int5/int6", "--compression-min-mb", "0"),
    )
    flags = [*TP_2, *codecs, "--bf16", "--train-iters", "6", "--save", str(saved), "--save-interval", "3"]
    whole = pretrain(*flags, exact=True).exact_losses()
    shutil.rmtree(saved / "iter_0000006")
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = pretrain(*flags, "--load", str(saved), exact=True).exact_losses()
    assert resumed == {iteration: whole[iteration] for iteration in (4, 5, 6)}


def test_report_counts_data_and_pipeline_parallel_bytes() -> None:
    """TP 1, PP 2, DP 2: gradients and weights of a stage over 2 ranks, activations between the stages."""
    flags = [*GPT, "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--bf16"]
    report = read_report(pretrain(*flags, processes=4, train_iters="3", exact=True))
    sent = {name: pair["sent"] for name, pair in report["summary"]["bytes_per_iteration"].items()}
    # Mean over ranks. A stage has one layer; the tied embedding is on both, positions and final norm on one.
    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    parameters = layer + 128 * HIDDEN + (SEQUENCE + 2) * HIDDEN / 2
    assert sent["dp.gradient"] == pytest.approx(4 * parameters / 2, rel=0.02), "fp32 reduce-scatter, (W-1)/W"
    assert sent["dp.weight"] == pytest.approx(2 * parameters / 2, rel=0.02), "bf16 all-gather, (W-1)/W"
    micro_batch = MICRO_BATCH * SEQUENCE * HIDDEN * 2
    assert sent["pp.forward"] == sent["pp.backward"] == micro_batch / 2, "one each, half of the ranks send"
    assert sent["pp.other"] == 4 * 128 * HIDDEN, "tied embeddings' fp32 gradients, 2 (W-1)/W of the buffer"
    assert "tp.forward" not in sent


def test_evaluation_is_counted_apart() -> None:
    """The ledger has training and evaluation; the validation loss and the plots are in the report."""
    flags = [*TP_2, *EVERY_MESSAGE, "--eval-iters", "1", "--split", "90,5,5"]
    run = pretrain(*flags, train_iters="2", exact=True)
    report = read_report(run)
    rows = report["ledger_by_rank"][0]
    plain = {
        phase: sum(r["plain_bytes"] for r in rows if r["phase"] == phase and r["traffic"] == "tp.forward")
        for phase in ("train", "eval")
    }
    # One batch of two micro-batches each of the validation and the test set; five sites, all-reduce of fp32.
    assert plain["eval"] == 2 * 2 * 5 * (MICRO_BATCH * SEQUENCE * HIDDEN * 4)
    assert plain["train"] > plain["eval"] / 2
    assert not [row for row in rows if row["phase"] == "eval" and row["traffic"] == "tp.backward"]
    assert report["summary"]["validation_loss"] > 0
    assert (run.report / "loss.png").exists()
