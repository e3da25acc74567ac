"""The demo of scripts/demo.sh: data, two trainings, a table, and summary.json.

Both trainings are `torchrun pretrain_gpt.py` on megatron-core's own loop, with the same data, seed and flags;
the second adds --taco. On CPUs they run over gloo, on two or more GPUs over NCCL.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import _corpus
from _launch import ROOT, gpu_count, torchrun

VOCABULARY = 2048
CORPUS_MB = 8

GPT_MODEL_ARGS = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local"""
TRAINING_ARGS = """--micro-batch-size 16 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0 --bf16 --seed 1
    --no-create-attention-mask-in-dataloader"""
# Every message of this small model is under the default threshold of 8 MiB.
TACO_ARGS = "--taco --compression-min-mb 0"

ITERATION = re.compile(
    r"iteration +(\d+)/ *(\d+) \|.*elapsed time per iteration \(ms\): ([\d.]+) .*lm loss: (\S+)"
)


def prepare_data(
    directory: Path,
    source: str = "stdlib",
    max_mb: float = CORPUS_MB,
    vocabulary: int = VOCABULARY,
    splits: Sequence[str] = ("train", "valid"),
) -> dict[str, str]:
    """Corpus, tokenizer and indexed datasets, each made once; returns their paths."""
    tokenizer = directory / "tokenizer.model"
    paths = {"tokenizer": str(tokenizer)}
    indexes = [directory / f"{split}_text_document.idx" for split in splits]
    complete = tokenizer.exists() and all(index.exists() for index in indexes)  # the text may be gone
    if not (complete or (directory / "train.jsonl").exists()):
        _corpus.write_corpus(directory, source, max_mb)
    if not tokenizer.exists():
        _corpus.write_tokenizer(tokenizer, directory / "train.jsonl", vocabulary)
    for split in splits:
        paths[split] = str(directory / f"{split}_text_document")
        if Path(paths[split] + ".idx").exists():
            continue
        words = [sys.executable, ROOT / "scripts" / "preprocess_data.py", "--append-eod"]
        words += ["--input", directory / f"{split}.jsonl", "--output-prefix", directory / split]
        words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer]
        subprocess.run(words, check=True)
    return paths


def train(name: str, extra: str, data: dict[str, str], ranks: int, gpus: int, options) -> dict:
    """One training on tensor-parallel ranks, its progress shown; the summary of its report."""
    directory = options.output / name
    shutil.rmtree(directory, ignore_errors=True)
    words = [*GPT_MODEL_ARGS.split(), *TRAINING_ARGS.split(), *extra.split()]
    words += ["--tensor-model-parallel-size", ranks, "--train-iters", options.iterations]
    words += ["--train-data-path", data["train"], "--valid-data-path", data["valid"]]
    words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", data["tokenizer"]]
    words += ["--eval-interval", max(1, options.iterations // 4), "--eval-iters", 8]
    words += ["--log-interval", min(5, options.iterations)]
    words += ["--compression-report", directory / "report", "--tensorboard-dir", directory / "tb"]
    environment = {"CUDA_VISIBLE_DEVICES": ""} if gpus < ranks else {}

    def show(line: str) -> None:
        if match := ITERATION.search(line):
            iteration, total, milliseconds, loss = match.groups()
            text = f"  {name} {iteration}/{total}  loss {float(loss):.4f}  {float(milliseconds):.0f} ms"
            print(text, flush=True)
        elif "validation loss at iteration" in line:
            print(f"  {name} {line.strip().split('| lm loss PPL')[0]}", flush=True)

    print(f"\n{name}: pretrain_gpt.py {' '.join(map(str, words))}", flush=True)
    try:
        torchrun(ranks, "pretrain_gpt.py", words, directory / "log.txt", show, **environment)
    except RuntimeError as error:
        sys.exit(f"error: {name}: {error}")
    return json.loads((directory / "report" / "report.json").read_text())["summary"]


def main() -> None:
    """Run everything and write summary.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "runs" / "demo", help="folder for everything")
    add("--iterations", type=int, default=120, help="training iterations of each run")
    add("--tensor-parallel", type=int, help="ranks (default: 2; 4 where there are that many GPUs)")
    options = parser.parse_args()
    options.output = options.output.resolve()
    gpus = gpu_count()
    ranks = options.tensor_parallel or (4 if gpus >= 4 else 2)
    data = prepare_data(options.output / "data")
    flags = {"baseline": "", "taco": TACO_ARGS}
    runs = {name: train(name, extra, data, ranks, gpus, options) for name, extra in flags.items()}
    keys = ("first_validation_loss", "validation_loss", "first_loss", "last_loss", "tp_bytes_per_iteration")
    summary = {name: {key: run[key] for key in keys} for name, run in runs.items()}
    baseline, taco = summary["baseline"], summary["taco"]
    summary["ratio"] = baseline["tp_bytes_per_iteration"] / taco["tp_bytes_per_iteration"]
    summary["validation_loss_difference"] = taco["validation_loss"] / baseline["validation_loss"] - 1
    backend = "nccl" if gpus >= ranks else "gloo"
    setup = {"tensor_parallel": ranks, "iterations": options.iterations, "backend": backend}
    summary["setup"] = setup | {"taco_flags": TACO_ARGS}
    (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{'':10} {'training loss':>21} {'validation loss':>16} {'TP bytes/iteration/rank':>24}")
    for name in flags:
        run = summary[name]
        losses = f"{run['first_loss']:.4f} -> {run['last_loss']:.4f}"
        print(f"{name:10} {losses:>21} {run['validation_loss']:16.4f} {run['tp_bytes_per_iteration']:24,.0f}")
    ratio, difference = summary["ratio"], summary["validation_loss_difference"]
    print(f"\ntensor-parallel bytes: {ratio:.3f}x fewer with --taco; validation loss {difference:+.2%}")
    words = [sys.executable, "-m", "megatron.compression.report", "--output", options.output / "comparison"]
    words += [options.output / name / "report" for name in flags]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(f"{options.output / 'summary.json'}; reports: {options.output}/{{baseline,taco}}/report/report.md")
    print(f"both runs side by side: {options.output / 'comparison' / 'comparison.md'}")


if __name__ == "__main__":
    main()
