"""Real text without a download: the Python sources on this machine, and a tokenizer trained on
them.

A hash of a file's relative path decides its split (train, valid or test). So one version of Python
gives one corpus on every machine. The scripts beside this file import it.

A folder that ``prepare`` has filled holds

    train.jsonl  valid.jsonl  test.jsonl     the text, one {"text": ..., "path": ...} object a line
    tokenizer.model                          a SentencePiece model of train.jsonl
    SPLIT_text_document.bin and .idx         the indexed datasets that --data-path reads
    corpus.json                              the manifest: what was asked for, and a hash of each file
"""

import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path

SPLITS = ("train", "valid", "test")
TEXTS = [f"{split}.jsonl" for split in SPLITS]
TOKENIZER = "tokenizer.model"
MANIFEST = "corpus.json"
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
STDLIB_SKIPPED = {
    # distributions package these separately, or strip them
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    # tables that are nearly copies of each other: the splits would share text
    "encodings",
}
"""Folders of the standard library that are left out."""
MAX_FILE_BYTES = 512 * 1024  # larger files are generated tables
LINES_PER_SENTENCE = 20  # sentences that hold line ends let the BPE learn pieces such as ":\n"


@dataclass(frozen=True)
class Request:
    """What a run asks of a corpus. Two runs share a folder only if they ask for the same."""

    source: str
    """stdlib or site-packages."""
    max_mb: float
    """Text of all splits together, 10^6 bytes."""
    vocabulary: int
    """Tokens of the tokenizer."""

    def __str__(self) -> str:
        return f"{self.max_mb:g} MB of {self.source} with {self.vocabulary} tokens"


