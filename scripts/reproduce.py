#!/usr/bin/env python3
"""Reproduce the measurements of docs/results/ on a machine with GPUs, stage by stage.

    python3 scripts/reproduce.py --list
    python3 scripts/reproduce.py --only codecs collectives end-to-end --output results
    python3 scripts/reproduce.py --only taco tah-quant sdp4bit tagc caat-net --gpus 1
    python3 scripts/reproduce.py --only taco_1.3b tagc_times

Every command runs under a time limit, writes what it prints and its JSON into --output, and never stops the
others. The table at the end says what ran, how long, and how it ended; behind a paper's run, what the paper
has. Runs of losses go on one GPU too, where their ranks are simulated or share it; those that a time limit
leaves out are made when the command is started again. The exit status is 1 if a command failed or left some.
The papers' own sizes and settings: examples/paper. What came out: docs/results/paper.md.
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

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import _cli
from scripts._commands import COMMANDS, Command

ROOT = Path(__file__).resolve().parents[1]
MOST_RANKS = 4
"""Of a command that takes as many as there are GPUs, a power of two: heads of every shape divide by it."""
STAGES = tuple(dict.fromkeys(command.stage for command in COMMANDS))
CHOICES = tuple(dict.fromkeys((*STAGES, *(command.name for command in COMMANDS))))
"""A name that is both means the stage."""


def filled(command: Command, output: Path, gpus: int) -> str:
    """The command's line with its numbers of ranks and its folder."""
    gpus = min(MOST_RANKS, max(gpus, command.gpus))
    gpus = 1 << gpus.bit_length() - 1
    return command.line.format(output=output, gpus=gpus, ranks=max(2, gpus))


def run(command: Command, output: Path, gpus: int) -> tuple[float, str]:
    """Run a command to its end or its limit, print the tables and the end of its log; seconds and how it
    ended."""
    log = output / f"{command.name}.log"
    words = shlex.split(filled(command, output, gpus))
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
    text = log.read_text(errors="replace")
    if ended == "ok" and (left := _cli.LEFT.search(text)):
        ended = left[0]
    lines = text.splitlines()
    end = len(lines) - 25
    tail = [line for place, line in enumerate(lines) if line.startswith("|") or place >= end]
    paper = [f"paper: {command.paper}"] if command.paper else []
    print(f"-- {command.name}: {ended}, {seconds:.0f} s, {log}", *tail, *paper, sep="\n", flush=True)
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
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CHOICES,
        default=STAGES,
        metavar="NAME",
        help="stages, or single commands, of those that --list prints (default: all)",
    )
    parser.add_argument("--gpus", type=int, help="to use (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "reproduce", help="logs and JSON")
    options = parser.parse_args(argv)
    stages, names = set(options.only) & set(STAGES), set(options.only) - set(STAGES)
    chosen = [command for command in COMMANDS if command.stage in stages or command.name in names]
    if options.list:
        for command in chosen:
            line = filled(command, options.output, options.gpus or MOST_RANKS)
            print(f"{command.stage}, {command.name} (GPUs: {command.gpus} or more): python3 {line}")
            if command.paper:
                print(f"    paper: {command.paper}")
        return
    try:
        import torch
    except ModuleNotFoundError:
        raise _cli.UsageError(f"{sys.executable} has no torch: start with .venv/bin/python") from None

    gpus = options.gpus or torch.cuda.device_count()
    if not 1 <= gpus <= torch.cuda.device_count():
        raise _cli.UsageError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        (command, *run(command, output, gpus))
        if command.gpus <= gpus
        else (command, 0.0, f"not run: needs {command.gpus} GPUs")
        for command in chosen
    ]
    print(
        f"\n{gpus} x {torch.cuda.get_device_name(0)}",
        "| stage | command | min | ended | paper |\n|---|---|---|---|---|",
        sep="\n",
    )
    for command, seconds, ended in rows:
        print(f"| {command.stage} | {command.name} | {seconds / 60:.1f} | {ended} | {command.paper} |")
    if any(ended != "ok" and command.gpus <= gpus for command, _, ended in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(_cli.run(main))
