#!/usr/bin/env python
"""Tables, plots and the small JSON of the runs that ``run`` made.

    python -m scripts.accuracy.summarise results/*.jsonl --out docs/results/accuracy
    python -m scripts.accuracy.summarise docs/results/accuracy/runs.json

The first prints the tables and writes runs.json and the plots to --out; the second prints the same tables
from what is kept.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.records import compact, load
from scripts.accuracy.tables import tables


def write_kept(records: list[dict], folder: Path) -> Path:
    """runs.json, a record a line."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in compact(records))
    path = folder / "runs.json"
    path.write_text(f'{{"records": [\n{lines}\n]}}\n')
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="results-*.jsonl, or what was kept (.json)")
    parser.add_argument("--out", type=Path, help="folder for runs.json and PNG plots")
    args = parser.parse_args(argv)
    records = load(args.results)
    print(tables(records))
    if args.out:
        from scripts.accuracy.plots import plots

        for path in (write_kept(records, args.out), *plots(records, args.out)):
            print(f"wrote {path}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
