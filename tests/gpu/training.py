"""Whole runs of pretrain_gpt.py on the devices there are."""

import json
import os
from pathlib import Path

from tests.distributed.launch import UNKNOWN, tiny_flags, torchrun


def train(*flags: str, processes: int, report: Path, **environment: str) -> dict:
    """One tiny run, of which the ledger knows every byte; its report."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes))))
    devices = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}
    words = tiny_flags(*flags, "--compression-report", str(report))
    run = torchrun(
        "tests/shared_gpus.py", "pretrain_gpt.py", *words, processes=processes, **devices
    )
    finished = run.finish(timeout=240)
    assert finished.returncode == 0, finished.output[-6000:]
    assert UNKNOWN not in finished.output
    return json.loads((report / "report.json").read_text())


def losses(report: dict) -> dict[int, float]:
    """By iteration."""
    return {
        row["iteration"]: row["losses"]["lm loss"]
        for row in report["history"]
        if "split" not in row
    }
