"""All three dimensions compressed at once: TP 2 x PP 2 x DP 2 on eight processes."""

import json
from pathlib import Path

from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.test_matrix import check_replicas

FLAGS = """--hidden-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16
    --use-distributed-optimizer --compression taco-paper --compression-min-mb 0"""
SIX = ("tp.forward", "tp.backward", "dp.gradient", "dp.weight", "pp.forward", "pp.backward")


def test_every_channel_is_compressed(tmp_path: Path) -> None:
    """In training, and in the report's page for all three."""
    report = tmp_path / "report"
    flags = tiny_flags(*FLAGS.split(), "--compression-report", str(report))
    whole = pretrain(*flags, ranks=8)
    assert sorted(whole.losses) == [1, 2, 3, 4] and whole.losses[4] < whole.losses[1]
    check_channels(whole)
    check_replicas(whole, tied=True)
    written = json.loads((report / "report.json").read_text())
    errors = {(row["site"], row["traffic"]): row["relative_error"] for row in written["errors"]}
    assert 0.03 < errors["pipeline stage 0", "pp.forward"] < 0.15
    assert 0.005 < errors["pipeline stage 1", "pp.backward"] < 0.05
    summary = written["summary"]
    assert list(summary["dimensions"]) == ["tensor parallel", "data parallel", "pipeline parallel", "all"]
    ratios = {name: row["ratio"] for name, row in summary["dimensions"].items()}
    tied_embeddings = summary["bytes_per_iteration"]["pp.other"]  # exact, and much of so small a model
    assert tied_embeddings["sent"] == tied_embeddings["uncompressed"] == 4 * 256 * 64 / 2
    assert min(ratios["tensor parallel"], ratios["data parallel"], ratios["all"]) > 1.5, ratios
    page = (report / "report.md").read_text()
    assert all(f"| {channel} |" in page for channel in SIX)


def check_channels(run: Run) -> None:
    """Each of the six channels sends payloads, and fewer bytes than without compression."""
    sent, plain = dict.fromkeys(SIX, 0), dict.fromkeys(SIX, 0)
    for rank in run.ranks:
        for row in rank.ledger:
            if row["traffic"] in SIX and row["kind"] == "compressed":
                sent[row["traffic"]] += row["sent_bytes"]
                plain[row["traffic"]] += row["plain_bytes"]
    assert all(0 < sent[channel] < plain[channel] for channel in SIX), (sent, plain)
