"""JSONL to indexed dataset: what comes back, in which order, and what bad input does."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import _cli
import _corpus
import preprocess_data
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
EOD = 999  # NullTokenizer: the last id


def preprocess(*flags: object) -> int:
    return _cli.run(preprocess_data.main, [str(flag) for flag in flags])


def write_jsonl(path: Path, documents: list[dict]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def number_documents(count: int, seed: int = 0) -> list[list[int]]:
    """`count` lists of 1 to 40 ids below EOD."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, EOD, size=size).tolist() for size in generator.integers(1, 41, size=count)]


def as_records(documents: list[list[int]], key: str = "text") -> list[dict]:
    return [{key: " ".join(map(str, document))} for document in documents]


def read_back(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def left_behind(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch", [1, 64])
def test_documents_come_back_in_order(tmp_path, workers, batch, monkeypatch):
    monkeypatch.setattr(preprocess_data, "BATCH", batch)
    documents = number_documents(200)
    data = write_jsonl(tmp_path / "a.jsonl", as_records(documents))
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--append-eod", "--workers", workers]
    assert preprocess(*flags, *NULL) == 0
    assert read_back(tmp_path / "out_text_document") == [[*document, EOD] for document in documents]
    assert left_behind(tmp_path) == ["a.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_without_append_eod_and_without_final_newline(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_bytes(b'\xef\xbb\xbf{"text": "1 2 3"}\r\n\r\n{"text": ""}\n  \n{"text": "4"}')
    assert preprocess("--input", data, "--output-prefix", tmp_path / "out", *NULL) == 0
    assert read_back(tmp_path / "out_text_document") == [[1, 2, 3], [4]]


def test_files_are_taken_in_the_order_given_and_patterns_sorted(tmp_path):
    for name, value in (("b", 2), ("a", 1), ("z", 26)):
        write_jsonl(tmp_path / f"{name}.jsonl", as_records([[value]]))
    flags = ["--input", tmp_path / "z.jsonl", tmp_path / "[ab].jsonl", "--workers", 2]
    assert preprocess(*flags, "--output-prefix", tmp_path / "out", *NULL) == 0
    assert read_back(tmp_path / "out_text_document") == [[26], [1], [2]]


def test_each_key_gets_its_dataset(tmp_path):
    data = write_jsonl(
        tmp_path / "a.jsonl", [{"title": "7", "body": "1 2"}, {"title": "8", "body": "", "x": 3}]
    )
    flags = ["--input", data, "--json-keys", "title", "body", "--output-prefix", tmp_path / "deep" / "out"]
    assert preprocess(*flags, *NULL) == 0
    assert read_back(tmp_path / "deep" / "out_title_document") == [[7], [8]]
    assert read_back(tmp_path / "deep" / "out_body_document") == [[1, 2]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, np.uint16), (70000, np.int32)])
def test_dtype_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    data = write_jsonl(tmp_path / "a.jsonl", as_records([[vocab_size - 1, 0]]))
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size]
    assert preprocess("--input", data, "--output-prefix", tmp_path / "out", *flags) == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.index.dtype == dtype
    assert dataset[0].tolist() == [vocab_size - 1, 0]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*Path(_corpus.__file__).read_text().split("\n\n"), "caf\u00e9\t\U0001f680  \n", " x "]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece(tmp_path, texts, kind):
    model = tmp_path / "t.model"
    model.write_bytes(_corpus.train_tokenizer(texts * 4, 600))
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ["--tokenizer-type", kind, "--tokenizer-model", model, "--append-eod", "--workers", 2]
    assert preprocess("--input", data, "--output-prefix", tmp_path / "out", *flags) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    documents = read_back(tmp_path / "out_text_document")
    assert all(document[-1] == processor.eos_id() for document in documents)
    assert [processor.decode_ids(document[:-1]) for document in documents] == texts


