#!/usr/bin/env python
"""Tokenize JSONL text into the indexed dataset that --data-path reads (Megatron-LM's flags and format).

    python scripts/preprocess_data.py --input my.jsonl --output-prefix data/my --append-eod --workers 8 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model

writes data/my_text_document.bin and .idx. Train on it with --data-path data/my_text_document and the same
tokenizer flags. megatron-core builds the tokenizer and the dataset; --workers does not change them.
"""

import argparse
import glob
import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import batched
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.compression.errors import InputError, OneLineParser

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads inside of forked workers
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def parse(argv: Sequence[str] | None) -> Namespace:
    """Megatron's preprocessing flags and training's own tokenizer flags."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(allow_abbrev=False, description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="JSONL files or patterns, one JSON object a line")
    add("--json-keys", nargs="+", default=["text"], help="keys to tokenize, one dataset each")
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.{bin,idx}")
    add(
        "--append-eod",
        action="store_true",
        help="end every document with the end-of-document token",
    )
    add("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    no_effect = ["padded_vocab_size", "pad_vocab_size", "vocab_extra_ids"]  # of a model's embedding
    ArgumentGroupFactory(TokenizerConfig, exclude=no_effect).build_group(parser, "tokenizer")
    return parser.parse_args(argv)


def encoder(args: Namespace) -> tuple[Callable[[tuple], list[list[int]]], int]:
    """What turns (path, number, bytes) of a line into token ids by key; and the vocabulary's size.

    Raises: InputError: the tokenizer cannot be built.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from megatron.compression.patches import gaps

    gaps.build_gpt2_from_its_files()
    args.pad_vocab_size = False  # a dataset has no padded vocabulary
    try:
        tokenizer = build_tokenizer(args)
        size, eod = tokenizer.vocab_size, [tokenizer.eod] if args.append_eod else []
    except Exception as error:  # each tokenizer library raises its own types
        what = f"--tokenizer-type {args.tokenizer_type}: the tokenizer cannot be built"
        raise InputError(
            f"{what} ({type(error).__name__}: {error}); check its flags and files"
        ) from error

    def encode(line: tuple[str, int, bytes]) -> list[list[int]]:
        try:
            record = json.loads(line[2].decode("utf-8-sig"))
            found = [
                tokenizer.tokenize(record[key]) if record[key] else [] for key in args.json_keys
            ]
            if any(not 0 <= i < size for ids in found for i in ids):
                raise ValueError(f"a token is not below the vocabulary's size {size}")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--input {line[0]} line {line[1]}: {type(error).__name__}: {error}; give JSON objects with "
                f"text under {' and '.join(args.json_keys)} (--json-keys) that the tokenizer knows"
            ) from None
        return [[*ids, *eod] if ids else [] for ids in found]

    return encode, size


def lines_of(patterns: Sequence[str]) -> Iterator[tuple[str, int, bytes]]:
    """(path, number, bytes) of all lines that are not blank; numbers count from 1, patterns are sorted."""
    for pattern in patterns:
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise InputError(f"--input {pattern}: no such file; give JSONL files or patterns")
        for path in paths:
            with open(path, "rb") as stream:
                yield from (
                    (path, number, line) for number, line in enumerate(stream, 1) if line.strip()
                )


def _work(lines: Sequence[tuple]) -> list[list[list[int]]]:
    return [_work.encode(line) for line in lines]  # a worker has it by the fork


def documents_of(
    encode: Callable, lines: Iterator[tuple], workers: int
) -> Iterator[list[list[int]]]:
    """The token ids of each line, in order. Raises: InputError: of a line; a worker was killed."""
    if workers < 2:
        yield from map(encode, lines)
        return
    _work.encode = encode
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        try:
            for batches in batched(batched(lines, 64), 8 * workers):
                for documents in pool.map(_work, batches):
                    yield from documents
        except BrokenProcessPool as error:
            raise InputError(
                f"--workers {workers}: one was killed, for memory perhaps; use fewer"
            ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 for bad input, which is one line."""
    try:
        write(parse(argv))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write(args: Namespace) -> None:
    """Write a dataset for each key. An index appears when its dataset is whole."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encode, size = encoder(args)
    builders, counts = {}, {}
    for key in args.json_keys:
        prefix = Path(f"{args.output_prefix}_{key}_document")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        builders[prefix] = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(size))
        counts[prefix] = [0, 0]
    for found in documents_of(encode, lines_of(args.input), args.workers):
        for prefix, ids in zip(builders, found, strict=True):
            if ids:
                builders[prefix].add_document(ids, [len(ids)])
                counts[prefix] = [counts[prefix][0] + 1, counts[prefix][1] + len(ids)]
    for prefix, (documents, tokens) in counts.items():
        if not documents:
            raise InputError(
                f"--input {' '.join(args.input)}: no text for {prefix}; see --json-keys"
            )
        builders[prefix].finalize(f"{prefix}.idx")
        print(f"{prefix}: {documents} documents, {tokens} tokens", flush=True)


if __name__ == "__main__":
    sys.exit(main())
