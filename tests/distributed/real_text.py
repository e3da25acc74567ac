"""A little real text, tokenised with the project's own scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


def make_dataset(directory: Path, megabytes: float = 0.5, vocabulary: int = 512) -> tuple[Path, Path]:
    """Write text, a SentencePiece tokenizer trained on it, and the tokenised dataset into ``directory``.

    Returns:
        The dataset's prefix (for --data-path) and the tokenizer's model.
    """
    import _cli
    import make_corpus
    import preprocess_data
    import train_tokenizer

    text, model, prefix = directory / "train.jsonl", directory / "tokenizer.model", directory / "train"
    steps = [
        (make_corpus.main, ["--output-dir", directory, "--max-mb", megabytes, "--split", "1,0,0"]),
        (train_tokenizer.main, ["--input", text, "--vocab-size", vocabulary, "--output", model]),
        (
            preprocess_data.main,
            [
                *("--input", text, "--output-prefix", prefix, "--append-eod", "--workers", 1),
                *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model),
            ],
        ),
    ]
    for main, flags in steps:
        assert _cli.run(main, list(map(str, flags))) == 0
    return directory / "train_text_document", model
