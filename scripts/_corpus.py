"""The Python sources on this machine as a text corpus, and a tokenizer of it: real data without a download.

Files are assigned to a split by a hash of their relative path, so the same Python gives the same corpus on
every machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _cli import staged

SPLITS = ("train", "valid", "test")

# Left out of the standard library: what distributions package separately or strip (the corpus has to be the
# same with all of them) and code-page tables, near copies of each other that would leak between splits.
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
    """Directory of `stdlib` or `site-packages`, for the interpreter that runs this script."""
    return Path(sysconfig.get_path({"stdlib": "stdlib", "site-packages": "purelib"}[source]))


def read_documents(root: Path, skipped: frozenset[str]) -> list[Document]:
    """Every distinct UTF-8 .py file under `root` that is not empty or too large, in path order."""
    documents, seen = [], set()
    for path in sorted(_walk(root, skipped), key=lambda path: path.relative_to(root).as_posix()):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if len(raw) > MAX_FILE_BYTES or digest in seen:
            continue
        try:
            text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            seen.add(digest)
            documents.append(Document(path.relative_to(root).as_posix(), text))
    return documents


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


def write_corpus(directory: Path, source: str, max_mb: float, weights: Sequence[float] = (90, 5, 5)) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl, one {"text": ..., "path": ...} object a line.

    Args:
        source: stdlib or site-packages.
        max_mb: text of all splits, 10^6 bytes.
        weights: of the splits, by file.
    """
    skipped = ALWAYS_SKIPPED | (STDLIB_SKIPPED if source == "stdlib" else frozenset())
    documents = read_documents(source_root(source), skipped)
    splits = assign(choose(documents, int(max_mb * 1e6)), weights)
    with staged([directory / f"{name}.jsonl" for name in SPLITS], overwrite=False) as temporary:
        for name, path in zip(SPLITS, temporary, strict=True):
            lines = [
                json.dumps({"text": one.text, "path": one.path}, ensure_ascii=False) + "\n"
                for one in splits[name]
            ]
            path.write_bytes("".join(lines).encode())
            size = sum(one.size for one in splits[name])
            print(f"{name}.jsonl: {len(lines)} files of {source}, {size / 1e6:.2f} MB of text", flush=True)


# The end-of-document token that --append-eod writes is SentencePiece's </s>.
SPECIAL_IDS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3}
LINES_PER_SENTENCE = 20  # sentences that hold line ends let the BPE learn pieces such as ":\n"
TOKENIZER_MB = 8.0  # of text that write_tokenizer trains on at most


def read_texts(path: Path) -> list[str]:
    """The texts of a file of write_corpus."""
    with path.open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


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


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> bytes:
    """A serialized SentencePiece BPE model that reproduces source code to the character.

    No normalisation, no dummy prefix, whitespace kept, bytes as the fallback: decode(encode(text)) == text,
    except that U+2581, SentencePiece's own mark for a space, comes back as a space. The same input gives the
    same bytes.

    Raises:
        RuntimeError: the texts cannot fill `vocab_size` pieces, or hold more characters than that.
    """
    import sentencepiece

    model = io.BytesIO()
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
    return model.getvalue()


def write_tokenizer(path: Path, text: Path, vocab_size: int) -> None:
    """Write the tokenizer of a file of write_corpus.

    It works with --tokenizer-type SentencePieceTokenizer and GPTSentencePieceTokenizer.
    """
    with staged([path], overwrite=False) as [temporary]:
        texts = sample(read_texts(text), int(TOKENIZER_MB * 1e6))
        temporary.write_bytes(train_tokenizer(texts, vocab_size))