class Manifest:
    """The file that says what a folder was made for, and which of its files are whole.

    A file counts as whole only after ``add`` has recorded its hash. What a killed run has left
    behind is therefore made again.

    Args:
        directory: the folder of the corpus.
        request: what this run asks for. If the folder was made for something else, nothing in it
        counts.
    """

    def __init__(self, directory: Path, request: Request) -> None:
        self.directory = directory
        self.request = request
        self.hashes: dict[str, str] = {}
        """File name to SHA-256."""
        recorded = self._read()
        if recorded.get("request") == asdict(request):
            self.hashes = recorded["hashes"]
        elif recorded:
            earlier = Request(**recorded["request"])
            print(f"corpus: {directory} held {earlier}; it now gets {request}", flush=True)
        elif any((directory / name).exists() for name in [*TEXTS, TOKENIZER]):
            print(f"corpus: {directory} is unfinished; it is made anew", flush=True)

    def _read(self) -> dict:
        """Return the manifest's content; empty where it is missing or damaged."""
        try:
            recorded = json.loads((self.directory / MANIFEST).read_text())
            # These two raise if what they are given is not what ``add`` writes.
            Request(**recorded["request"])
            dict(recorded["hashes"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return recorded

    def holds(self, names: Iterable[str]) -> bool:
        """Return whether the folder has all these files, each with its recorded hash."""
        for name in names:
            path = self.directory / name
            if name not in self.hashes or not path.exists():
                return False
            if self.hashes[name] != hash_of(path):
                print(f"corpus: {path} has changed since it was made; it is made anew", flush=True)
                return False
        return True

    def add(self, names: Iterable[str]) -> None:
        """Record files that have just been written."""
        for name in names:
            self.hashes[name] = hash_of(self.directory / name)
        self._write()

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget all other files: they are made from what is about to be replaced."""
        self.hashes = {name: self.hashes[name] for name in names}
        self._write()

    def _write(self) -> None:
        content = {"request": asdict(self.request), "hashes": self.hashes}
        write_whole(self.directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal text."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it: a killed process leaves no half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def prepare(
    directory: Path, source: str, max_mb: float, vocabulary: int, splits: Sequence[str] = SPLITS
) -> dict[str, str]:
    """Make a corpus, its tokenizer and its indexed datasets, as far as the folder does not hold
    them.

    Runs that start at the same time make them once: the others wait for the first.

    Args:
        directory: the folder. What it holds for another source, size or vocabulary is made anew.
        source: stdlib (Python's own sources) or site-packages (those of the installed packages).
        max_mb: text of all splits together, 10^6 bytes.
        vocabulary: tokens of the tokenizer.
        splits: the splits to tokenize.

    Returns:
        Paths: "tokenizer", and by split the prefix that --data-path takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Each step reads what the step before has written, so a step that runs makes the later ones
        # run.
        manifest = Manifest(directory, Request(source, max_mb, vocabulary))
        if not manifest.holds(TEXTS):
            manifest.keep_only([])
            write_corpus(directory, source, max_mb)
            manifest.add(TEXTS)
        if not manifest.holds([TOKENIZER]):
            manifest.keep_only(TEXTS)
            write_tokenizer(directory / TOKENIZER, directory / "train.jsonl", vocabulary)
            manifest.add([TOKENIZER])
        for split in splits:
            dataset = [f"{split}_text_document.bin", f"{split}_text_document.idx"]
            if not manifest.holds(dataset):
                write_dataset(directory, split)
                manifest.add(dataset)
    paths = {split: str(directory / f"{split}_text_document") for split in splits}
    paths["tokenizer"] = str(directory / TOKENIZER)
    return paths


def write_dataset(directory: Path, split: str) -> None:
    """Tokenize SPLIT.jsonl of a folder into SPLIT_text_document.bin and .idx.

    Raises:
        RuntimeError: with what preprocess_data.py printed.
    """
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("preprocess_data.py")]
    command += ["--input", directory / f"{split}.jsonl", "--output-prefix", directory / split]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--append-eod"]
    command += ["--tokenizer-model", directory / TOKENIZER]
    # Libraries warn about what is not installed here; that matters only if the job fails.
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{split}.jsonl could not be tokenized:\n{done.stdout}{done.stderr}")
    print(f"corpus: {done.stdout.splitlines()[-1]}", flush=True)


def hash_fraction(path: str, salt: str) -> float:
    """Return a number in [0, 1) that depends on a path alone."""
    digest = hashlib.sha256(f"{salt}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_documents(root: Path, skipped: set[str]) -> dict[str, str]:
    """Return the text of every distinct .py file below ``root``, in the order of the paths' hashes.

    Keys are paths relative to ``root``; folders named in ``skipped`` are left out at any depth.
    """
    texts = {}
    digests = set()
    for folder, folders, files in root.walk():
        # walk() descends into what is left in the list.
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(files):
            # _sysconfigdata_*.py holds the paths of the machine that built this Python.
            if not name.endswith(".py") or name.startswith("_sysconfigd"):
                continue
            raw = (folder / name).read_bytes()
            # Packages ship copies of each other's files; each text counts once.
            digest = hashlib.sha256(raw).digest()
            if len(raw) > MAX_FILE_BYTES or digest in digests or not raw.strip():
                continue
            try:
                text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError:
                continue
            digests.add(digest)
            texts[(folder / name).relative_to(root).as_posix()] = text
    return dict(sorted(texts.items(), key=lambda item: hash_fraction(item[0], "order")))


def write_corpus(
    directory: Path, source: str, max_mb: float, weights: Sequence[float] = (90, 5, 5)
) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl of Python sources.

    A smaller corpus is a prefix of a larger one.

    Args:
        directory: the folder to write to.
        source: stdlib or site-packages.
        max_mb: text of all splits together, 10^6 bytes.
        weights: shares of train, valid and test, by number of files.
    """
    scheme = {"stdlib": "stdlib", "site-packages": "purelib"}[source]
    root = Path(sysconfig.get_path(scheme))
    skipped = SKIPPED
    if source == "stdlib":
        skipped = SKIPPED | STDLIB_SKIPPED
    # A file whose fraction is below the first edge is for training, below the second for
    # validation.
    train_edge = weights[0] / sum(weights)
    valid_edge = (weights[0] + weights[1]) / sum(weights)
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    bytes_left = int(max_mb * 1e6)
    for path, text in read_documents(root, skipped).items():
        bytes_left -= len(text.encode())
        if bytes_left < 0:
            break
        fraction = hash_fraction(path, "split")
        if fraction < train_edge:
            split = "train"
        elif fraction < valid_edge:
            split = "valid"
        else:
            split = "test"
        lines[split].append(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
    directory.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_whole(directory / f"{split}.jsonl", "".join(lines[split]).encode())
        print(f"corpus: {split}.jsonl has {len(lines[split])} files of {source}", flush=True)


def write_tokenizer(path: Path, text: Path, vocabulary: int, max_mb: float = 8.0) -> None:
    """Train a SentencePiece BPE model that reproduces source code to the character.

    It does not normalise, adds no leading space, keeps white space, and spells unknown characters
    in bytes. The same text gives the same model, to the byte.

    Args:
        path: the model to write.
        text: a file of ``write_corpus``.
        vocabulary: number of tokens.
        max_mb: how much of the text is read, 10^6 bytes.

    Raises:
        RuntimeError: the text is too short for so many tokens.
    """
    import sentencepiece

    sentences: list[str] = []
    bytes_left = int(max_mb * 1e6)
    with text.open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            document = json.loads(line)["text"]
            lines = document.splitlines(keepends=True)
            sentences += ("".join(part) for part in batched(lines, LINES_PER_SENTENCE))
            bytes_left -= len(document.encode())
            if bytes_left < 0:
                break
    model = io.BytesIO()
    options = dict(
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
        unk_id=0,
        bos_id=1,
        eos_id=2,  # --append-eod writes this one
        pad_id=3,
    )
    try:
        sentencepiece.SentencePieceTrainer.train(**options)
    except RuntimeError as error:
        raise RuntimeError(
            f"the text is too short for {vocabulary} tokens; ask for more of it ({error})"
        ) from None
    write_whole(path, model.getvalue())
