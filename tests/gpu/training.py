"""Whole runs of pretrain_gpt.py on the devices there are."""

import json
import os
from pathlib import Path

from tests.distributed.launch import UNKNOWN, tiny_flags, torchrun


def train(*flags: str, processes: int, report: Path, **environment: str) -> dict:
    """Run a tiny training whose every byte the ledger knows.

    Args:
        flags: added to the tiny run's.
        processes: number of ranks.
        report: folder of the report.
        environment: further variables.

    Returns:
        The report.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes))))
    devices = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}
    command = tiny_flags(*flags, "--compression-report", str(report))
    run = torchrun(
        "tests/shared_gpus.py", "pretrain_gpt.py", *command, processes=processes, **devices
    )
    finished = run.finish(timeout=240)
    assert finished.returncode == 0, finished.output[-6000:]
    assert UNKNOWN not in finished.output
    return json.loads((report / "report.json").read_text())


def losses(report: dict) -> dict[int, float]:
    """Return the training losses by iteration."""
    return {
        row["iteration"]: row["losses"]["lm loss"]
        for row in report["history"]
        if "split" not in row
    }
