#!/usr/bin/env python
"""Tables, plots and the small JSON of the runs that ``run``, ``true_runs`` and ``errors`` made.

    python -m scripts.accuracy.summarise results/*.jsonl --out docs/accuracy
    python -m scripts.accuracy.summarise docs/accuracy/*.json

The first prints the tables and writes runs.json, errors.json and the plots to --out; the second prints the
same tables from what is kept.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy import error_tables, plots
from scripts.accuracy.records import compact, load
from scripts.accuracy.tables import tables


def write_kept(records: list[dict], folder: Path) -> list[Path]:
    """runs.json and errors.json, a record a line."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = error_tables.stages_of(records).items()
    errors = [{"id": f"errors/{name}", "kind": "errors", "errors": stage} for name, stage in stages]
    written = []
    for name, kept in (("runs", compact(records)), ("errors", errors)):
        if kept:
            lines = ",\n".join(json.dumps(record) for record in kept)
            written.append(folder / f"{name}.json")
            written[-1].write_text(f'{{"records": [\n{lines}\n]}}\n')
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="results-*.jsonl, or what was kept (.json)")
    parser.add_argument("--out", type=Path, help="folder for runs.json, errors.json and PNG plots")
    args = parser.parse_args(argv)
    records = load(args.results)
    stages = error_tables.stages_of(records)
    print("\n".join(text for text in (tables(records), error_tables.tables(stages)) if text))
    if args.out:
        written = write_kept(records, args.out)
        written += plots.plots(records, args.out) + error_tables.plots(stages, args.out)
        for path in written:
            print(f"wrote {path}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
