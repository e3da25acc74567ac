"""The Python sources on this machine as a text corpus, and a tokenizer of it: real data without a download.

A hash of a file's relative path decides its split, so one version of Python gives one corpus everywhere.
"""

import fcntl
import hashlib
import io
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

SPLITS = ("train", "valid", "test")
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
STDLIB_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
}
"""Of the standard library: what distributions package separately or strip."""
STDLIB_SKIPPED |= {
    "encodings"
}  # tables that nearly are copies of each other, which splits would share
MAX_FILE_BYTES = 512 * 1024  # larger files are generated tables
LINES_PER_SENTENCE = 20  # sentences that hold line ends let the BPE learn pieces such as ":\n"


def prepare(
    directory: Path, source: str, max_mb: float, vocabulary: int, splits: Sequence[str] = SPLITS
) -> dict[str, str]:
    """Corpus, tokenizer and indexed datasets, made once by the first run that asks; returns their paths."""
    tokenizer = directory / "tokenizer.model"
    paths = {"tokenizer": str(tokenizer)} | {
        one: str(directory / f"{one}_text_document") for one in splits
    }
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [split for split in splits if not Path(f"{paths[split]}.idx").exists()]
        if (missing or not tokenizer.exists()) and not (directory / "train.jsonl").exists():
            write_corpus(directory, source, max_mb)
        if not tokenizer.exists():
            write_tokenizer(tokenizer, directory / "train.jsonl", vocabulary)
        for split in missing:
            words = [sys.executable, Path(__file__).with_name("preprocess_data.py"), "--append-eod"]
            words += ["--input", directory / f"{split}.jsonl", "--output-prefix", directory / split]
            words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer]
            subprocess.run(words, check=True)
    return paths


def _hash(path: str, salt: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt}:{path}".encode()).digest()[:8], "big")


def read_documents(root: Path, skipped: set[str]) -> dict[str, str]:
    """Every distinct .py file below ``root`` by its relative path, in the order of the paths' hashes."""
    texts, seen = {}, set()
    for folder, folders, files in root.walk():
        folders[:] = sorted(set(folders) - skipped)
        # _sysconfigdata_*.py holds the paths of the machine that built this Python
        for name in sorted(
            one for one in files if one.endswith(".py") and not one.startswith("_sysconfigd")
        ):
            raw = (folder / name).read_bytes()
            digest = hashlib.sha256(raw).digest()
            if len(raw) > MAX_FILE_BYTES or digest in seen or not raw.strip():
                continue
            try:
                text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError:
                continue
            seen.add(digest)
            texts[(folder / name).relative_to(root).as_posix()] = text
    return dict(sorted(texts.items(), key=lambda item: _hash(item[0], "order")))


def write_corpus(
    directory: Path, source: str, max_mb: float, weights: Sequence[float] = (90, 5, 5)
) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl, one {"text": ..., "path": ...} object a line, of
    ``max_mb`` of sources of stdlib or site-packages, split by file. A smaller corpus is a prefix of a larger
    one."""
    root = Path(sysconfig.get_path({"stdlib": "stdlib", "site-packages": "purelib"}[source]))
    edges = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights) - 1)]
    lines: dict[str, list[str]] = {name: [] for name in SPLITS}
    left = int(max_mb * 1e6)
    skipped = SKIPPED | (STDLIB_SKIPPED if source == "stdlib" else set())
    for path, text in read_documents(root, skipped).items():
        left -= len(text.encode())
        if left < 0:
            break
        split = SPLITS[sum(_hash(path, "split") / 2**64 >= edge for edge in edges)]
        lines[split].append(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
    directory.mkdir(parents=True, exist_ok=True)
    for name in reversed(SPLITS):  # train.jsonl says that the others are there
        (directory / f"{name}.jsonl").write_text("".join(lines[name]), encoding="utf-8", newline="")
        print(f"{name}.jsonl: {len(lines[name])} files of {source}", flush=True)


def write_tokenizer(path: Path, text: Path, vocabulary: int, max_mb: float = 8.0) -> None:
    """Write a SentencePiece BPE model of the first ``max_mb`` of a file of ``write_corpus``.

    It reproduces source code to the character: no normalisation, no dummy prefix, whitespace kept, bytes as
    the fallback. The same texts give the same bytes. Raises RuntimeError: they cannot fill ``vocabulary``.
    """
    import sentencepiece

    sentences: list[str] = []
    left = int(max_mb * 1e6)
    with text.open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            document = json.loads(line)["text"]
            own = document.splitlines(keepends=True)
            sentences += ("".join(one) for one in batched(own, LINES_PER_SENTENCE))
            left -= len(document.encode())
            if left < 0:
                break
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
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
        **{"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3},  # --append-eod writes eos
    )
    path.write_bytes(model.getvalue())
