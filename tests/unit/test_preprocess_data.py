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


def test_runs_that_start_together_make_it_once(tmp_path: Path, monkeypatch) -> None:
    """The second one waits until the first one's files are whole."""
    made = []

    def slowly(name: str, *files: str) -> None:
        made.append(name)
        time.sleep(0.05)
        for file in files:
            (tmp_path / file).touch()

    monkeypatch.setattr(_corpus, "write_corpus", lambda *_: slowly("corpus", "train.jsonl"))
    monkeypatch.setattr(
        _corpus, "write_tokenizer", lambda *_: slowly("tokenizer", "tokenizer.model")
    )
    index = "_text_document.idx"
    monkeypatch.setattr(
        _corpus.subprocess, "run", lambda w, check: slowly("index", Path(w[6]).name + index)
    )
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda _: _corpus.prepare(tmp_path, "stdlib", 1, 512, ("train", "valid")), range(2)
            )
        )
    assert made == ["corpus", "tokenizer", "index", "index"]


def test_a_corpus_holds_real_sources_once_within_its_size(corpus, tmp_path):
    """The same each time; a smaller one is a prefix of it, in the same splits."""
    splits = {name: records(corpus / f"{name}.jsonl") for name in _corpus.SPLITS}
    everything = [record for split in splits.values() for record in split]
    assert all(splits.values()) and len(splits["train"]) > 0.8 * len(everything)
    assert len({record["text"] for record in everything}) == len(everything)
    assert 1.2e6 < sum(len(record["text"].encode()) for record in everything) <= 1.5e6
    for record in everything:
        parts = Path(record["path"]).parts
        assert not set(parts) & (_corpus.SKIPPED | _corpus.STDLIB_SKIPPED)
        assert (Path(os.__file__).parent / record["path"]).read_text("utf-8-sig") == record["text"]
    for megabytes, folder in ((1.5, tmp_path / "again"), (0.7, tmp_path / "small")):
        _corpus.write_corpus(folder, "stdlib", megabytes)
        for name, whole in splits.items():
            part = records(folder / f"{name}.jsonl")
            assert part == whole[: len(part)] and (megabytes < 1.5 or len(part) == len(whole))


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


def test_each_key_gets_its_dataset_without_empty_texts(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_bytes(
        b'\xef\xbb\xbf{"title": "7", "body": "1 2"}\r\n  \n{"title": "8", "body": "", "x": 3}'
    )
    flags = [
        "--input",
        data,
        "--json-keys",
        "title",
        "body",
        "--output-prefix",
        tmp_path / "deep" / "out",
    ]
    assert preprocess(*flags, *NULL) == 0
    assert read_back(tmp_path / "deep" / "out_title_document") == [[7], [8]]
    assert read_back(tmp_path / "deep" / "out_body_document") == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "1', "JSONDecodeError"),
        (
            b'{"body": "1", "id": 3}',
            "KeyError: 'text'; give JSON objects with text under text (--json-keys)",
        ),
        (b'{"text": "\xff"}', "UnicodeDecodeError"),
        (b'{"text": "1000"}', "a token is not below the vocabulary's size 1000"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_leaves_no_dataset(tmp_path, capsys, line, message, workers):
    """Nor does an earlier one stay as if it were this run's."""
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "1 2"}])
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--workers", workers]
    assert preprocess(*flags, *NULL) == 0
    data.write_bytes(b'{"text": "1 2"}\n\n' + line + b'\n{"text": "3"}\n')
    assert preprocess(*flags, *NULL) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --input {data} line 3: ") and error.count("\n") == 1
    assert message in error and not (tmp_path / "out_text_document.idx").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
        (["--input", "DIR/blank.jsonl"], "no text for DIR/out_text_document; see --json-keys"),
        (
            ["--tokenizer-type", "SentencePieceTokenizer"],
            "SentencePieceTokenizer: the tokenizer cannot be",
        ),
        (
            ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "DIR/blank.jsonl"],
            "cannot be built",
        ),
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

    with pytest.raises(InputError, match="--workers 2: one was killed"):
        list(preprocess_data.documents_of(encode, iter([("a", 1, b"")] * 8), 2))
