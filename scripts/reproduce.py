#!/usr/bin/env python3
"""Reproduce the measurements of docs/ on a machine with GPUs: tests, benchmarks, losses, stage by stage.

    python3 scripts/reproduce.py --list
    python3 scripts/reproduce.py --only codecs collectives end-to-end --output results

Every stage runs a few commands of the project, each under a time limit, writes what they print and their JSON
into --output, and never stops the others. The table at the end says what ran, how long, and how it ended. The
exit status is 1 if a command failed. It starts processes with the Python that runs it and works without
installation where torch, triton and megatron-core can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import _cli

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {gpus}"


@dataclass(frozen=True)
class Command:
    """One process."""

    name: str
    line: str
    """What follows ``python``. ``{output}`` is the folder for results, ``{gpus}`` the number of ranks."""
    minutes: float
    """Killed after that long."""


@dataclass(frozen=True)
class Stage:
    """Commands that measure one thing together."""

    what: str
    gpus: int
    """GPUs needed; a stage that needs more than there are is reported as not run."""
    commands: tuple[Command, ...]
    together: bool = False
    """Start all at once: compilation takes most of the time, not the device."""


def _tests(*names: str) -> tuple[Command, ...]:
    line = "-m pytest -q -p no:cacheprovider tests/gpu/test_"
    return tuple(Command(name, f"{line}{name}.py", 9.0) for name in names)


def _kernels(name: str, operations: str, flags: str = "") -> Command:
    return Command(name, f"-m taco_kernels.benchmarks {operations} {flags}--json {{output}}/{name}.json", 4.0)


STAGES = {
    "kernel-tests": Stage(
        "the Triton kernels against the references",
        1,
        _tests(
            "codec_kernels",
            "error_feedback_kernels",
            "fast_launch",
            "fused_adam",
            "pipeline_codecs",
            "sdp4bit_kernels",
            "homomorphic_kernels",
            "packed_kernels",
            "tah_quant_kernels",
        ),
        together=True,
    ),
    "rank-tests": Stage(
        "the distributed tests over NCCL and symmetric memory",
        4,
        _tests(
            "symmetric_memory",
            "tensor_parallel_nccl",
            "caat_net_nccl",
            "sdp4bit_nccl",
            "tagc_nccl",
            "pipeline_nccl",
        ),
    ),
    "codecs": Stage(
        "kernels against a device copy (docs/benchmarks.md)",
        1,
        (
            _kernels("codec", "codec"),
            _kernels(
                "rounding", "codec", "--mib 64 256 --scales single --roundings nearest stochastic dither "
            ),
            _kernels("sdp4bit", "sdp4bit"),
            _kernels("tah_quant", "tah-quant"),
            _kernels("homomorphic", "homomorphic"),
        ),
    ),
    "collectives": Stage(
        "all-reduces against NCCL and others (docs/benchmarks.md)",
        2,
        (
            Command(
                "collectives",
                f"{TORCHRUN} -m taco_kernels.benchmarks collectives --json {{output}}/collectives.json",
                5.0,
            ),
        ),
    ),
    "end-to-end": Stage(
        "iteration times under tensor parallelism on three links (docs/end_to_end.md)",
        4,
        (
            Command(
                "end_to_end",
                "scripts/bench_end_to_end.py --profile --json {output}/end_to_end.json",
                9.0,
            ),
        ),
    ),
    "pipeline": Stage(
        "TAH-Quant: iteration times and losses (docs/pipeline.md)",
        4,
        (
            Command("pipeline", "scripts/bench_pipeline.py --json {output}/pipeline.json", 5.0),
            Command(
                "pipeline_losses",
                "scripts/pipeline_convergence.py --output {output}/pipeline_losses --time-limit 450",
                8.0,
            ),
        ),
    ),
    "data-parallel": Stage(
        "SDP4Bit and TAGC: iteration times, losses, other hooks (docs/data_parallel.md)",
        4,
        (
            Command(
                "data_parallel", "scripts/bench_data_parallel.py --json {output}/data_parallel.json", 6.0
            ),
            Command(
                "data_parallel_losses",
                "scripts/data_parallel_convergence.py --output {output}/data_parallel_losses "
                "--time-limit 450",
                8.0,
            ),
            Command("gradient_hooks", f"{TORCHRUN} scripts/compare_gradient_hooks.py", 3.0),
        ),
    ),
    "caat-net": Stage(
        "losses of partial synchronisation (docs/caat_net.md)",
        4,
        (
            Command(
                "caat_net", "scripts/caat_net_losses.py --output {output}/caat_net --time-limit 690", 12.0
            ),
        ),
    ),
    "accuracy": Stage(
        "what tensor-parallel codecs cost in loss (docs/accuracy.md)",
        1,
        (
            Command(
                "accuracy",
                "-m scripts.accuracy.run --work-dir {output}/accuracy --plan campaign --minutes 30"
                " --out {output}",
                40.0,
            ),
            Command(
                "errors",
                "-m scripts.accuracy.errors --work-dir {output}/accuracy --out {output}/errors.jsonl",
                4.0,
            ),
        ),
    ),
}


class Running:
    """A started command with its log."""

    def __init__(self, command: Command, output: Path, gpus: int) -> None:
        self.command = command
        self.log = output / f"{command.name}.log"
        arguments = [word.format(output=output, gpus=gpus) for word in shlex.split(command.line)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> tuple[float, str]:
        """Wait; seconds and how it ended."""
        left = self.started + 60 * self.command.minutes - time.monotonic()
        try:
            status = self.process.wait(max(0.0, left))
            ended = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            ended = f"killed after {self.command.minutes:g} min"
        finally:
            self.stop()
        return time.monotonic() - self.started, ended

    def stop(self) -> None:
        """End the process and what it started, as the launcher of ranks does when it is told to."""
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                break


def run_stage(stage: Stage, output: Path, gpus: int) -> list[tuple[str, float, str]]:
    """Run a stage's commands; (name, seconds, how it ended) of each, printed as they end."""
    rows, running = [], []
    try:
        for command in stage.commands:
            running.append(Running(command, output, gpus))
            if not stage.together:
                rows.append(_report(running[-1]))
        if stage.together:
            rows = [_report(one) for one in running]
    finally:
        for one in running:
            one.stop()
    return rows