def test_huggingface(tmp_path, texts):
    transformers = pytest.importorskip("transformers", reason="install the dev extra: pip install -e .[dev]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eod>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>")
    fast.save_pretrained(tmp_path / "hf")
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "hf", "--append-eod"]
    assert preprocess("--input", data, "--output-prefix", tmp_path / "out", "--workers", 2, *flags) == 0
    documents = read_back(tmp_path / "out_text_document")
    assert documents == [[*fast(text).input_ids, fast.eos_token_id] for text in texts]
    assert [fast.decode(document[:-1]) for document in documents] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "1', "line 3: not JSON"),
        (b'["1"]', "line 3: not a JSON object"),
        (
            b'{"body": "1", "id": 3}',
            "line 3: no text under the key 'text'; name the right one with --json-keys",
        ),
        (b'{"text": 5}', "line 3: no text under the key 'text'"),
        (b'{"text": "\xff"}', "line 3: not UTF-8"),
        (b'{"text": "1000"}', "line 3: token ids 1000..1000 are outside 0..999; raise --vocab-size"),
        (b'{"text": "3 -1"}', "line 3: token ids -1..3 are outside 0..999"),
        (b'{"text": "hello"}', "line 3: the tokenizer refuses the text"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_line_is_named_and_nothing_is_left(tmp_path, capsys, line, message, workers):
    data = tmp_path / "a.jsonl"
    data.write_bytes(b'{"text": "1 2"}\n\n' + line + b'\n{"text": "3"}\n')
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--workers", workers]
    assert preprocess(*flags, *NULL) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --input {data} ") and error.count("\n") == 1
    assert message in error
    assert left_behind(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
        (["--input", "DIR"], "is a directory; name the files"),
        (["--input", "DIR/packed.jsonl"], "is compressed; unpack it first"),
        (["--input", "DIR/blank.jsonl"], "no text under the key 'text' in any line"),
        (["--workers", "0"], "--workers 0: give at least 1"),
        (["--log-interval", "0"], "--log-interval 0: give at least 1"),
        (["--json-keys", "text", "text"], "--json-keys text text: name each key once"),
        (["--vocab-size", "-5"], "--vocab-size -5: give a positive number"),
        (["--vocab-size", "many"], "--vocab-size: invalid int value"),
        (["--split-sentences"], "unrecognized arguments: --split-sentences"),
        (["--append"], "unrecognized arguments: --append"),
        (["--tokenizer-type", "WordTokenizer"], "--tokenizer-type: invalid choice: 'WordTokenizer'"),
        (["--tokenizer-type", "SFTTokenizer"], "--tokenizer-type SFTTokenizer does not tokenize plain text"),
        (["--tokenizer-type", "SentencePieceTokenizer"], "needs --tokenizer-model"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file"),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "t.model"],
            "--tokenizer-model t.model: no such file",
        ),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "DIR/good.jsonl"],
            "the tokenizer cannot be built",
        ),
        (
            ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "DIR/good.jsonl"],
            "the tokenizer cannot be built",
        ),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "DIR"],
            "the tokenizer cannot be built",
        ),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "DIR/t.model"],
            "--vocab-size 1000: the tokenizer has 600 tokens; leave the flag out",
        ),
        (["--null-tokenizer-eod-id", "1000", "--append-eod"], "has no end-of-document token (id 1000)"),
    ],
)
def test_bad_flags(tmp_path, capsys, texts, flags, message):
    write_jsonl(tmp_path / "good.jsonl", [{"text": "1 2 3"}])
    (tmp_path / "packed.jsonl").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "blank.jsonl").write_text('\n{"text": ""}\n')
    (tmp_path / "t.model").write_bytes(_corpus.train_tokenizer(texts * 4, 600))
    before = left_behind(tmp_path)
    base = ["--input", tmp_path / "good.jsonl", "--output-prefix", tmp_path / "out", *NULL]
    assert preprocess(*base, *[flag.replace("DIR", str(tmp_path)) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error
    assert left_behind(tmp_path) == before


@pytest.mark.parametrize("missing", ["--input", "--output-prefix", "--tokenizer-type"])
def test_missing_flag_is_named(tmp_path, capsys, missing):
    data = write_jsonl(tmp_path / "a.jsonl", as_records([[1]]))
    flags = {"--input": data, "--output-prefix": tmp_path / "out", "--tokenizer-type": "NullTokenizer"}
    del flags[missing]
    assert preprocess(*[part for item in flags.items() for part in item], "--vocab-size", 10) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and missing in error
    assert left_behind(tmp_path) == ["a.jsonl"]


def test_existing_dataset_is_kept_without_overwrite(tmp_path, capsys):
    first = write_jsonl(tmp_path / "a.jsonl", as_records([[1]]))
    second = write_jsonl(tmp_path / "b.jsonl", as_records([[2, 3]]))
    output = ["--output-prefix", tmp_path / "out", *NULL]
    assert preprocess("--input", first, *output) == 0
    assert preprocess("--input", second, *output) == 2
    assert "out_text_document.bin exists already: add --overwrite" in capsys.readouterr().err
    assert read_back(tmp_path / "out_text_document") == [[1]]
    assert preprocess("--input", second, *output, "--overwrite") == 0
    assert read_back(tmp_path / "out_text_document") == [[2, 3]]
    second.write_text("broken\n")
    assert preprocess("--input", second, *output, "--overwrite") == 2
    assert read_back(tmp_path / "out_text_document") == [[2, 3]]


def test_terminated_run_leaves_nothing(tmp_path, capsys, monkeypatch):
    data = write_jsonl(tmp_path / "a.jsonl", as_records(number_documents(50)))
    add = preprocess_data.Writer.add

    def add_then_terminate(writer, piece):
        add(writer, piece)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(preprocess_data.Writer, "add", add_then_terminate)
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--workers", 2]
    assert preprocess(*flags, *NULL) == 130
    assert capsys.readouterr().err == "error: interrupted, nothing was written\n"
    assert left_behind(tmp_path) == ["a.jsonl"]


def test_killed_worker_is_reported():
    class Dies:
        vocab_size = 10

        def tokenize(self, text: str) -> list[int]:
            os.kill(os.getpid(), signal.SIGKILL)

    tokenize = preprocess_data.LineTokenizer(Dies(), ["text"], False)
    with pytest.raises(_cli.UsageError, match="--workers 2: a worker process died"):
        list(preprocess_data.in_order(tokenize, [(Path("a"), 1, b'{"text": "1"}')] * 8, 2))


def test_progress_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preprocess_data, "BATCH", 5)
    data = write_jsonl(tmp_path / "a.jsonl", as_records(number_documents(30)))
    flags = ["--input", data, "--output-prefix", tmp_path / "out", "--workers", 1]
    assert preprocess(*flags, "--log-interval", 10, *NULL) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("tokenized ") == 3
    assert "30 documents" in captured.out.splitlines()[-1] and "MB/s" in captured.out.splitlines()[-1]
