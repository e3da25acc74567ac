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
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--num-workers": "0",
    "--log-interval": "1",
    "--eval-iters": "1",
    "--global-batch-size": "4",
    "--train-iters": "3",
    "--lr-decay-iters": "3",
    "--lr-warmup-iters": "1",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder of short documents' data, and of a tokenizer of them as GPT-2's two files."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = []
    for page in sorted((REPO / "docs").glob("*.md")):
        lines += page.read_text().splitlines()
    documents = [line for line in lines if len(line) > 40][:1000]
    records = [json.dumps({"text": document}) for document in documents * 2]
    (folder / "text.jsonl").write_text("\n".join(records))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents, vocab_size=500, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    flags = f"""--input {folder}/text.jsonl --output-prefix {folder}/text --append-eod
        --workers 1 --tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json
        --merge-file {folder}/merges.txt"""
    assert preprocess_data.main(flags.split()) == 0
    return folder


def train(files: Path, saved: Path, *more: str, **options: str) -> Run:
    """Run the script's training at our sizes on four ranks.

    Args:
        files: the folder of the fixture of this name.
        saved: folder of checkpoints.
        more: flags that are added to the script's.
        options: of ``pretrain``: the entrypoint.
    """
    # torchrun is a stand-in that prints its arguments, a line each.
    fake(files, "torchrun", 'printf "%s\\n" "$@"')
    tokenizer = (files / "vocab.json", files / "merges.txt")
    data = files / "text_text_document"
    env = environment()
    env["PATH"] = f"{files}:{env['PATH']}"
    command = ["bash", SCRIPT, saved, saved / "tensorboard", *tokenizer, data, *more]
    arguments = printed(command, env, files)
    flags = arguments[arguments.index("pretrain_gpt.py") + 1 :]
    for index, flag in enumerate(flags):
        if flag in SIZES:
            flags[index + 1] = SIZES[flag]
    return pretrain(*flags, ranks=4, **options)


@pytest.fixture(scope="module")
def uncompressed(files: Path, tmp_path_factory) -> Run:
    """The script as it is, through pretrain_gpt.py, in fp16."""
    return train(files, tmp_path_factory.mktemp("uncompressed"), *LAYOUT.split())


@pytest.fixture(scope="module")
def compressed(files: Path, tmp_path_factory) -> Run:
    """The script with compression, through an entrypoint that knows nothing of us."""
    flags = [*LAYOUT.split(), *COMPRESSION.split()]
    saved = tmp_path_factory.mktemp("compressed")
    script = "tests/distributed/ways_in/unedited.py"
    return train(files, saved, *flags, script=script, through="megatron/compression/__main__.py")


@pytest.mark.parametrize("variant", ["uncompressed", "compressed"])
def test_the_script_trains(variant: str, request) -> None:
    run = request.getfixturevalue(variant)
    assert sorted(run.losses)[-1] == 3
    assert all(math.isfinite(loss) for loss in run.losses.values())


@pytest.mark.parametrize("variant", ["uncompressed", "compressed"])
def test_the_ledger_knows_every_byte(variant: str, request) -> None:
    assert UNKNOWN not in request.getfixturevalue(variant).output


def test_compression_changes_the_losses_a_little(uncompressed: Run, compressed: Run) -> None:
    assert compressed.losses == pytest.approx(uncompressed.losses, rel=0.01)
    assert compressed.losses != uncompressed.losses


def test_every_channel_of_activations_has_payloads(compressed: Run) -> None:
    check_channels(compressed, ACTIVATIONS[:4])


def test_no_hub_is_asked_for_a_tokenizer_whose_files_are_there(compressed: Run) -> None:
    assert "huggingface.co" not in compressed.output
