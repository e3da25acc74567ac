#!/usr/bin/env python
"""Tokenize JSONL text into the indexed dataset that --data-path reads (Megatron-LM's flags and format).

    python scripts/preprocess_data.py --input data/corpus/train.jsonl --output-prefix data/train \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model \\
        --append-eod --workers 2

writes data/train_text_document.bin and .idx; train on it with --data-path data/train_text_document and the
same tokenizer flags. Every tokenizer type that training accepts for text works here: the tokenizer is built
by megatron-core itself, from the same flags. The output does not depend on --workers.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from _cli import Parser, UsageError, run, staged

# Set before transformers is imported: no thread pools inside forked workers, no length warnings.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

BATCH = 64
"""Lines that a worker takes at a time."""

Line = tuple[Path, int, bytes]
"""A file, a line's number counted from 1, and what it holds."""

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
    group.add_argument("--log-interval", type=int, default=1000, help="documents between progress lines")
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


def lines_of(files: Iterable[Path]) -> Iterator[Line]:
    """All lines of the files that are not blank."""
    for path in files:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield path, number, line


class LineTokenizer:
    """Ids of each key of a line of JSON, with the end-of-document token where it is asked for."""

    def __init__(self, tokenizer: Any, keys: Sequence[str], append_eod: bool) -> None:
        self.tokenizer, self.keys = tokenizer, keys
        self.limit = tokenizer.vocab_size
        self.eod = [tokenizer.eod] if append_eod else []

    def __call__(self, lines: Sequence[Line]) -> list[list[np.ndarray]]:
        """int32 ids by key and line; empty for an empty text.

        Raises:
            UsageError: naming the first line that cannot be used.
        """
        documents: list[list[np.ndarray]] = [[] for _ in self.keys]
        for path, number, line in lines:
            try:
                record = self._record(line)
                for key, own in zip(self.keys, documents, strict=True):
                    own.append(self._ids(record, key))
            except UsageError as error:
                raise UsageError(f"--input {path} line {number}: {error}") from None
        return documents

    def _record(self, line: bytes) -> dict:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError(f"not UTF-8 ({error.reason}); convert the file first") from None
        except json.JSONDecodeError as error:
            raise UsageError(f"not JSON ({error.msg}); give one JSON object a line") from None
        if not isinstance(record, dict):
            raise UsageError("not a JSON object; give one JSON object a line")
        return record

    def _ids(self, record: dict, key: str) -> np.ndarray:
        text = record.get(key)
        if not isinstance(text, str):
            has = ", ".join(sorted(record)) or "none"
            raise UsageError(
                f"no text under the key '{key}'; name the right one with --json-keys (has: {has})"
            )
        try:
            ids = self.tokenizer.tokenize(text) if text else []
        except ValueError as error:  # NullTokenizer on words, or text that has no UTF-8 form
            raise UsageError(f"the tokenizer refuses the text ({error}); check --tokenizer-type") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.limit:
            found = f"{min(ids)}..{max(ids)}"
            raise UsageError(f"token ids {found} are outside 0..{self.limit - 1}; raise --vocab-size")
        return np.array([*ids, *self.eod] if ids else [], dtype=np.int32)


_tokenize: LineTokenizer | None = None
"""A worker's own, inherited by the fork."""


def _start_worker(tokenize: LineTokenizer) -> None:
    """Leave Ctrl-C to the parent, and end with the parent even if that is killed outright."""
    global _tokenize
    _tokenize = tokenize
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _work(lines: Sequence[Line]) -> list[list[np.ndarray]]:
    return _tokenize(lines)


def in_order(
    tokenize: LineTokenizer, lines: Iterable[Line], workers: int
) -> Iterator[tuple[Sequence[Line], list[list[np.ndarray]]]]:
    """Batches of lines with their documents by key, in order; few wait in memory at a time.

    Raises:
        UsageError: of a line, or because a worker process was killed.
    """
    batches = itertools.batched(lines, BATCH)
    if workers == 1:
        for batch in batches:
            yield batch, tokenize(batch)
        return
    fork = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(workers, fork, _start_worker, (tokenize,))
    pending: deque[tuple[Sequence[Line], Future]] = deque()
    try:
        for batch in batches:
            pending.append((batch, executor.submit(_work, batch)))
            if len(pending) >= 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise UsageError(
            f"--workers {workers}: a worker process died, most likely for lack of memory; use fewer"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


class Writer:
    """The growing dataset of one key, documents in input order; empty ones are counted and left out."""

    def __init__(self, path: Path, dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.builder = IndexedDatasetBuilder(str(path), dtype=dtype)
        self.documents = self.tokens = self.empty = 0

    def add(self, documents: Iterable[np.ndarray]) -> None:
        """Append documents of int32 ids."""
        for ids in documents:
            if len(ids):
                self.builder.add_document(ids, [len(ids)])
                self.documents += 1
                self.tokens += len(ids)
            else:
                self.empty += 1


def tokenize_files(args: Namespace, tokenizer: Any, files: list[Path], writers: list[Writer]) -> float:
    """Feed the input to the writers; a line every ``--log-interval`` documents. Returns MB/s of JSONL."""
    began, total = time.perf_counter(), sum(path.stat().st_size for path in files)
    count = size = 0
    speed = 0.0
    tokenize = LineTokenizer(tokenizer, args.json_keys, args.append_eod)
    for batch, documents in in_order(tokenize, lines_of(files), args.workers):
        for writer, own in zip(writers, documents, strict=True):
            writer.add(own)
        before, count = count // args.log_interval, count + len(batch)
        size += sum(len(line) for _, _, line in batch)
        speed = size / 1e6 / (time.perf_counter() - began)
        if count // args.log_interval > before:
            print(f"tokenized {count} documents, {size / total:.0%}, {speed:.2f} MB/s", flush=True)
    return speed


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
        ("--log-interval", args.log_interval),
    ):
        if value < 1:
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
        speed = tokenize_files(args, tokenizer, files, writers)
        for key, writer, index_path in zip(args.json_keys, writers, temporary[count:], strict=True):
            if not writer.documents:
                raise UsageError(f"--input {files[0]}: no text under the key '{key}' in any line")
            writer.builder.finalize(str(index_path))
    for key, writer in zip(args.json_keys, writers, strict=True):
        skipped = f", {writer.empty} empty ones left out" if writer.empty else ""
        print(
            f"{args.output_prefix}_{key}_document: {writer.documents} documents{skipped}, "
            f"{writer.tokens} tokens ({np.dtype(dtype).name}), {speed:.2f} MB/s"
        )


if __name__ == "__main__":
    sys.exit(run(main))
