"""Whole runs of pretrain_gpt.py on the devices there are."""

import json
from pathlib import Path

from tests.distributed.launch import tiny_flags, torchrun


def train(*flags: str, processes: int, report: Path) -> dict:
    """One tiny run; its report."""
    words = tiny_flags(*flags, "--compression-report", str(report))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes)))}
    devices["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    run = torchrun("pretrain_gpt.py", *words, "--share-gpus", processes=processes, **devices)
    finished = run.finish(timeout=240)
    assert finished.returncode == 0, finished.output[-6000:]
    return json.loads((report / "report.json").read_text())


def losses(report: dict) -> dict[int, float]:
    """By iteration."""
    return {row["iteration"]: row["losses"]["lm loss"] for row in report["history"] if "split" not in row}
