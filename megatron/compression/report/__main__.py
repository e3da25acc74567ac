"""Compares the reports of two runs: ``python -m megatron.compression.report BASELINE RUN``."""

import argparse
import sys
from pathlib import Path

from megatron.compression.report.history import REPORT_FILE, load_report
from megatron.compression.report.render import LINE, comparison_markdown, draw


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison, and write it where asked; returns the exit status."""
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
                f"error: {directory} holds no readable {REPORT_FILE}; name the --compression-report folder "
                "of a finished run",
                file=sys.stderr,
            )
            return 2
    names = str(options.baseline), str(options.run)
    lines = comparison_markdown(*reports, names)
    print("\n".join(lines))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        wide = {"color": "0.75", "linewidth": 5, "markersize": 8}  # equal curves are both seen
        labels = [f", {name}" for name in names]
        curves = list(zip(labels, (wide, LINE), reports, strict=True))
        pictures, why_none = draw(curves, options.output)
        if why_none:
            print(why_none)
        title = [f"# {options.run} against {options.baseline}", ""]
        lines = [*title, *lines, "", *(f"![{name}]({name})" for name in pictures), ""]
        (options.output / "comparison.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