def _report(one: Running) -> tuple[str, float, str]:
    row = (one.command.name, *one.finish())
    tail = one.log.read_text(errors="replace").splitlines()[-25:]
    print(f"-- {row[0]}: {row[2]}, {row[1]:.0f} s, {one.log}", *tail, sep="\n", flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring.

    Raises:
        UsageError: for what a user can put right.
        SystemExit: 1 when a command failed.
    """
    parser = _cli.Parser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print stages and commands, run nothing")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--gpus", type=int, help="ranks of the stages with several (default: all, at most 4)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "reproduce", help="logs and JSON")
    options = parser.parse_args(argv)
    if options.list:
        print_stages(options)
        return
    import torch

    gpus = options.gpus or min(4, torch.cuda.device_count())
    if not 1 <= gpus <= torch.cuda.device_count():
        raise _cli.UsageError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()} CUDA devices")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    table: list[tuple[str, str, float, str]] = []
    for name in options.only:
        stage = STAGES[name]
        if stage.gpus > gpus:
            table.append((name, "", 0.0, f"not run: needs {stage.gpus} GPUs"))
            continue
        print(f"== {name}: {stage.what}", flush=True)
        table += [(name, *row) for row in run_stage(stage, output, gpus)]
    print(
        f"\n| stage | command | min | ended |\n|---|---|---|---|  ({gpus} x {torch.cuda.get_device_name(0)})"
    )
    for name, command, seconds, ended in table:
        print(f"| {name} | {command} | {seconds / 60:.1f} | {ended} |")
    if any(ended != "ok" for _, command, _, ended in table if command):
        raise SystemExit(1)


def print_stages(options: argparse.Namespace) -> None:
    """The chosen stages, with what can be pasted into a shell."""
    for name in options.only:
        stage = STAGES[name]
        print(f"{name} ({stage.gpus} GPU{'s' * (stage.gpus > 1)}): {stage.what}")
        for command in stage.commands:
            print(f"    python3 {command.line.format(output=options.output, gpus=options.gpus or 4)}")


if __name__ == "__main__":
    raise SystemExit(_cli.run(main))
