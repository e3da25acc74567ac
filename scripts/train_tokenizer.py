#!/usr/bin/env python
"""Train a SentencePiece BPE tokenizer that reproduces source code to the character.

    python scripts/train_tokenizer.py --input data/corpus/train.jsonl --vocab-size 2048 \\
        --output data/tokenizer.model

The model works with --tokenizer-type SentencePieceTokenizer and GPTSentencePieceTokenizer. No
normalisation, no dummy prefix, whitespace kept, bytes as the fallback: decode(encode(text)) == text, except
that U+2581, SentencePiece's own mark for a space, comes back as a space.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
from _cli import Parser, UsageError, run, staged

# The end-of-document token that --append-eod writes is SentencePiece's </s>.
SPECIAL_IDS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3}
MIN_VOCAB_SIZE = 512  # 4 special tokens, 256 bytes, the characters, and some merges
LINES_PER_SENTENCE = 20  # sentences that hold line ends let the BPE learn pieces such as ":\n"


def read_texts(paths: Iterable[Path], key: str) -> Iterator[str]:
    """Yield the string under `key` of every line of the JSONL files."""
    for path in paths:
        try:
            with path.open(encoding="utf-8") as stream:
                for number, line in enumerate(stream, 1):
                    if not line.strip():
                        continue
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get(key), str):
                        raise UsageError(
                            f"--input {path} line {number}: no text under the key '{key}'; "
                            "name the right one with --json-key"
                        )
                    yield record[key]
        except FileNotFoundError as error:
            raise UsageError(f"--input {path}: no such file") from error
        except json.JSONDecodeError as error:
            raise UsageError(
                f"--input {path} line {number}: not JSON ({error.msg}); give one JSON object a line"
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--input {path}: not UTF-8 ({error.reason}); convert it first") from error


def sample(texts: Iterable[str], max_bytes: int) -> list[str]:
    """Choose texts in the order of their content hash until `max_bytes` of UTF-8 are reached."""
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    chosen, total = [], 0
    for text in ordered:
        if chosen and total + len(text.encode()) > max_bytes:
            break
        chosen.append(text)
        total += len(text.encode())
    return chosen


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts into pieces of LINES_PER_SENTENCE lines, line ends kept."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        for start in range(0, len(lines), LINES_PER_SENTENCE):
            yield "".join(lines[start : start + LINES_PER_SENTENCE])


def train(texts: Sequence[str], vocab_size: int) -> bytes:
    """Train on `texts` and return the serialized SentencePiece model; the same input gives the same bytes.

    Raises:
        UsageError: the texts cannot fill `vocab_size` pieces, or hold more characters than that.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are spelled in bytes
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 24,
            num_threads=2,
            minloglevel=2,
            **SPECIAL_IDS,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--vocab-size {vocab_size}: SentencePiece cannot reach it with this text ({reason}); "
            "choose another size or give more text"
        ) from error
    return model.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; raises UsageError for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--json-key", default="text", help="key of the text in each object")
    parser.add_argument("--output", type=Path, required=True, help="the .model file to write")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of pieces, bytes included")
    parser.add_argument("--max-mb", type=float, default=8.0, help="train on at most this much of the text")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    args = parser.parse_args(argv)

    if args.vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(f"--vocab-size {args.vocab_size}: give at least {MIN_VOCAB_SIZE}")
    if args.max_mb <= 0:
        raise UsageError(f"--max-mb {args.max_mb:g}: give a positive size")
    with staged([args.output], args.overwrite) as [temporary]:
        start = time.perf_counter()
        texts = sample(read_texts(args.input, args.json_key), int(args.max_mb * 1e6))
        size = sum(len(text.encode()) for text in texts)
        if not size:
            raise UsageError(f"--input {args.input[0]}: no text in it")
        model = train(texts, args.vocab_size)
        temporary.write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        probe = texts[: max(1, len(texts) // 20)]
        tokens = sum(len(processor.encode_as_ids(text)) for text in probe)
        ratio = sum(len(text.encode()) for text in probe) / tokens
    print(
        f"{args.output}: {processor.get_piece_size()} pieces from {size / 1e6:.2f} MB "
        f"in {time.perf_counter() - start:.1f} s, {ratio:.2f} bytes/token, "
        f"sha256 {hashlib.sha256(model).hexdigest()}"
    )


if __name__ == "__main__":
    sys.exit(run(main))
