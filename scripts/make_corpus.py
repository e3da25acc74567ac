#!/usr/bin/env python
"""Turn the Python sources on this machine into a text corpus: real data without a download.

    python scripts/make_corpus.py --output-dir data/corpus --max-mb 4

writes train.jsonl, valid.jsonl and test.jsonl, one {"text": ..., "path": ...} object a line. Files are
assigned to a split by a hash of their relative path, so the same Python gives the same corpus on every
machine; the SHA-256 printed at the end identifies it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _cli import Parser, UsageError, run, staged

SPLITS = ("train", "valid", "test")

# Left out of --source stdlib: what distributions package separately or strip (the corpus has to be the same
# with all of them) and code-page tables, which are near copies of each other and would leak between splits.
STDLIB_SKIPPED = frozenset(
    ["test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "encodings"]
)
ALWAYS_SKIPPED = frozenset(["site-packages", "dist-packages", "__pycache__"])
MAX_FILE_BYTES = 512 * 1024  # larger ones are generated tables


@dataclass(frozen=True)
class Document:
    """One source file: `path` relative to the scanned root (with /), `text` with \\n line ends."""

    path: str
    text: str

    @property
    def size(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text.encode())


def path_hash(path: str, salt: str) -> int:
    """64-bit hash of a relative path; independent orders come from different salts."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{path}".encode()).digest()[:8], "big")


def source_root(source: str) -> Path:
    """Directory that `--source` names, for the interpreter that runs this script."""
    return Path(sysconfig.get_path({"stdlib": "stdlib", "site-packages": "purelib"}[source]))


def read_documents(root: Path, skipped: frozenset[str]) -> tuple[list[Document], dict[str, int]]:
    """Read every distinct UTF-8 .py file under `root`, in path order.

    Returns the documents and the number of files left out, by reason.
    """
    left_out = {"not UTF-8": 0, "empty": 0, "too large": 0, "duplicate": 0}
    documents, seen = [], set()
    for path in sorted(_walk(root, skipped), key=lambda path: path.relative_to(root).as_posix()):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if len(raw) > MAX_FILE_BYTES:
            left_out["too large"] += 1
            continue
        try:
            text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            left_out["not UTF-8"] += 1
            continue
        if not text.strip():
            left_out["empty"] += 1
        elif digest in seen:
            left_out["duplicate"] += 1
        else:
            seen.add(digest)
            documents.append(Document(path.relative_to(root).as_posix(), text))
    return documents, left_out


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for directory, names, files in root.walk():
        names[:] = [name for name in names if name not in skipped]
        for name in files:
            # _sysconfigdata_*.py holds the paths of the machine that built this Python.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield directory / name


def choose(documents: list[Document], max_bytes: int | None) -> list[Document]:
    """The documents that fit in `max_bytes` of text: taken in hash order, returned in hash order.

    A smaller budget selects a prefix of what a larger one selects.
    """
    ordered = sorted(documents, key=lambda document: path_hash(document.path, "order"))
    if max_bytes is None:
        return ordered
    chosen, total = [], 0
    for document in ordered:
        total += document.size
        if total > max_bytes:
            break
        chosen.append(document)
    return chosen


def assign(documents: list[Document], weights: Sequence[float]) -> dict[str, list[Document]]:
    """Distribute documents over SPLITS by the hash of their path, in proportion to `weights`."""
    edges = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
    splits: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document in documents:
        position = path_hash(document.path, "split") / 2**64
        index = next(i for i, edge in enumerate(edges) if position < edge or i == len(edges) - 1)
        splits[SPLITS[index]].append(document)
    return splits


def parse_split(value: str) -> list[float]:
    """Parse `--split`: three non-negative numbers, the first of them positive."""
    try:
        weights = [float(part) for part in value.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or not 0 < weights[0] < float("inf"):
        raise UsageError(f"--split {value}: give three numbers for train, valid and test, such as 90,5,5")
    return weights


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; raises UsageError for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, help="directory for the .jsonl files")
    parser.add_argument("--source", choices=("stdlib", "site-packages"), default="stdlib")
    parser.add_argument("--max-mb", type=float, help="use at most this much text (10^6 bytes), all splits")
    parser.add_argument("--split", default="90,5,5", help="train,valid,test proportions, by file")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")
    args = parser.parse_args(argv)

    weights = parse_split(args.split)
    if args.max_mb is not None and args.max_mb <= 0:
        raise UsageError(f"--max-mb {args.max_mb:g}: give a positive size")
    skipped = ALWAYS_SKIPPED | (STDLIB_SKIPPED if args.source == "stdlib" else frozenset())
    root = source_root(args.source)

    with staged([args.output_dir / f"{name}.jsonl" for name in SPLITS], args.overwrite) as temporary:
        documents, left_out = read_documents(root, skipped)
        chosen = choose(documents, None if args.max_mb is None else int(args.max_mb * 1e6))
        splits = assign(chosen, weights)
        for name, weight in zip(SPLITS, weights, strict=True):
            if weight > 0 and not splits[name]:
                raise UsageError(
                    f"--max-mb {args.max_mb:g}: no file falls into {name}; raise it or change --split"
                    if args.max_mb
                    else f"--source {args.source}: no usable .py file under {root} for {name}; "
                    "use the other --source"
                )
        corpus = hashlib.sha256()
        print(f"{args.source} of Python {platform.python_version()}")
        for name, path in zip(SPLITS, temporary, strict=True):
            with path.open("wb") as stream:
                for document in splits[name]:
                    line = json.dumps({"text": document.text, "path": document.path}, ensure_ascii=False)
                    stream.write(line.encode() + b"\n")
                    corpus.update(line.encode() + b"\n")
            size = sum(document.size for document in splits[name])
            print(f"  {name}.jsonl  {len(splits[name]):6d} files  {size / 1e6:8.2f} MB of text")
    print("  left out: " + ", ".join(f"{count} {reason}" for reason, count in left_out.items()))
    print(f"  sha256 {corpus.hexdigest()}")


if __name__ == "__main__":
    sys.exit(run(main))
