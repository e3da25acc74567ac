"""Compares the reports of two runs: ``python -m megatron.compression.report BASELINE RUN``."""

import argparse
import sys
from pathlib import Path

from megatron.compression.report.history import REPORT_FILE, load_report
from megatron.compression.report.render import LINE, comparison_markdown, draw


def main(arguments: list[str] | None = None) -> int:
    """Print a comparison of two reports, and write it where asked.

    Args:
        arguments: the command line; None: this program's.

    Returns:
        The exit status: 2 where a folder holds no report.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron.compression.report", description=__doc__
    )
    parser.add_argument("baseline", type=Path, help="report folder of the run to compare with")
    parser.add_argument("run", type=Path, help="report folder of the run in question")
    parser.add_argument(
        "--output", type=Path, help="folder to write comparison.md, loss.png and time.png to"
    )
    options = parser.parse_args(arguments)
    reports = []
    for directory in (options.baseline, options.run):
        try:
            reports.append(load_report(directory))
        except (OSError, ValueError):
            print(
                f"error: {directory} holds no readable {REPORT_FILE}; name the "
                "--compression-report folder of a finished run",
                file=sys.stderr,
            )
            return 2
    baseline, run = reports
    names = (str(options.baseline), str(options.run))
    lines = comparison_markdown(baseline, run, names)
    print("\n".join(lines))
    if options.output is not None:
        _write(baseline, run, names, lines, options.output)
    return 0


def _write(
    baseline: dict, run: dict, names: tuple[str, str], lines: list[str], directory: Path
) -> None:
    """Write comparison.md with the comparison's lines, and its pictures, into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    # Equal curves are both seen: the baseline's is wide and pale, below the other one.
    wide = {"color": "0.75", "linewidth": 5, "markersize": 8}
    curves = [(f", {names[0]}", wide, baseline), (f", {names[1]}", LINE, run)]
    pictures, reason = draw(curves, directory)
    if reason is not None:
        print(reason)
    title = [f"# {names[1]} against {names[0]}", ""]
    images = [f"![{name}]({name})" for name in pictures]
    text = "\n".join([*title, *lines, "", *images, ""])
    (directory / "comparison.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
