#!/usr/bin/env python
"""Tokens to train on from the sources of the installed Python packages: real text without a download.

    python -m scripts.accuracy.corpus --output-dir data/accuracy

Every distinct .py file below site-packages is read, assigned to training or validation by the hash of its
path (so no file is in both), tokenized with a BPE trained on the training part, and written in the order of
the hash: train.npy and valid.npy (uint16), tokenizer.model, and meta.json with the SHA-256 of the text.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import make_corpus
import train_tokenizer

EOS = train_tokenizer.SPECIAL_IDS["eos_id"]
START = "forkserver"
"""Of the workers: a plain fork of a process with threads, such as torch's, may never get going."""
_processor = None


def _read(arguments: tuple[str, list[str]]) -> list[tuple[str, bytes, str]]:
    """(relative path, digest of the bytes, text) of the usable files among ``paths``."""
    root, paths = arguments
    found = []
    for path in paths:
        raw = Path(root, path).read_bytes()
        try:
            text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip() and len(raw) <= make_corpus.MAX_FILE_BYTES:
            found.append((path, hashlib.sha256(text.encode()).digest(), text))
    return found


def read_documents(root: Path, workers: int) -> list[make_corpus.Document]:
    """Every distinct .py file below ``root``, each content once, in the order of the path hash."""
    paths = make_corpus._walk(root, make_corpus.ALWAYS_SKIPPED)
    paths = sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
    pieces = [(str(root), paths[i : i + 200]) for i in range(0, len(paths), 200)]
    with get_context(START).Pool(workers) as pool:
        found = [item for part in pool.imap(_read, pieces) for item in part]
    documents, seen = [], set()
    for path, digest, text in found:
        if digest not in seen:
            seen.add(digest)
            documents.append(make_corpus.Document(path, text))
    return make_corpus.choose(documents, None)


def split(
    documents: list[make_corpus.Document], validation: float
) -> tuple[list[make_corpus.Document], list[make_corpus.Document]]:
    """Training and validation documents: each file in one of them, by the hash of its path."""
    parts = make_corpus.assign(documents, (1 - validation, validation, 0))
    return parts["train"], parts["valid"]


def _start(model: bytes) -> None:
    global _processor
    import sentencepiece

    _processor = sentencepiece.SentencePieceProcessor(model_proto=model)


def _tokenize(texts: list[str]) -> np.ndarray:
    ids = []
    for one in _processor.encode(texts, out_type=int):
        ids += one
        ids.append(EOS)
    return np.array(ids, dtype=np.uint16)


def tokenize(texts: list[str], model: bytes, max_tokens: int, workers: int) -> np.ndarray:
    """uint16 ids of the texts one after the other, each ended by EOS, at most ``max_tokens`` of them."""
    pieces, chosen, total = [texts[i : i + 50] for i in range(0, len(texts), 50)], [], 0
    with get_context(START).Pool(workers, _start, (model,)) as pool:
        for ids in pool.imap(_tokenize, pieces):
            chosen.append(ids)
            total += len(ids)
            if total >= max_tokens:
                pool.terminate()
                break
    return np.concatenate(chosen)[:max_tokens] if chosen else np.empty(0, np.uint16)


def prepare(
    output: Path,
    root: Path | None = None,
    vocab_size: int = 16384,
    max_tokens: int = 70_000_000,
    validation: float = 0.04,
    tokenizer_mb: float = 12.0,
    workers: int | None = None,
) -> dict:
    """Write the corpus and return what meta.json says. See the module's docstring.

    Args:
        root: folder of the sources; by default this interpreter's site-packages.
        vocab_size: pieces of the tokenizer, at most 65536.
        max_tokens: of the training part.
        validation: share of the files that are for validation.
        tokenizer_mb: text that the tokenizer is trained on, 10^6 bytes.
    """
    start, workers = time.perf_counter(), workers or os.cpu_count() or 1
    root = root or make_corpus.source_root("site-packages")
    output.mkdir(parents=True, exist_ok=True)
    documents = read_documents(root, workers)
    parts = dict(zip(("train", "valid"), split(documents, validation), strict=True))
    texts = {name: [document.text for document in part] for name, part in parts.items()}
    model = train_tokenizer.train(train_tokenizer.sample(texts["train"], int(tokenizer_mb * 1e6)), vocab_size)
    (output / "tokenizer.model").write_bytes(model)
    meta = {"root": root.name, "vocab_size": vocab_size, "validation": validation}
    digest = hashlib.sha256()
    for name, part in parts.items():
        ids = tokenize(texts[name], model, max_tokens, workers)
        np.save(output / f"{name}.npy", ids)
        size = sum(len(text.encode()) for text in texts[name])
        meta[name] = {"files": len(part), "bytes": size, "tokens": len(ids)}
        for document in part:
            digest.update(f"{name}\0{document.path}\0{document.text}\0".encode())
    meta["sha256"] = digest.hexdigest()
    meta["tokenizer_sha256"] = hashlib.sha256(model).hexdigest()
    meta["seconds"] = round(time.perf_counter() - start, 1)
    (output / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--root", type=Path, help="folder of the sources (default: site-packages)")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--max-tokens", type=int, default=70_000_000, help="of the training part")
    parser.add_argument("--validation", type=float, default=0.04, help="share of the files")
    parser.add_argument("--tokenizer-mb", type=float, default=12.0, help="text to train the tokenizer on")
    parser.add_argument("--workers", type=int, help="processes (default: all cores)")
    args = parser.parse_args(argv)
    meta = prepare(
        args.output_dir,
        args.root,
        args.vocab_size,
        args.max_tokens,
        args.validation,
        args.tokenizer_mb,
        args.workers,
    )
    print(json.dumps(meta))


if __name__ == "__main__":
    main()
