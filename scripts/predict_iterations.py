"""The cost model against measured iterations: each point that it covers, median and worst error, a plot.

    python -m scripts.predict_iterations                            # the tables of docs/results
    python scripts/bench_end_to_end.py --tensor-parallel 2 --json tensor.json
    python -m scripts.predict_iterations --calibration here.json --points tensor.json --plot here.png

Points are what bench_end_to_end.py writes: Megatron's flags and ours, the regime, and the iteration's time.
Those marked "calibration" are shown but not counted. The exit status is 1 where an error passes its limit.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.compression.advise import Cluster, Constants, Prediction, predict
from megatron.compression.advise.plots import check_file
from megatron.compression.advise.settings import config_of
from megatron.compression.advise.shapes import layout_of, model_of, parse_megatron
from megatron.compression.errors import InputError, require_folder

TABLES = Path(__file__).resolve().parents[1] / "docs" / "results" / "iteration_points.json"
_POINT = ("regime", "ranks", "codec", "communicators", "flags", "milliseconds")


def read(paths: Sequence[Path]) -> list[dict]:
    """The points of files.

    Raises: InputError: a file holds something else, or none of them a point that counts.
    """
    points = []
    for path in paths:
        found = json.loads(path.read_text())
        for point in found if isinstance(found, list) else [found]:
            missing = [name for name in _POINT if not isinstance(point, dict) or name not in point]
            if missing:
                raise InputError(
                    f"--points {path}: a point lacks {', '.join(missing)}; give files of bench_end_to_end.py"
                )
            if not isinstance(point["milliseconds"], int | float) or not 0 < point["milliseconds"] < math.inf:
                raise InputError(f"--points {path}: milliseconds {point['milliseconds']!r} must be above 0")
            if not point.get("auto"):  # what the run chose, its flags do not say
                points.append(point)
    if all(point.get("calibration") for point in points):
        raise InputError(f"--points {paths[0]}: there is nothing that is counted; give measured points")
    return points


def predicted(point: dict, constants: Constants) -> Prediction:
    """Of one measured point, on one node whose link is the point's regime.

    Raises: InputError: a flag is not modelled.
    """
    ranks, link = point["ranks"], constants.links[point["regime"]]
    args = parse_megatron(shlex.split(point["flags"]))
    layout = replace(layout_of(args, ranks), communicators=point["communicators"])
    cluster = Cluster(gpus=ranks, gpus_per_node=ranks, intra=link, inter=link, constants=constants)
    return predict(model_of(args), layout, cluster, config_of(args, layout))


def compared(points: list[dict], constants: Constants) -> list[dict]:
    """The points with ``predicted`` milliseconds, ``error`` (predicted over measured, less 1), ``phases``.

    What has flags that are not modelled is left out, and said.

    Raises: InputError: the calibration has not measured a point's link.
    """
    rows = []
    for point in points:
        if point["regime"] not in constants.links:
            raise InputError(
                f"the calibration has no link {point['regime']!r}; it has {', '.join(constants.links)}"
            )
        try:
            result = predicted(point, constants)
        except InputError as error:
            if "not modelled" not in str(error):
                raise
            print(f"not compared: {point['regime']} {point['codec']}: {error}", file=sys.stderr)
            continue
        error = result.milliseconds / point["milliseconds"] - 1
        rows.append(point | {"predicted": result.milliseconds, "error": error, "phases": result.phases})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Predicted against measured, both logarithmic, a colour for each regime."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    ends = [f(row["milliseconds"] for row in rows) * by for f, by in ((min, 0.8), (max, 1.25))]
    axes.plot(ends, ends, color="0.6", linewidth=1)
    for by in (0.8, 1.2):
        axes.plot(ends, [end * by for end in ends], ":", color="0.6", linewidth=1)
    for place, regime in enumerate(dict.fromkeys(row["regime"] for row in rows)):
        for codec, marker in ((False, "o"), (True, "x")):
            shown = [r for r in rows if r["regime"] == regime and (r["codec"] != "none") == codec]
            label = f"{regime}, {'compressed' if codec else 'uncompressed'}"
            pairs = [(r["milliseconds"], r["predicted"]) for r in shown]
            if pairs:
                axes.plot(*zip(*pairs, strict=True), marker, color=f"C{place}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms an iteration", ylabel="predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", type=Path, help="JSON of --measure; by default docs/results' H200")
    parser.add_argument("--points", type=Path, nargs="+", default=[TABLES], help="of bench_end_to_end.py")
    parser.add_argument("--plot", type=Path, help="write the scatter plot here")
    parser.add_argument("--json", type=Path, help="write the points with predictions by phase here")
    parser.add_argument("--median-limit", type=float, default=8.0, help="percent")
    parser.add_argument("--worst-limit", type=float, default=20.0, help="percent")
    options = parser.parse_args(argv)
    try:
        if options.plot:
            check_file(options.plot)
        if options.json:
            require_folder(options.json, "--json")
        points = read(options.points)
        rows = compared(points, Constants.load(options.calibration))
        if all(row.get("calibration") for row in rows):
            raise InputError("no point that counts can be predicted")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("| regime | ranks | codec | measured ms | predicted ms | error |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            row["regime"],
            row["ranks"],
            row["codec"],
            f"{row['milliseconds']:.0f}",
            f"{row['predicted']:.0f}",
        )
        print(f"| {' | '.join(map(str, cells))} | {100 * row['error']:+.1f} % |")
    errors = [100 * abs(row["error"]) for row in rows if not row.get("calibration")]
    median, worst = statistics.median(errors), max(errors)
    print(f"\n{len(errors)} points: median error {median:.1f} %, worst {worst:.1f} %")
    if len(rows) < len(points):
        print(f"Not compared: {len(points) - len(rows)} with flags that are not modelled.")
    if len(errors) < len(rows):
        print(f"Not among them: {len(rows) - len(errors)} that constants were taken from.")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        draw(rows, options.plot)
    return int(median > options.median_limit or worst > options.worst_limit)


if __name__ == "__main__":
    sys.exit(main())
