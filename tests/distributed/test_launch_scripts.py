"""Launch scripts as Megatron-LM's users have them: only sizes are changed, and compression is added.

tests/data/scripts holds them. GPT-3's runs as it is and compressed; what cannot run here is refused in one
line.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedRun, pretrain
from tests.distributed.test_examples import environment, fake

REPO = Path(__file__).parents[2]
SCRIPTS = REPO / "tests" / "data" / "scripts"
UNEDITED = "tests/distributed/ways_in/unedited.py"
COMPRESSED_TP = "--taco --compression-min-mb 0"
TENSOR, STAGES = ("tp.forward", "tp.backward"), ("pp.forward", "pp.backward")

# What makes a script small; a flag that it does not have is left out.
SIZES = {
    **{"--num-layers": "2", "--hidden-size": "64", "--num-attention-heads": "4", "--ffn-hidden-size": "160"},
    **{"--num-query-groups": "2", "--kv-channels": "16", "--seq-length": "64"},
    **{"--max-position-embeddings": "64", "--vocab-size": "512", "--num-workers": "0"},
    **{"--global-batch-size": "4", "--train-iters": "3", "--lr-decay-iters": "3", "--lr-warmup-iters": "1"},
    **{"--train-samples": "12", "--lr-decay-samples": "10", "--lr-warmup-samples": "4"},
    **{"--log-interval": "1", "--eval-iters": "1"},
}


class Files:
    """Short documents, a tokenizer of them as GPT-2's two files and as a Hugging Face folder, their data."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(REPO / "scripts"))
        import preprocess_data
        from tokenizers import ByteLevelBPETokenizer
        from transformers import PreTrainedTokenizerFast

        self.folder, text = folder, folder / "text.jsonl"
        here = Path(math.__doc__ and __file__).parents[2]
        lines = [
            line for path in sorted((here / "docs").glob("*.md")) for line in path.read_text().splitlines()
        ]
        documents = [line for line in lines if len(line) > 40][:1000]
        text.write_text("\n".join(json.dumps({"text": line}) for line in documents * 2))
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(documents, vocab_size=500, special_tokens=["<|endoftext|>"])
        bpe.save_model(str(folder))
        bpe.save(str(folder / "bpe.json"))
        whole = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"), eos_token="<|endoftext|>")
        whole.save_pretrained(folder / "huggingface")
        self.gpt2 = [str(folder / "vocab.json"), str(folder / "merges.txt")]
        self.huggingface, self.data = str(folder / "huggingface"), str(folder / "text_text_document")
        flags = f"""--input {text} --output-prefix {folder}/text --append-eod --workers 1 --tokenizer-type
            GPT2BPETokenizer --vocab-file {self.gpt2[0]} --merge-file {self.gpt2[1]}"""
        assert preprocess_data.main(flags.split()) == 0

    def arguments(self, script: str) -> list[str]:
        """The positional arguments of a script; its checkpoints go to a folder of their own."""
        saved = self.folder / f"{script}-{len(list(self.folder.iterdir()))}"
        saved.mkdir()
        more = {"gpt3_175b": [*self.gpt2, self.data], "qwen2_5_7b": [self.huggingface, self.data]}
        return [str(saved), str(saved / "tensorboard"), *more.get(script, [])]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("scripts"))


def flags_of(files: Files, script: str, *more: str, **variables: str) -> list[str]:
    """What the script hands to pretrain_gpt.py, at our sizes."""
    fake(files.folder, "torchrun", 'printf "%s\\n" "$@"')
    env = environment(**variables)
    words = subprocess.run(
        ["bash", SCRIPTS / f"{script}.sh", *files.arguments(script), *more],
        env=env | {"PATH": f"{files.folder}:{env['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    words = words[words.index("pretrain_gpt.py") + 1 :]
    for flag, value in SIZES.items():
        for place in [place for place, word in enumerate(words) if word == flag]:
            words[place + 1] = value
    return words


def train(
    files: Files, script: str, *more: str, ranks: int = 4, unedited=False, **variables: str
) -> ForkedRun:
    """Run a script; ``unedited``: by an entrypoint that knows nothing of us, through ours."""
    how = {"script": UNEDITED, "through": "megatron/compression/__main__.py"} if unedited else {}
    flags = flags_of(files, script, *more, **variables)
    return pretrain(*flags, ranks=ranks, directory=files.folder, check=False, **how)


def check_compressed(plain: ForkedRun, run: ForkedRun, channels: tuple[str, ...], iterations: int) -> None:
    """Both runs trained, to nearly the same losses; the second sent payloads in every channel, and nothing
    that the ledger does not know."""
    for one in (plain, run):
        assert one.returncode == 0, one.output[-3000:]
        assert sorted(one.losses)[-1] == iterations and all(map(math.isfinite, one.losses.values()))
        assert "that the ledger does not know" not in one.output
    assert run.losses == pytest.approx(plain.losses, rel=0.01) and run.losses != plain.losses
    for channel in channels:
        rows = [row for rank in run.ranks for row in rank.ledger if row["traffic"] == channel]
        sent = {row["kind"]: row["sent_bytes"] for row in rows if row["sent_bytes"]}
        assert set(sent) == {"compressed"}, channel


def test_gpt3(files: Files) -> None:
    """Vocabulary and merges from files, fp16; compressed by way of an unedited script."""
    small = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    small += " --initial-loss-scale 65536"
    plain = train(files, "gpt3_175b", *small.split())
    words = f"{small} {COMPRESSED_TP} --pp-compression pipeline-6bit"
    run = train(files, "gpt3_175b", *words.split(), unedited=True)
    check_compressed(plain, run, TENSOR + STAGES, 3)
    assert "huggingface.co" not in run.output, "no hub is asked for a tokenizer whose files are there"


ENGINE = (
    "needs Transformer Engine, which is not installed: run scripts/setup.sh --with-transformer-engine, or"
)


@pytest.mark.parametrize(
    ("script", "more", "line"),
    [
        ("llama3_8b_h100", "--taco", f"--fp8-format {ENGINE} remove --fp8-format"),
        ("qwen2_5_7b", "--taco", f"--transformer-impl transformer_engine {ENGINE} use --transformer-impl"),
    ],
)
def test_what_cannot_run_is_one_line(files: Files, script: str, more: str, line: str) -> None:
    """Before anything is trained, with the reason and what to do."""
    small = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1"
    run = train(files, script, *small.split(), *more.split(), ranks=2, DTYPE="fp8")
    assert run.returncode == 2 and "Traceback" not in run.output, run.output[-3000:]
    assert len(run.errors) == 1 and line in run.errors[0], run.errors
