#!/usr/bin/env python
"""Tables and the small JSON of the runs that ``run`` made.

    python -m scripts.accuracy.summarise results/*.jsonl --out docs/results/accuracy/runs.json
    python -m scripts.accuracy.summarise docs/results/accuracy/runs.json

The first prints the tables and writes what to keep; the second prints the same tables from what is kept.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.records import compact, load
from scripts.accuracy.tables import tables


def write_kept(records: list[dict], path: Path) -> None:
    """A record a line."""
    lines = ",\n".join(json.dumps(record) for record in compact(records))
    path.write_text(f'{{"records": [\n{lines}\n]}}\n')


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="results-*.jsonl, or what was kept (.json)")
    parser.add_argument("--out", type=Path, help="file for what to keep")
    args = parser.parse_args(argv)
    records = load(args.results)
    print(tables(records))
    if args.out:
        write_kept(records, args.out)


if __name__ == "__main__":
    main()
