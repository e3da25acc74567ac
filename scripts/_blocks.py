"""What the benchmarks share in which settings take turns inside one run of the training loop.

The script starts itself under torchrun, once a kind of link; the ranks find in the environment which settings
take how many iterations each.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench_end_to_end import REGIMES, ROOT

WARM_UP = 2
"""Iterations of a block that are not timed."""
_VARIABLE = "BENCH_BLOCKS"
_ITERATION = re.compile(r"iteration +\d+/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")


def add_arguments(
    parser: argparse.ArgumentParser, codecs: Iterable[str], default: list[str], iterations: int
) -> None:
    """Options that all of them take."""
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=["nvlink", "ethernet"])
    parser.add_argument("--codecs", nargs="+", choices=codecs, default=default, help="settings, in turn")
    parser.add_argument(
        "--iterations", type=int, default=iterations, help=f"of a block; the first {WARM_UP} not timed"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")


def settings() -> dict | None:
    """In a rank: ``codecs``, the settings' names in turn, and ``iterations`` of each; elsewhere None."""
    text = os.environ.get(_VARIABLE)
    return json.loads(text) if text else None


def measure(
    script: str,
    ranks: int,
    flags: list[str],
    channels: tuple[str, ...],
    options: argparse.Namespace,
    **environment: str,
) -> list[dict]:
    """Run every regime; one that fails is reported and leaves no rows.

    Args:
        script: the benchmark's own file, which the ranks run.
        ranks: processes.
        flags: of the run; the number of iterations and ``options.extra`` are added.
        channels: of the ledger, whose megabytes become columns: dp.gradient -> gradient_megabytes.
        options: as parsed, with ``extra``.
        environment: more variables.

    Returns:
        A row a regime and setting: the median milliseconds of its block, megabytes that a rank sends.
    """
    rows = []
    for regime in options.regimes:
        rows += _run_regime(regime, script, ranks, flags, channels, options, environment)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{regime} done", flush=True)
    return rows


def _run_regime(regime, script, ranks, flags, channels, options, environment) -> list[dict]:
    iterations, expected = options.iterations, options.iterations * len(options.codecs)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **REGIMES[regime], **environment}
    environment[_VARIABLE] = json.dumps({"codecs": options.codecs, "iterations": iterations})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [script, *flags, "--train-iters", str(expected), *options.extra]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = output.stdout + output.stderr
    times = _ITERATION.findall(text)
    sent = re.findall(r"communication +\d+/.*", text)
    if output.returncode or len(times) < expected or len(sent) < expected:
        print(f"error: the {regime} run failed:\n{text[-3000:]}", file=sys.stderr)
        return []
    rows = []
    for block, codec in enumerate(options.codecs):
        chosen = slice(block * iterations + WARM_UP, (block + 1) * iterations)
        row = {
            "regime": regime,
            "codec": codec,
            "milliseconds": statistics.median(float(milliseconds) for milliseconds, _ in times[chosen]),
        }
        for channel in channels:
            megabytes = re.search(rf"{re.escape(channel)} \(MB\): ([\d.]+)", sent[chosen][-1])
            row[f"{channel.split('.')[1]}_megabytes"] = float(megabytes[1])
        rows.append({**row, "iterations": iterations - WARM_UP, "last_loss": float(times[chosen][-1][1])})
    return rows


def show(rows: list[dict], channels: tuple[str, ...], options: argparse.Namespace) -> None:
    """Print the table, speed-ups against the first setting of each regime; exit 1 where a regime failed."""
    names = [channel.split(".")[1] for channel in channels]
    print(f"{'regime':10} {'codec':40} {'ms':>9} {'speed-up':>9}", end="")
    print(*(f" {'MB ' + name:>12}" for name in names), f"{'loss':>8}")
    for row in rows:
        base = next(other for other in rows if other["regime"] == row["regime"])
        speed_up = base["milliseconds"] / row["milliseconds"]
        print(
            f"{row['regime']:10} {row['codec']:40} {row['milliseconds']:9.1f} {speed_up:9.3f}",
            *(f"{row[f'{name}_megabytes']:12.1f}" for name in names),
            f"{row['last_loss']:8.4f}",
        )
    if {row["regime"] for row in rows} != set(options.regimes):
        sys.exit(1)
