"""The corpus of Python's own sources, its tokenizer, and JSONL as an indexed dataset."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _corpus
import numpy as np
import preprocess_data
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.compression.errors import InputError

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
EOD = 999  # NullTokenizer: the last id
TRICKY = [
    "  two leading, two trailing  ",
    "\tif x:\r\n\t\treturn 12345\n\n\n",
    # an identity normaliser must neither compose nor fold
    "caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f680 a\u0301 \ufb01 \uff11",
    "<s></s><pad><unk><0x0A> ",
    "\x0c\x00\x1b",
]


def preprocess(*flags: object) -> int:
    return preprocess_data.main([str(flag) for flag in flags])


def write_jsonl(path: Path, documents: list[dict]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read_back(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with a small corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    _corpus.write_corpus(folder, "stdlib", 1.5)
    _corpus.write_tokenizer(folder / "tokenizer.model", folder / "train.jsonl", 1024)
    return folder


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Steps:
    """Stands for the three steps of ``_corpus.prepare``: notes which ran, writes small files."""

    def __init__(self, monkeypatch) -> None:
        self.ran: list[str] = []
        monkeypatch.setattr(_corpus, "write_corpus", self.write_corpus)
        monkeypatch.setattr(_corpus, "write_tokenizer", self.write_tokenizer)
        monkeypatch.setattr(_corpus, "write_dataset", self.write_dataset)

    def write_corpus(self, directory: Path, source: str, max_mb: float) -> None:
        self.ran.append("corpus")
        time.sleep(0.05)  # long enough for another run to come in
        for name in _corpus.TEXTS:
            (directory / name).write_text(f"{name} {source} {max_mb}")

    def write_tokenizer(self, path: Path, text: Path, vocabulary: int) -> None:
        self.ran.append("tokenizer")
        path.write_text(f"{vocabulary} of {text.read_text()}")

    def write_dataset(self, directory: Path, split: str) -> None:
        self.ran.append(split)
        tokenizer = (directory / _corpus.TOKENIZER).read_text()
        for suffix in ("bin", "idx"):
            (directory / f"{split}_text_document.{suffix}").write_text(f"{split} {tokenizer}")


ALL_STEPS = ["corpus", "tokenizer", "train", "valid", "test"]


def test_runs_that_start_together_make_a_corpus_once(tmp_path: Path, monkeypatch) -> None:
    """The second one waits until the first one's files are whole."""
    steps = Steps(monkeypatch)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(_corpus.prepare, tmp_path, "stdlib", 1, 512) for _ in range(2)]
        paths = [run.result() for run in runs]
    assert steps.ran == ALL_STEPS
    assert paths[0] == paths[1]


@pytest.mark.parametrize(
    "changed", [("site-packages", 1, 512), ("stdlib", 2, 512), ("stdlib", 1, 1024)]
)
def test_another_source_size_or_vocabulary_is_made_anew(
    tmp_path: Path, monkeypatch, capsys, changed
) -> None:
    """A folder that was made for something else is not used as if it were what is asked for."""
    steps = Steps(monkeypatch)
    _corpus.prepare(tmp_path, "stdlib", 1, 512)
    steps.ran.clear()
    paths = _corpus.prepare(tmp_path, *changed)
    assert steps.ran == ALL_STEPS
    assert (
        f"{changed[2]} of train.jsonl {changed[0]} {changed[1]}"
        in Path(paths["tokenizer"]).read_text()
    )
    earlier = "held 1 MB of stdlib with 512 tokens; it now gets"
    assert earlier in capsys.readouterr().out
    steps.ran.clear()
    _corpus.prepare(tmp_path, *changed)
    assert steps.ran == [], "the second run of the same finds everything"


