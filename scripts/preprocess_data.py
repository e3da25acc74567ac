#!/usr/bin/env python
"""Tokenize JSONL text into the indexed dataset that --data-path reads (Megatron-LM's flags and format).

    python scripts/preprocess_data.py --input data/corpus/train.jsonl --output-prefix data/train \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model \\
        --append-eod --workers 2

writes data/train_text_document.bin and .idx; train on it with --data-path data/train_text_document and the
same tokenizer flags. Every tokenizer type that training accepts for text works here: the tokenizer is built
by megatron-core itself, from the same flags. The output does not depend on --workers or --partitions.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _cli import Parser, UsageError, run, staged
from _jsonl import Chunk, LineError, Tokenized, chunks_of, in_order

# Set before transformers is imported: no thread pools inside forked workers, no length warnings.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

CHUNK_BYTES = 1 << 20  # what one worker takes at a time, unless --partitions says otherwise

# What each tokenizer type cannot be built without: (attribute, flag, meaning).
NEEDS = {
    "NullTokenizer": [("vocab_size", "--vocab-size", "the number of token ids")],
    "HuggingFaceTokenizer": [("tokenizer_model", "--tokenizer-model", "a tokenizer directory or hub name")],
    "GPT2BPETokenizer": [
        ("vocab_file", "--vocab-file", "vocab.json"),
        ("merge_file", "--merge-file", "merges.txt"),
    ],
    "BertWordPieceLowerCase": [("vocab_file", "--vocab-file", "vocab.txt")],
    "BertWordPieceCase": [("vocab_file", "--vocab-file", "vocab.txt")],
} | {
    kind: [("tokenizer_model", "--tokenizer-model", "the tokenizer's model file")]
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
}


def make_parser() -> Parser:
    """Parser with Megatron's preprocessing flags and training's own tokenizer flags."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = Parser(description=__doc__)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input", nargs="+", required=True, help="JSONL files or glob patterns, one JSON object a line"
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, one dataset each")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.{bin,idx}")
    group.add_argument("--append-eod", action="store_true", help="end every document with the eod token")
    group.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    group.add_argument(
        "--partitions", type=int, help="pieces to cut the input into (default: one for every MiB)"
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines when the output is not a terminal",
    )
    # The rest of the group describes the model's vocabulary or another model family: no effect on a dataset.
    no_effect = ["padded_vocab_size", "pad_vocab_size", "vocab_extra_ids"]
    ArgumentGroupFactory(TokenizerConfig, exclude=no_effect).build_group(parser, "tokenizer")
    return parser


def input_files(patterns: Sequence[str]) -> list[Path]:
    """Expand `--input`: existing paths as they are, patterns in sorted order."""
    files: list[Path] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise UsageError(f"--input {pattern}: no such file")
        files += map(Path, found)
    for path in files:
        if path.is_dir():
            raise UsageError(f"--input {path}: is a directory; name the files, for example '{path}/*.jsonl'")
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
            raise UsageError(f"--input {path}: is compressed; unpack it first")
    return files


def make_tokenizer(args: Namespace) -> Any:
    """Build the tokenizer through megatron-core and check it against the flags.

    Raises:
        UsageError: a flag or file is missing, the tokenizer cannot be built, or it does not fit.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from megatron.compression import patches

    patches.build_gpt2_from_its_files()
    kind = args.tokenizer_type
    if kind is None:
        raise UsageError("--tokenizer-type is missing; give the one that training will use")
    if kind not in NEEDS:
        raise UsageError(
            f"--tokenizer-type {kind} does not tokenize plain text; choose one of {', '.join(NEEDS)}"
        )
    for attribute, flag, meaning in NEEDS[kind]:
        value = getattr(args, attribute)
        if value is None:
            raise UsageError(f"--tokenizer-type {kind} needs {flag}: {meaning}")
        is_path = flag != "--vocab-size" and kind != "HuggingFaceTokenizer"
        if is_path and not os.path.isfile(value):
            raise UsageError(f"{flag} {value}: no such file")
    if args.vocab_size is not None and args.vocab_size < 1:
        raise UsageError(f"--vocab-size {args.vocab_size}: give a positive number")

    args.pad_vocab_size = False  # a dataset has no padded vocabulary
    source = args.tokenizer_model or args.vocab_file or ""
    try:
        tokenizer = build_tokenizer(args)
        vocab_size = tokenizer.vocab_size
        eod = tokenizer.eod if args.append_eod else None
    except Exception as error:  # each tokenizer library raises its own types
        reason = " ".join(str(error).split())[:200]
        fix = "check that it belongs to this type"
        if "huggingface.co" in reason:  # megatron-core asks the hub for GPT-2 and BERT even with local files
            fix = "without network, give a local directory to --tokenizer-type HuggingFaceTokenizer"
        raise UsageError(
            f"--tokenizer-type {kind} {source}: the tokenizer cannot be built "
            f"({type(error).__name__}: {reason}); {fix}"
        ) from error
    if args.vocab_size not in (None, vocab_size):
        raise UsageError(
            f"--vocab-size {args.vocab_size}: the tokenizer has {vocab_size} tokens; leave the flag out"
        )
    if args.append_eod and (eod is None or not 0 <= eod < vocab_size):
        raise UsageError(
            f"--append-eod: {kind} {source} has no end-of-document token (id {eod}); "
            "use a tokenizer with one or leave the flag out"
        )
    return tokenizer


@dataclass
class Totals:
    """What was written for one key."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0


