"""A little real text, tokenised with the project's own scripts."""

from pathlib import Path

import _corpus
import preprocess_data


def make_dataset(directory: Path, megabytes: float = 0.5) -> tuple[Path, Path]:
    """Write text, a SentencePiece tokenizer trained on it, and the tokenised dataset to a folder.

    Returns:
        The dataset's prefix (for --data-path) and the tokenizer's model.
    """
    text = directory / "train.jsonl"
    model = directory / "tokenizer.model"
    only_training = (1, 0, 0)
    _corpus.write_corpus(directory, "stdlib", megabytes, only_training)
    _corpus.write_tokenizer(model, text, 512)
    flags = ["--input", text, "--output-prefix", directory / "train", "--append-eod"]
    flags += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    assert preprocess_data.main([*map(str, flags), "--workers", "1"]) == 0
    return directory / "train_text_document", model