@pytest.mark.parametrize(
    ("damaged", "made_again"),
    [
        ("train.jsonl", ALL_STEPS),
        ("tokenizer.model", ALL_STEPS[1:]),
        ("valid_text_document.bin", ["valid"]),
    ],
)
def test_half_a_file_is_made_again(tmp_path: Path, monkeypatch, damaged, made_again) -> None:
    """A cut file is noticed, and what was made of it is made again as well."""
    steps = Steps(monkeypatch)
    _corpus.prepare(tmp_path, "stdlib", 1, 512)
    content = (tmp_path / damaged).read_text()
    (tmp_path / damaged).write_text(content[: len(content) // 2])
    steps.ran.clear()
    _corpus.prepare(tmp_path, "stdlib", 1, 512)
    assert steps.ran == made_again
    assert (tmp_path / damaged).read_text() == content


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"request": 3}'])
def test_files_without_a_manifest_are_not_trusted(
    tmp_path: Path, monkeypatch, capsys, manifest
) -> None:
    """A run that is killed while it writes leaves a part of the text, and no manifest of it."""
    steps = Steps(monkeypatch)
    (tmp_path / "train.jsonl").write_text("half")
    if manifest is not None:
        (tmp_path / _corpus.MANIFEST).write_text(manifest)
    _corpus.prepare(tmp_path, "stdlib", 1, 512)
    assert steps.ran == ALL_STEPS
    assert (tmp_path / "train.jsonl").read_text() == "train.jsonl stdlib 1"
    assert "is unfinished; it is made anew" in capsys.readouterr().out


def test_a_killed_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "train.jsonl"
    _corpus.write_whole(path, b"whole")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_corpus.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        _corpus.write_whole(path, b"other")
    assert path.read_bytes() == b"whole"


@pytest.fixture(scope="module")
def splits(corpus) -> dict[str, list[dict]]:
    """The records of each split of a corpus of 1.5 MB of Python's own sources."""
    return {name: records(corpus / f"{name}.jsonl") for name in _corpus.SPLITS}


@pytest.fixture(scope="module")
def all_records(splits) -> list[dict]:
    return [record for split in splits.values() for record in split]


def test_no_split_is_empty_and_most_is_for_training(splits, all_records):
    assert all(splits.values())
    assert len(splits["train"]) > 0.8 * len(all_records)


def test_a_corpus_holds_each_text_once(all_records):
    assert len({record["text"] for record in all_records}) == len(all_records)


def test_a_corpus_fills_its_size(all_records):
    size = sum(len(record["text"].encode()) for record in all_records)
    assert 1.2e6 < size <= 1.5e6


def test_a_corpus_holds_whole_files_of_chosen_folders(all_records):
    library = Path(os.__file__).parent
    skipped = _corpus.SKIPPED | _corpus.STDLIB_SKIPPED
    for record in all_records:
        assert not set(Path(record["path"]).parts) & skipped
        assert (library / record["path"]).read_text("utf-8-sig") == record["text"]


def test_a_corpus_is_the_same_each_time(splits, tmp_path):
    _corpus.write_corpus(tmp_path, "stdlib", 1.5)
    for name, split in splits.items():
        assert records(tmp_path / f"{name}.jsonl") == split


def test_a_smaller_corpus_is_a_prefix_in_the_same_splits(splits, tmp_path):
    _corpus.write_corpus(tmp_path, "stdlib", 0.7)
    for name, split in splits.items():
        part = records(tmp_path / f"{name}.jsonl")
        assert part == split[: len(part)]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_the_tokenizer_gives_back_source_code(corpus, tmp_path, kind):
    """Through the dataset, to the character; special tokens do not come out of text."""
    model = corpus / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = TRICKY + [record["text"] for record in records(corpus / "valid.jsonl")]
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ["--tokenizer-type", kind, "--tokenizer-model", model, "--append-eod", "--workers", 2]
    assert preprocess("--input", data, "--output-prefix", tmp_path / "out", *flags) == 0
    documents = read_back(tmp_path / "out_text_document")
    assert all(
        document[-1] == processor.eos_id() and min(document[:-1]) > 3 for document in documents
    )
    assert [processor.decode_ids(document[:-1]) for document in documents] == texts
    assert len(texts[-1].encode()) / len(documents[-1]) > 1.8


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_keep_their_order(tmp_path, workers):
    """Files as given, patterns sorted, lines in order whoever tokenizes them."""
    generator = np.random.default_rng(0)
    documents = [
        generator.integers(0, EOD, size).tolist() for size in generator.integers(1, 41, 300)
    ]
    lines = [{"text": " ".join(map(str, document))} for document in documents]
    for name, part in (("z", lines[:100]), ("a", lines[100:150]), ("b", lines[150:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    flags = ["--input", tmp_path / "z.jsonl", tmp_path / "[ab].jsonl", "--workers", workers]
    assert preprocess(*flags, "--output-prefix", tmp_path / "out", "--append-eod", *NULL) == 0
    assert read_back(tmp_path / "out_text_document") == [[*document, EOD] for document in documents]


def test_each_key_gets_its_dataset_without_empty_texts(tmp_path, capsys):
    """A byte-order mark, Windows line ends and blank lines are skipped; empty texts are counted."""
    data = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"title": "7", "body": "1 2"}\r\n',
        b"  \n",
        b'{"title": "8", "body": "", "x": 3}\n',
        b'{"title": "9", "body": null}',
    ]
    data.write_bytes(b"".join(lines))
    prefix = tmp_path / "deep" / "out"
    flags = ["--input", data, "--json-keys", "title", "body", "--output-prefix", prefix]
    assert preprocess(*flags, *NULL) == 0
    assert read_back(tmp_path / "deep" / "out_title_document") == [[7], [8], [9]]
    assert read_back(tmp_path / "deep" / "out_body_document") == [[1, 2]]
    shown = capsys.readouterr().out
    assert f"{prefix}_title_document: 3 documents, 3 tokens\n" in shown
    body = f"{prefix}_body_document: 1 documents, 2 tokens; 2 records without text were left out"
    assert body in shown


BAD_LINES = {
    "cut": (b'{"text": "1', "not JSON (Unterminated string starting, column 10); give one"),
    "another key": (
        b'{"body": "1", "id": 3}',
        "no key 'text'; its keys are: 'body', 'id'. Name the right one with --json-keys",
    ),
    "Latin-1": (b'{"text": "\xff"}', "not UTF-8 (invalid start byte at byte 10); convert the file"),
    "a list": (b'["1"]', 'a JSON list, not an object; give lines such as {"text": "..."}'),
    "a number": (b'{"text": 5}', "'text' holds 5, which is not text; put it in quotes"),
    "deep": (b"[" * 100_000, "JSON that Python cannot read"),
    "a long number": (b'{"text": ' + b"9" * 5000 + b"}", "JSON that Python cannot read"),
    "no token": (b'{"text": "x"}', "the tokenizer cannot read this text (ValueError"),
    "no such token": (b'{"text": "1000"}', "a token outside of its vocabulary of 1000"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_leaves_nothing_behind(tmp_path, capsys, bad, workers):
    """Neither a part of the new dataset nor an earlier one, which would pass for it."""
    line, message = BAD_LINES[bad]
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "1 2"}])
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--workers", workers]
    assert preprocess(*flags, *NULL) == 0
    data.write_bytes(b'{"text": "1 2"}\n\n' + line + b'\n{"text": "3"}\n')
    assert preprocess(*flags, *NULL) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --input {data} line 3: ")
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == [data]


def test_ctrl_c_leaves_nothing_behind(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "1 2"}])

    def interrupted(*_: object):
        yield [[1, 2]]
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_data, "encode_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess("--input", data, "--output-prefix", tmp_path / "out", *NULL)
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
        (
            ["--input", "DIR/blank.jsonl"],
            "no text under the key 'text' (1 records without text); name another key",
        ),
        (
            ["--tokenizer-type", "SentencePieceTokenizer"],
            "SentencePieceTokenizer: the tokenizer cannot be",
        ),
        (
            ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "DIR/blank.jsonl"],
            "cannot be built",
        ),
        (["--input", "DIR"], "DIR: Is a directory"),
        (["--output-prefix", "DIR/good.jsonl/out"], "DIR/good.jsonl: File exists"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, capsys, flags, message):
    write_jsonl(tmp_path / "good.jsonl", [{"text": "1 2 3"}])
    (tmp_path / "blank.jsonl").write_text('\n{"text": ""}\n')
    base = ["--input", tmp_path / "good.jsonl", "--output-prefix", tmp_path / "out", *NULL]
    assert preprocess(*base, *[flag.replace("DIR", str(tmp_path)) for flag in flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message.replace("DIR", str(tmp_path)) in error


def test_a_killed_worker_is_reported():
    def encode(line):
        os.kill(os.getpid(), signal.SIGKILL)

    lines = [preprocess_data.Line("a", 1, b"")] * 8
    with pytest.raises(InputError, match="--workers 2: a worker was killed"):
        list(preprocess_data.encode_all(encode, iter(lines), 2))