class Writer:
    """The growing dataset of one key: documents in input order, then the index."""

    def __init__(self, path: Path, dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.builder = IndexedDatasetBuilder(str(path), dtype=dtype)
        self.totals = Totals()

    def add(self, piece: Tokenized) -> None:
        """Append the documents of one chunk; empty ones are counted and left out."""
        start = 0
        for length in piece.lengths:
            if length:
                self.builder.add_document(piece.tokens[start : start + length], [length])
                self.totals.documents += 1
            else:
                self.totals.empty += 1
            start += length
        self.totals.tokens += start


class Progress:
    """A bar on a terminal; elsewhere a line every `interval` documents."""

    def __init__(self, total_bytes: int, interval: int) -> None:
        from tqdm import tqdm

        self.interval, self.documents, self.bytes = interval, 0, 0
        self.total_bytes, self.start = total_bytes, time.perf_counter()
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=quiet, desc="tokenizing")

    def update(self, documents: int, size: int) -> None:
        """Count one finished chunk."""
        before = self.documents // self.interval
        self.documents += documents
        self.bytes += size
        self.bar.update(size)
        if self.bar.disable and self.documents // self.interval > before:
            print(
                f"tokenized {self.documents} documents, {self.bytes / self.total_bytes:.0%}, "
                f"{self.speed:.2f} MB/s",
                flush=True,
            )

    @property
    def speed(self) -> float:
        """MB/s (10^6 bytes of JSONL) since the start."""
        return self.bytes / 1e6 / (time.perf_counter() - self.start)


def tokenize_files(args: Namespace, tokenizer: Any, files: list[Path], writers: list[Writer]) -> Progress:
    """Feed every chunk of the input, in order, to the writers."""
    total = sum(path.stat().st_size for path in files)
    if args.partitions is None:
        chunk_bytes = CHUNK_BYTES
    else:
        chunk_bytes = max(1, -(-total // args.partitions))
    progress = Progress(total, args.log_interval)
    lines_before: dict[Path, int] = {}
    try:
        for chunk, result in _results(args, tokenizer, files, chunk_bytes):
            if isinstance(result, LineError):
                number = lines_before.get(chunk.path, 0) + result.line
                raise UsageError(f"--input {chunk.path} line {number}: {result.message}")
            lines_before[chunk.path] = lines_before.get(chunk.path, 0) + result[0].lines
            for writer, piece in zip(writers, result, strict=True):
                writer.add(piece)
            progress.update(len(result[0].lengths), chunk.size)
    finally:
        progress.bar.close()
    return progress


def _results(
    args: Namespace, tokenizer: Any, files: list[Path], chunk_bytes: int
) -> Iterator[tuple[Chunk, list[Tokenized] | LineError]]:
    chunks = [chunk for path in files for chunk in chunks_of(path, chunk_bytes)]
    yield from in_order(chunks, tokenizer, args.json_keys, args.append_eod, args.workers)


def quiet_imports() -> None:
    """Import megatron-core without its notes about optional packages, which do not concern a dataset."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.datasets.indexed_dataset
        import megatron.training.argument_utils  # noqa: F401


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; raises UsageError for bad input."""
    quiet_imports()
    from megatron.core.datasets.indexed_dataset import DType

    args = make_parser().parse_args(argv)
    for flag, value in (
        ("--workers", args.workers),
        ("--partitions", args.partitions),
        ("--log-interval", args.log_interval),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: give at least 1")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise UsageError(f"--json-keys {' '.join(args.json_keys)}: name each key once")

    files = input_files(args.input)
    # The index comes last: a .bin without .idx is no dataset.
    outputs = [
        Path(f"{args.output_prefix}_{key}_document.{suffix}")
        for suffix in ("bin", "idx")
        for key in args.json_keys
    ]
    with staged(outputs, args.overwrite) as temporary:
        tokenizer = make_tokenizer(args)
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        count = len(args.json_keys)
        writers = [Writer(path, dtype) for path in temporary[:count]]
        progress = tokenize_files(args, tokenizer, files, writers)
        for key, writer, index_path in zip(args.json_keys, writers, temporary[count:], strict=True):
            if not writer.totals.documents:
                raise UsageError(f"--input {files[0]}: no text under the key '{key}' in any line")
            writer.builder.finalize(str(index_path))
    for key, writer in zip(args.json_keys, writers, strict=True):
        totals = writer.totals
        skipped = f", {totals.empty} empty ones left out" if totals.empty else ""
        print(
            f"{args.output_prefix}_{key}_document: {totals.documents} documents{skipped}, "
            f"{totals.tokens} tokens ({np.dtype(dtype).name}), {progress.speed:.2f} MB/s"
        )


if __name__ == "__main__":
    sys.exit(run(main))
