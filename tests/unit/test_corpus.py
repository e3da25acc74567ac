"""The corpus made from Python's own sources, and the tokenizer trained on it."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import sentencepiece

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import _cli
import _corpus

TRICKY = [
    "",
    " ",
    "  two leading, two trailing  ",
    "\tif x:\r\n\t\treturn 12345\n\n\n",
    "def f():\n    return {\n        'a': 1,\n    }\n",
    # an identity normaliser must neither compose nor fold
    "caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f680 a\u0301 \ufb01 \uff11",
    "<s></s><pad><unk><0x0A> ",
    "\x0c\x00\x1b",
]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    _corpus.write_corpus(directory, "stdlib", 1.5)
    return directory


@pytest.fixture(scope="module")
def model(small_corpus) -> Path:
    path = small_corpus / "tokenizer.model"
    _corpus.write_tokenizer(path, small_corpus / "train.jsonl", 1024)
    return path


def test_corpus_is_the_same_each_time(small_corpus, tmp_path):
    _corpus.write_corpus(tmp_path, "stdlib", 1.5)
    for name in _corpus.SPLITS:
        again = (tmp_path / f"{name}.jsonl").read_bytes()
        assert again == (small_corpus / f"{name}.jsonl").read_bytes()


def test_corpus_holds_real_sources_once_within_the_budget(small_corpus):
    root = _corpus.source_root("stdlib")
    splits = {name: records(small_corpus / f"{name}.jsonl") for name in _corpus.SPLITS}
    everything = [record for split in splits.values() for record in split]
    assert all(splits.values())
    assert len({record["path"] for record in everything}) == len(everything)
    assert len({record["text"] for record in everything}) == len(everything)
    size = sum(len(record["text"].encode()) for record in everything)
    assert 1.2e6 < size <= 1.5e6
    for record in everything:
        assert not set(Path(record["path"]).parts) & (_corpus.ALWAYS_SKIPPED | _corpus.STDLIB_SKIPPED)
        with (root / record["path"]).open(encoding="utf-8-sig") as stream:
            assert stream.read() == record["text"]


def test_smaller_budget_is_a_prefix_and_keeps_the_split():
    documents = [_corpus.Document(f"package/module_{i}.py", "x" * (i + 1)) for i in range(500)]
    small = _corpus.choose(documents, 20_000)
    large = _corpus.choose(documents, 60_000)
    assert 0 < len(small) < len(large) < 500
    assert large[: len(small)] == small
    small_splits = _corpus.assign(small, [90, 5, 5])
    large_splits = _corpus.assign(_corpus.choose(documents, None), [90, 5, 5])
    for name in _corpus.SPLITS:
        assert set(small_splits[name]) <= set(large_splits[name])
    assert 400 < len(large_splits["train"]) < 490
    assert _corpus.assign(documents, [1, 0, 0])["train"] == documents


def test_unusable_files_are_left_out(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "empty.py").write_bytes(b"\n\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (tmp_path / "huge.py").write_bytes(b"0\n" * _corpus.MAX_FILE_BYTES)
    (tmp_path / "notes.txt").write_bytes(b"not Python")
    (tmp_path / "_sysconfigdata_x.py").write_bytes(b"prefix = '/home/builder'\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_bytes(b"other = 1\n")
    documents = _corpus.read_documents(tmp_path, _corpus.ALWAYS_SKIPPED)
    assert documents == [_corpus.Document("a.py", "x = 1\ny = 2\n")]


def test_existing_corpus_is_kept(tmp_path):
    (tmp_path / "valid.jsonl").write_text("mine")
    with pytest.raises(_cli.UsageError, match=r"valid\.jsonl exists already"):
        _corpus.write_corpus(tmp_path, "stdlib", 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["valid.jsonl"]
    assert (tmp_path / "valid.jsonl").read_text() == "mine"


def test_tokenizer_reproduces_source_code(small_corpus, model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = TRICKY + [record["text"] for record in records(small_corpus / "valid.jsonl")]
    for text in texts:
        assert processor.decode_ids(processor.encode_as_ids(text)) == text
    held_out = texts[-1]
    assert len(held_out.encode()) / len(processor.encode_as_ids(held_out)) > 1.8
    assert any(
        piece.strip("\u2581") == "" and len(piece) >= 4 for piece in map(processor.id_to_piece, range(1024))
    )


def test_tokenizer_training_is_deterministic(small_corpus, model, tmp_path):
    again = tmp_path / "again.model"
    _corpus.write_tokenizer(again, small_corpus / "train.jsonl", 1024)
    assert again.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_megatron_accepts_the_tokenizer(small_corpus, model, kind):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = Namespace(
        tokenizer_type=kind,
        tokenizer_model=str(model),
        chat_template=None,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=False,
    )
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == 1024
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 2, 3)
    text = records(small_corpus / "valid.jsonl")[0]["text"]
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert min(ids) > 3, "special tokens must not come out of text: training masks the padding token"


def test_interrupted_overwrite_keeps_the_old_files(tmp_path):
    outputs = [tmp_path / "a.bin", tmp_path / "a.idx"]
    for path in outputs:
        path.write_text("old")
    with pytest.raises(KeyboardInterrupt), _cli.staged(outputs, overwrite=True) as temporary:
        temporary[0].write_text("new")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.bin": "old", "a.idx": "old"}
