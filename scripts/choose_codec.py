#!/usr/bin/env python
"""Which format and group size suit a model: measured on the tensors of one's own run.

    python scripts/choose_codec.py --processes 4 --iterations 3 -- <the flags of pretrain_gpt.py>

starts that run (add --load to measure a trained model), lets it compress as its flags say (--taco
--taco-min-message-mb 0 if they say nothing) and, in the last of --iterations iterations, encodes a sample of
what every tensor-parallel collective sends in every format and group size. Reported: the relative L2 error of
one encoding over all sites, and of the worst site, by direction. The error of rounding to nearest and of
subtractive dither is about the same; stochastic rounding has about 1.4 times as much (docs/accuracy.md says
what the roundings do to the loss).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SURVEY = "TACO_CODEC_SURVEY"


def worker() -> None:
    """One rank of the run: pretrain_gpt.py's loop with a survey in the place of the error guard."""
    sys.path.insert(0, str(ROOT))
    from megatron.compression import preflight
    from megatron.compression.errors import one_line_errors

    preflight.prepare()
    from megatron.compression import entrypoint
    from megatron.compression.arguments import add_compression_arguments
    from megatron.compression.tensor_parallel.survey import CodecSurvey

    order = json.loads(os.environ[SURVEY])
    survey = CodecSurvey(order["iteration"], order["scales"])

    class SurveyingForwardStep(entrypoint.ForwardStep):
        def __init__(self, runtime) -> None:
            super().__init__(runtime)
            runtime.guard = survey

    entrypoint.ForwardStep = SurveyingForwardStep
    try:
        with one_line_errors():
            entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))
    finally:  # --exit-interval leaves by SystemExit
        path = Path(order["folder"], f"rank{os.environ['RANK']}.json")
        path.write_text(json.dumps(survey.squares()))


def merge(parts: Sequence[list[dict]]) -> list[dict]:
    """The ranks' rows, those of the same site, channel, format and group size added up."""
    found: dict[tuple, dict] = {}
    for row in (row for part in parts for row in part):
        key = row["site"], row["channel"], row["format"], row["group_size"]
        if key in found:
            found[key] = {
                **row,
                "error": found[key]["error"] + row["error"],
                "signal": found[key]["signal"] + row["signal"],
            }
        else:
            found[key] = row
    return list(found.values())


def summary(rows: list[dict]) -> list[dict]:
    """For each channel, format and group size: bits a value, the error over all sites, and the worst site's.

    Every site counts alike in ``error``: the root of the mean of their squared relative errors.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["signal"] > 0:
            groups.setdefault((row["channel"], row["format"], row["group_size"]), []).append(row)
    table = []
    for (channel, number_format, group_size), sites in groups.items():
        relative = {row["site"]: (row["error"] / row["signal"]) ** 0.5 for row in sites}
        worst = max(relative, key=relative.get)
        mean = (sum(value**2 for value in relative.values()) / len(relative)) ** 0.5
        table.append(
            {
                "channel": channel,
                "format": number_format,
                "group_size": group_size,
                "bits": sites[0]["bits"],
                "error": mean,
                "worst": relative[worst],
                "worst_site": worst,
            }
        )
    return table


def best(table: list[dict]) -> dict[tuple[str, str], int]:
    """The group size with the least error times wire size, by channel and format.

    A smaller group has less error and more scales: an integer's error halves for one bit more, so error *
    2^bits compares what differs in both.
    """
    chosen: dict[tuple[str, str], dict] = {}
    for row in table:
        key = row["channel"], row["format"]
        cost = row["error"] * 2 ** row["bits"]
        if key not in chosen or cost < chosen[key]["error"] * 2 ** chosen[key]["bits"]:
            chosen[key] = row
    return {key: row["group_size"] for key, row in chosen.items()}


def report(table: list[dict]) -> str:
    """The table as text; the group size to prefer is marked."""
    marked = best(table)
    lines = [
        f"{'channel':12} {'format':10} {'group':>5} {'bits':>7} {'error %':>9} {'worst site %':>13}  site"
    ]
    order = {number_format: i for i, number_format in enumerate(dict.fromkeys(r["format"] for r in table))}
    for row in sorted(table, key=lambda r: (r["channel"], order[r["format"]], r["group_size"])):
        mark = " <" if marked[row["channel"], row["format"]] == row["group_size"] else ""
        lines.append(
            f"{row['channel']:12} {row['format']:10} {row['group_size']:5d} {row['bits']:7.3f} "
            f"{100 * row['error']:9.3f} {100 * row['worst']:13.3f}  {row['worst_site']}{mark}"
        )
    return "\n".join([*lines, "< least error for the bytes, of this format"])


def main(argv: Sequence[str] | None = None) -> int:
    """Start the run and print what its ranks found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="ranks on this host")
    parser.add_argument("--iterations", type=int, default=3, help="measure in the last of so many iterations")
    parser.add_argument(
        "--scales",
        choices=("signed", "single", "dual"),
        default="signed",
        help="as --taco-scales; with signed, fp8 is measured with single (default: signed)",
    )
    parser.add_argument("--json", type=Path, help="write all rows, by site, here")
    parser.add_argument("flags", nargs="+", metavar="-- FLAGS", help="of pretrain_gpt.py")
    args = parser.parse_args(argv)
    if args.iterations < 1:
        parser.error(f"--iterations {args.iterations}: give a positive number")
    flags = [*args.flags, "--exit-interval", str(args.iterations)]
    if not {"--taco", "--tp-compression"} & set(flags):
        flags += ["--taco", "--taco-min-message-mb", "0"]
    with tempfile.TemporaryDirectory() as folder:
        order = {"iteration": args.iterations - 1, "scales": args.scales, "folder": folder}
        environment = dict(os.environ, **{SURVEY: json.dumps(order)})
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        environment.setdefault("OMP_NUM_THREADS", "1")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(args.processes), __file__, *flags]
        status = subprocess.run(launch, env=environment, cwd=ROOT).returncode
        parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    rows = merge(parts)
    if not rows:
        print(
            "error: nothing was measured; the run must reach --iterations and send tensor-parallel traffic "
            "(--tensor-model-parallel-size of at least 2)",
            file=sys.stderr,
        )
        return status or 1
    if args.json:
        args.json.write_text(json.dumps(rows) + "\n")
    print(report(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(worker() if SURVEY in os.environ else main())
