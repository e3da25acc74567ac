#!/usr/bin/env python
"""Turn JSONL text into the tokenized dataset that --data-path reads.

    python scripts/preprocess_data.py --input my.jsonl --output-prefix data/my --append-eod
        --workers 8 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model

This writes data/my_text_document.bin and data/my_text_document.idx. Train on them with
--data-path data/my_text_document and the same tokenizer flags. Flags and format are Megatron-LM's.

Each line of the input is one JSON object, such as {"text": "..."}, and becomes one document. Blank
lines are skipped. A record without text is left out, and their number is printed. A line that
cannot be read ends the job: the error names the file and the line, and no dataset is left behind.
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
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from megatron.compression.errors import InputError, OneLineParser

# Tokenizer libraries must not start threads inside of forked workers, nor warn once a worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

LINES_A_TASK = 64
"""Lines that a worker gets at a time."""
TASKS_A_WORKER = 8
"""Tasks that wait for a worker at most: more would fill the memory with lines."""


@dataclass(frozen=True)
class Line:
    """A line of an input file that is not blank."""

    path: str
    number: int
    """Counted from 1."""
    content: bytes


Encoder = Callable[[Line], list[list[int]]]
"""Turns a line into token ids, one list for each of --json-keys. An empty list is a record without
text."""


def parse(argv: Sequence[str] | None) -> Namespace:
    """Return the arguments: Megatron's preprocessing flags, and the tokenizer flags that training
    has."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = OneLineParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="JSONL files, one JSON object a line; a pattern such as 'data/*.jsonl' works too",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys whose text is tokenized; each key gets a dataset (default: text)",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        help="where to write: PREFIX_KEY_document.bin and PREFIX_KEY_document.idx",
    )
    parser.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the tokenizer's end-of-document token (wanted for pretraining)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="processes that tokenize; the result does not depend on it (default: all cores)",
    )
    # These describe the embedding of a model. A dataset has none.
    without_effect = ["padded_vocab_size", "pad_vocab_size", "vocab_extra_ids"]
    tokenizer_flags = ArgumentGroupFactory(TokenizerConfig, exclude=without_effect)
    tokenizer_flags.build_group(parser, "tokenizer")
    return parser.parse_args(argv)


