#!/usr/bin/env python3
"""Reproduce the measurements of docs/results/ on a machine with GPUs, stage by stage.

    python3 scripts/reproduce.py --list
    python3 scripts/reproduce.py --only codecs collectives end-to-end --output results

Every command runs under a time limit, writes what it prints and its JSON into --output, and never stops the
others. The table at the end says what ran, how long, and how it ended. The exit status is 1 if a command
failed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import _cli

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {gpus}"


class Command(NamedTuple):
    """One process."""

    stage: str
    gpus: int
    """Needed; with fewer it is reported as not run."""
    minutes: float
    """Killed after that long."""
    name: str
    line: str
    """What follows ``python``. ``{output}`` is the folder for results, ``{gpus}`` the number of ranks."""


COMMANDS = tuple(
    Command(*row)
    for row in (
        ("tests", 2, 25, "gpu_tests", "-m pytest -q -p no:cacheprovider tests/gpu"),
        *(
            ("codecs", 1, 4, name, f"-m taco_kernels.benchmarks {name} --json {{output}}/{name}.json")
            for name in ("codec", "sdp4bit", "tah-quant", "bitmap-sparse", "count-sketch")
        ),
        (
            *("collectives", 2, 5, "collectives"),
            f"{TORCHRUN} -m taco_kernels.benchmarks collectives --json {{output}}/collectives.json",
        ),
        (
            *("end-to-end", 2, 10, "end_to_end"),
            "scripts/bench_end_to_end.py --tensor-parallel {gpus} --json {output}/end_to_end.json",
        ),
        (
            *("end-to-end", 2, 6, "end_to_end_tcp"),
            "scripts/bench_end_to_end.py --tensor-parallel {gpus} --regimes ethernet --communicators 2"
            " --json {output}/end_to_end_tcp.json",
        ),
        (
            *("pipeline", 2, 6, "pipeline"),
            "scripts/bench_pipeline.py --pipeline-parallel {gpus} --json {output}/pipeline.json",
        ),
        (
            *("pipeline", 2, 10, "pipeline_losses"),
            "scripts/losses.py --pipeline-parallel {gpus} --codecs none auto tah-quant"
            " tah-quant:transform=none --output {output}/pipeline_losses --time-limit 540",
        ),
        (
            *("data-parallel", 2, 10, "data_parallel"),
            "scripts/bench_data_parallel.py --data-parallel {gpus} --communicators 2"
            " --json {output}/data_parallel.json",
        ),
        (
            *("data-parallel", 2, 10, "data_parallel_losses"),
            'scripts/losses.py --data-parallel {gpus} --codecs none sdp4bit "tagc --dp-error-feedback fp32"'
            ' "none --grad-reduce-in-bf16" --output {output}/data_parallel_losses --time-limit 540',
        ),
        ("data-parallel", 2, 3, "gradient_hooks", f"{TORCHRUN} scripts/compare_gradient_hooks.py"),
        (
            "cost-model",
            2,
            3,
            "calibration",
            "-m megatron.compression.advise --measure {output}/calibration.json",
        ),
        (
            *("cost-model", 2, 2, "predictions"),
            "-m scripts.predict_iterations --calibration {output}/calibration.json"
            " --plot {output}/predictions.png --points {output}/end_to_end.json"
            " {output}/end_to_end_tcp.json {output}/pipeline.json {output}/data_parallel.json",
        ),
        (
            *("caat-net", 2, 12, "caat_net"),
            "scripts/losses.py --tensor-parallel {gpus} --model 111m --iterations 600 --codecs none int6"
            ' "none --caat-net-sync-fraction 0.5" "int6 --caat-net-sync-fraction 0.5"'
            " --output {output}/caat_net --time-limit 660",
        ),
        (
            *("accuracy", 1, 40, "accuracy"),
            "-m scripts.accuracy.run --work-dir {output}/accuracy --plan campaign --minutes 30"
            " --out {output}",
        ),
    )
)
STAGES = tuple(dict.fromkeys(command.stage for command in COMMANDS))


def run(command: Command, output: Path, gpus: int) -> tuple[float, str]:
    """Run a command to its end or its limit, print the end of its log; seconds and how it ended."""
    log = output / f"{command.name}.log"
    words = [word.format(output=output, gpus=gpus) for word in shlex.split(command.line)]
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(60 * command.minutes)
        ended = "ok" if status == 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        ended = f"killed after {command.minutes:g} min"
    finally:
        stop(process)
    seconds = time.monotonic() - began
    tail = log.read_text(errors="replace").splitlines()[-25:]
    print(f"-- {command.name}: {ended}, {seconds:.0f} s, {log}", *tail, sep="\n", flush=True)
    return seconds, ended


def stop(process: subprocess.Popen) -> None:
    """End the process and what it started, as the launcher of ranks does when it is told to."""
    for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring.

    Raises:
        UsageError: for what a user can put right.
        SystemExit: 1 when a command failed.
    """
    parser = _cli.Parser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print stages and commands, run nothing")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--gpus", type=int, help="ranks of the stages with several (default: all, at most 4)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "reproduce", help="logs and JSON")
    options = parser.parse_args(argv)
    chosen = [command for command in COMMANDS if command.stage in options.only]
    if options.list:
        for command in chosen:
            line = command.line.format(output=options.output, gpus=options.gpus or 4)
            print(f"{command.stage} (from {command.gpus} GPUs): python3 {line}")
        return
    import torch

    gpus = options.gpus or min(4, torch.cuda.device_count())
    if not 1 <= gpus <= torch.cuda.device_count():
        raise _cli.UsageError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()} CUDA devices")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        (command, *run(command, output, gpus))
        if command.gpus <= gpus
        else (command, 0.0, f"not run: needs {command.gpus} GPUs")
        for command in chosen
    ]
    print(f"\n{gpus} x {torch.cuda.get_device_name(0)}\n| stage | command | min | ended |\n|---|---|---|---|")
    for command, seconds, ended in rows:
        print(f"| {command.stage} | {command.name} | {seconds / 60:.1f} | {ended} |")
    if any(ended != "ok" and command.gpus <= gpus for command, _, ended in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(_cli.run(main))
