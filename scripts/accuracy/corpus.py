#!/usr/bin/env python
"""Tokens to train on from the sources of the installed Python packages: real text without a download.

    python -m scripts.accuracy.corpus --output-dir data/accuracy

Every distinct .py file below site-packages is read, assigned to training, validation or test by the hash of
its path (so no file is in two), tokenized with a BPE trained on the training part, and written in the order
of the hash: train.npy, valid.npy, test.npy (uint16), tokenizer.model, and meta.json with the SHA-256 of the
text.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _corpus

EOS = _corpus.SPECIAL_IDS["eos_id"]
START = "forkserver"
"""Of the workers: a plain fork of a process with threads, such as torch's, may never get going."""
_processor = None


def _start(model: bytes) -> None:
    global _processor
    import sentencepiece

    _processor = sentencepiece.SentencePieceProcessor(model_proto=model)


def _tokenize(texts: list[str]) -> np.ndarray:
    return np.array(
        [i for ids in _processor.encode(texts, out_type=int) for i in (*ids, EOS)], dtype=np.uint16
    )


def tokenize(texts: list[str], model: bytes, max_tokens: int, workers: int) -> np.ndarray:
    """uint16 ids of the texts one after the other, each ended by EOS, at most ``max_tokens`` of them."""
    with get_context(START).Pool(workers, _start, (model,)) as pool:
        chosen = pool.map(_tokenize, [texts[i : i + 50] for i in range(0, len(texts), 50)], chunksize=1)
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
        validation: share of the files that are for validation, and again for the test.
        tokenizer_mb: text that the tokenizer is trained on, 10^6 bytes.
    """
    root = root or _corpus.source_root("site-packages")
    output.mkdir(parents=True, exist_ok=True)
    documents = _corpus.read_documents(root, _corpus.ALWAYS_SKIPPED)
    parts = _corpus.assign(_corpus.choose(documents, None), (1 - 2 * validation, validation, validation))
    texts = {name: [document.text for document in parts[name]] for name in ("train", "valid", "test")}
    model = _corpus.train_tokenizer(_corpus.sample(texts["train"], int(tokenizer_mb * 1e6)), vocab_size)
    (output / "tokenizer.model").write_bytes(model)
    meta = {"root": root.name, "vocab_size": vocab_size, "validation": validation}
    digest = hashlib.sha256()
    for name in texts:
        ids = tokenize(texts[name], model, max_tokens, workers or min(os.cpu_count() or 1, 32))
        np.save(output / f"{name}.npy", ids)
        size = sum(len(text.encode()) for text in texts[name])
        meta[name] = {"files": len(texts[name]), "bytes": size, "tokens": len(ids)}
        for document in parts[name]:
            digest.update(f"{name}\0{document.path}\0{document.text}\0".encode())
    meta |= {"sha256": digest.hexdigest(), "tokenizer_sha256": hashlib.sha256(model).hexdigest()}
    (output / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=16384, help="pieces of the tokenizer")
    options = parser.parse_args(argv)
    print(json.dumps(prepare(options.output_dir, vocab_size=options.vocabulary)))


if __name__ == "__main__":
    main()