def build_encoder(args: Namespace) -> tuple[Encoder, int]:
    """Return a function that tokenizes a line, and the tokenizer's vocabulary size.

    Raises:
        InputError: the tokenizer cannot be built.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from megatron.compression.patches import gaps

    gaps.build_gpt2_from_its_files()
    args.pad_vocab_size = False  # a dataset has no padded vocabulary
    end_of_document = []
    try:
        tokenizer = build_tokenizer(args)
        size = tokenizer.vocab_size
        if args.append_eod:
            end_of_document = [tokenizer.eod]
    except Exception as error:  # each tokenizer library raises its own types
        raise InputError(
            f"--tokenizer-type {args.tokenizer_type}: the tokenizer cannot be built "
            f"({type(error).__name__}: {error}); check its flags and files"
        ) from error

    def encode(line: Line) -> list[list[int]]:
        documents = []
        for text in read_texts(line, args.json_keys):
            ids = []
            if text:
                try:
                    ids = tokenizer.tokenize(text)
                except Exception as error:
                    raise InputError(
                        f"--input {line.path} line {line.number}: the tokenizer cannot read this text "
                        f"({type(error).__name__}: {error}); correct the line or the tokenizer flags"
                    ) from None
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise InputError(
                    f"--input {line.path} line {line.number}: the tokenizer made a token outside of its "
                    f"vocabulary of {size}; check that its flags fit its files"
                )
            documents.append([*ids, *end_of_document] if ids else [])
        return documents

    return encode, size


def read_texts(line: Line, keys: Sequence[str]) -> list[str]:
    """Return the text under each key of a line's JSON object; "" where it is empty or null.

    Raises:
        InputError: the line is not such an object; the message names its file and number, and the
        fix.
    """
    location = f"--input {line.path} line {line.number}"
    try:
        # A file from Windows may begin with a byte-order mark.
        record = json.loads(line.content.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location}: not UTF-8 ({error.reason} at byte {error.start}); convert the file, "
            "for example with iconv -t UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{location}: not JSON ({error.msg.removesuffix(' at')}, column {error.colno}); give one JSON "
            "object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 1,000 deep
        raise InputError(f"{location}: JSON that Python cannot read ({error})") from None
    if not isinstance(record, dict):
        raise InputError(
            f"{location}: a JSON {type(record).__name__}, not an object; give lines such as "
            f'{{"{keys[0]}": "..."}}'
        )
    texts = []
    for key in keys:
        if key not in record:
            names = ", ".join(repr(name) for name in record) or "none"
            raise InputError(
                f"{location}: no key {key!r}; its keys are: {names}. Name the right one with --json-keys"
            )
        text = record[key]
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise InputError(
                f"{location}: {key!r} holds {json.dumps(text)[:40]}, which is not text; put it in quotes, or "
                "name another key with --json-keys"
            )
        texts.append(text)
    return texts


def read_lines(patterns: Sequence[str]) -> Iterator[Line]:
    """Yield the lines that are not blank: patterns as they were typed, the files of one sorted.

    Raises:
        InputError: a pattern that fits no file.
    """
    for pattern in patterns:
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise InputError(f"--input {pattern}: no such file; give JSONL files or patterns")
        for path in paths:
            with open(path, "rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.strip():
                        yield Line(path, number, content)


_encode: Encoder
"""Set before the workers are forked. They inherit it: a tokenizer need not be picklable."""


def _encode_task(lines: Sequence[Line]) -> list[list[list[int]]]:
    """Run in a worker: the token ids of some lines."""
    return [_encode(line) for line in lines]


def encode_all(encode: Encoder, lines: Iterator[Line], workers: int) -> Iterator[list[list[int]]]:
    """Yield the token ids of each line, in the order of the lines.

    Args:
        encode: tokenizes one line.
        lines: the input.
        workers: processes; with fewer than 2 this process does the work.

    Raises:
        InputError: a line cannot be read, or a worker was killed.
    """
    global _encode
    if workers < 2:
        yield from map(encode, lines)
        return
    # A fork shares what this process has loaded: workers start at once.
    _encode = encode
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        try:
            # map() reads all that it is given before it yields, so it is given a few tasks at a
            # time.
            for tasks in batched(batched(lines, LINES_A_TASK), TASKS_A_WORKER * workers):
                for documents in pool.map(_encode_task, tasks):
                    yield from documents
        except BrokenProcessPool as error:
            raise InputError(
                f"--workers {workers}: a worker was killed, probably because memory ran out; use fewer"
            ) from error


class DatasetWriter:
    """Writes the dataset of one key. It gets its name in ``finish``; until then there is none.

    Args:
        prefix: path of the dataset without .bin and .idx. What an earlier job wrote there is
            removed.
        dtype: numpy type of a token.
    """

    def __init__(self, prefix: Path, dtype: Any) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix = prefix
        self.documents = 0
        self.tokens = 0
        self.empty = 0
        """Records whose text was empty."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # An earlier dataset goes first: it must not pass for this job's if this job fails.
        self._remove()
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin.part", dtype=dtype)

    def add(self, ids: list[int]) -> None:
        """Append a document; an empty one is counted and left out."""
        if not ids:
            self.empty += 1
            return
        self._builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> None:
        """Give the files their names, and print what they hold."""
        self._builder.finalize(f"{self.prefix}.idx.part")
        # The index comes last: who finds it may read the whole dataset.
        os.replace(f"{self.prefix}.bin.part", f"{self.prefix}.bin")
        os.replace(f"{self.prefix}.idx.part", f"{self.prefix}.idx")
        line = f"{self.prefix}: {self.documents} documents, {self.tokens} tokens"
        if self.empty:
            line += f"; {self.empty} records without text were left out"
        print(line, flush=True)

    def discard(self) -> None:
        """Remove everything that was written."""
        self._builder.data_file.close()
        self._remove()

    def _remove(self) -> None:
        for suffix in (".idx", ".bin", ".idx.part", ".bin.part"):
            Path(f"{self.prefix}{suffix}").unlink(missing_ok=True)


def write(args: Namespace) -> None:
    """Write a dataset for each key: all of them, or none where something fails.

    Raises:
        InputError: the tokenizer, a file or a line cannot be used, or a key has no text at all.
    """
    from megatron.core.datasets.indexed_dataset import DType

    encode, vocabulary_size = build_encoder(args)
    dtype = DType.optimal_dtype(vocabulary_size)
    writers = []
    try:
        for key in args.json_keys:
            writers.append(DatasetWriter(Path(f"{args.output_prefix}_{key}_document"), dtype))
        # Lines are read while others are tokenized. Only a few are in memory.
        for documents in encode_all(encode, read_lines(args.input), args.workers):
            for writer, ids in zip(writers, documents, strict=True):
                writer.add(ids)
        for key, writer in zip(args.json_keys, writers, strict=True):
            if not writer.documents:
                raise InputError(
                    f"--input {' '.join(args.input)}: no text under the key {key!r} "
                    f"({writer.empty} records without text); name another key with --json-keys"
                )
    except BaseException:  # Ctrl-C too
        for writer in writers:
            writer.discard()
        raise
    for writer in writers:
        writer.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 for bad input, after one line that says what is
    wrong."""
    try:
        write(parse(argv))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        path = error.filename or "--output-prefix"
        print(f"error: {path}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
