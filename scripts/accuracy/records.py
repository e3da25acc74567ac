"""The records that ``run`` writes: reading them, and a small form to keep."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

_KEPT = (
    "id",
    "kind",
    "seed",
    "start",
    "steps",
    "size",
    "valid",
    "valid_tokens",
    "valid_uncompressed",
    "test",
)
_TAILS = {"scratch": 0.1, "ending": 0.4}
"""By kind of run, the share of its steps that is the last tenth of the schedule."""
_KEPT += ("weights", "seconds_per_step", "seconds", "device", "torch")


def load(paths: Sequence[Path]) -> list[dict]:
    """The records of results files (.jsonl) or of kept ones (.json), each job once, the last one of it.

    The last line of a .jsonl file counts only if it is whole: a worker may be writing it.
    """
    records = {}
    for path in paths:
        text = path.read_text()
        if path.suffix == ".json":
            found = [record for record in json.loads(text)["records"] if "setting" in record]
        else:
            found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        for record in found:
            records[record["id"]] = record
    return list(records.values())


def training_loss(record: dict) -> float:
    """Mean training loss over the last tenth of the whole schedule."""
    if "train" in record:
        return record["train"]
    losses = record["losses"]
    tail = round(len(losses) * _TAILS[record["kind"]])
    return statistics.fmean(losses[-max(1, tail) :])


def compact(records: Iterable[dict]) -> list[dict]:
    """Small records, from which the same tables can be made."""
    kept = []
    for record in records:
        if record["kind"] not in _TAILS:  # of an earlier version
            continue
        small = {key: record[key] for key in _KEPT if record.get(key) is not None}
        kept.append(small | {"setting": record["setting"], "train": round(training_loss(record), 5)})
    return kept
