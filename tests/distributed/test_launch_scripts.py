"""A launch script as Megatron-LM's users have it, in tests/data/scripts: only sizes are changed.

It runs as it is and, with compression added, through an entrypoint that knows nothing of us.
"""

import json
import math
from pathlib import Path

import preprocess_data
import pytest
from tokenizers import ByteLevelBPETokenizer

from tests.distributed.launch import REPO, UNKNOWN, Run, pretrain
from tests.distributed.test_examples import environment, fake, printed
from tests.distributed.test_matrix import ACTIVATIONS, check_channels

SCRIPT = REPO / "tests" / "data" / "scripts" / "gpt3_175b.sh"
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --initial-loss-scale 65536"
)
COMPRESSION = "--taco --compression-min-mb 0 --pp-compression pipeline-6bit"

# What makes the script small; a flag that it does not have is left out.
SIZES = {
    **{
        "--num-layers": "2",
        "--hidden-size": "64",
        "--num-attention-heads": "4",
        "--seq-length": "64",
    },
    **{
        "--max-position-embeddings": "64",
        "--num-workers": "0",
        "--log-interval": "1",
        "--eval-iters": "1",
    },
    **{
        "--global-batch-size": "4",
        "--train-iters": "3",
        "--lr-decay-iters": "3",
        "--lr-warmup-iters": "1",
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder of short documents' data, and of a tokenizer of them as GPT-2's two files."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = [
        line
        for path in sorted((REPO / "docs").glob("*.md"))
        for line in path.read_text().splitlines()
    ]
    documents = [line for line in lines if len(line) > 40][:1000]
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": line}) for line in documents * 2)
    )
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents, vocab_size=500, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    flags = f"""--input {folder}/text.jsonl --output-prefix {folder}/text --append-eod --workers 1
        --tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"""
    assert preprocess_data.main(flags.split()) == 0
    return folder


def train(files: Path, saved: Path, *more: str, **how: str) -> Run:
    """What the script hands to pretrain_gpt.py, at our sizes, on four ranks; ``how``: by what entrypoint."""
    fake(files, "torchrun", 'printf "%s\\n" "$@"')
    tokenizer = (files / "vocab.json", files / "merges.txt")
    env = environment()
    env["PATH"] = f"{files}:{env['PATH']}"
    command = [
        "bash",
        SCRIPT,
        saved,
        saved / "tensorboard",
        *tokenizer,
        files / "text_text_document",
        *more,
    ]
    words = printed(command, env, files)
    words = words[words.index("pretrain_gpt.py") + 1 :]
    for flag, value in SIZES.items():
        for place in [place for place, word in enumerate(words) if word == flag]:
            words[place + 1] = value
    return pretrain(*words, ranks=4, **how)


def test_gpt3(files: Path, tmp_path: Path) -> None:
    """fp16: both train, to nearly the same losses; the second sends payloads in every channel, and nothing
    that the ledger does not know."""
    plain = train(files, tmp_path / "plain", *LAYOUT.split())
    how = {
        "script": "tests/distributed/ways_in/unedited.py",
        "through": "megatron/compression/__main__.py",
    }
    run = train(files, tmp_path / "compressed", *LAYOUT.split(), *COMPRESSION.split(), **how)
    for one in (plain, run):
        assert sorted(one.losses)[-1] == 3 and all(map(math.isfinite, one.losses.values()))
        assert UNKNOWN not in one.output
    assert run.losses == pytest.approx(plain.losses, rel=0.01) and run.losses != plain.losses
    check_channels(run, ACTIVATIONS[:4])
    assert "huggingface.co" not in run.output, (
        "no hub is asked for a tokenizer whose files are there"
    )
