#!/usr/bin/env python
"""Validation losses on real text under compression: the same tokens, weights and order for every setting.

    python scripts/losses.py --data-parallel 4 --codecs none sdp4bit "none --grad-reduce-in-bf16" --seeds 1 2
    python scripts/losses.py --pipeline-parallel 4 --codecs none pipeline-6bit tah-quant
    python scripts/losses.py --tensor-parallel 4 --model 111m --codecs none int6 \\
        "none --caat-net-sync-fraction 0.5" "int6 --caat-net-sync-fraction 0.5"
    python scripts/losses.py --expert-parallel 2 --codecs none int8 int6

Each run is `torchrun pretrain_gpt.py` with the sources of the installed Python packages (--model tiny: with
Python's own), validated and in the end tested on files that it has not seen. The table compares each
setting with the first one of the same seed; one more run of the first setting with another seed shows the
noise. results.json remembers every run under all that decides it: a script that is started again trains what
is missing. Flags that are not the script's own go to Megatron.
"""

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path

from _corpus import SPLITS, prepare
from _launch import (
    DIMENSIONS,
    ROOT,
    SETTINGS_HELP,
    BenchSetting,
    gpu_count,
    parse_setting,
    torchrun,
)

from megatron.compression.config import CompressionConfig
from megatron.compression.dimension import naming_flags
from megatron.compression.errors import one_line_errors
from megatron.compression.report.render import table as markdown

SHAPES = {
    "tiny": "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4",
    "small": "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --global-batch-size 64 --lr 1e-3 --min-lr 1e-4",
    "111m": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --global-batch-size 32 --lr 6e-4 --min-lr 6e-5 "
    "--untie-embeddings-and-output-weights",
}
TRAINING = """--transformer-impl local
    --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --no-create-attention-mask-in-dataloader"""
MOST_TOKENS = 32768
"""Of a micro-batch."""
PARALLEL = {
    "tensor": ("--tensor-model-parallel-size {ranks}", 1),
    "context": ("--context-parallel-size {ranks}", 1),
    "data": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 0),
    "pipeline": ("--pipeline-model-parallel-size {ranks}", 8),
    "expert": (
        "--expert-model-parallel-size {ranks} --num-experts 8 --moe-router-topk 2 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 0.01 --use-distributed-optimizer",
        0,
    ),
}
"""Flags of a dimension, and how many micro-batches make a batch; 0: one a rank."""


def parse_args() -> argparse.Namespace:
    """The command line; ``dimension`` and ``ranks`` say what is parallel."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    for dimension in DIMENSIONS:
        which.add_argument(f"--{dimension}-parallel", type=int, metavar="RANKS")
    what = f"settings, the first compared with: {SETTINGS_HELP}"
    add("--codecs", dest="settings", nargs="+", required=True, type=parse_setting, help=what)
    add("--seeds", type=int, nargs="+", default=[1], help="every setting with each of them")
    add("--noise-seed", type=int, default=2, help="of one more run of the first setting; 0: none")
    add("--model", choices=SHAPES, help="default: small on GPUs, tiny on CPUs")
    add("--iterations", type=int, help="default: 400 on GPUs, 60 on CPUs")
    add("--corpus-mb", type=float, help="text of all splits, 10^6 bytes (default: 90, of tiny 8)")
    add("--output", type=Path, help="folder for everything (default: runs/DIMENSION)")
    add("--data", type=Path, help="folder of the tokenized text (default: data in --output)")
    limit = "seconds: start no run that would end later, by the longest so far"
    add("--time-limit", type=float, default=math.inf, help=limit)
    options, options.extra = parser.parse_known_args()
    options.dimension = next(
        name for name in DIMENSIONS if getattr(options, f"{name}_parallel") is not None
    )
    options.ranks = getattr(options, f"{options.dimension}_parallel")
    config = getattr(CompressionConfig(), f"{options.dimension}_parallel")
    fields = "compression", "weights" if options.dimension == "data" else "backward"
    for setting in options.settings:
        with one_line_errors(), naming_flags():
            replace(config, **dict(zip(fields, setting.specs, strict=False)))
    return options


def plan(settings: list[str], seeds: list[int], noise_seed: int) -> list[tuple[str, int]]:
    """(setting, seed) of every run, in order: what a stop leaves compares with its baseline."""
    runs = [(setting, seed) for seed in seeds for setting in dict.fromkeys(settings)]
    if noise_seed and noise_seed not in seeds:
        runs.append((settings[0], noise_seed))
    return runs


def find(results: list[dict], run: dict) -> dict | None:
    """The result of a run, if it is there."""
    return next((result for result in results if run.items() <= result.items()), None)


def train_missing(
    runs: list[dict], train: Callable[[dict], dict], output: Path, time_limit: float = math.inf
) -> list[dict]:
    """Train what ``results.json`` in ``output`` does not hold yet, one run after the other, and write the
    table; the results of ``runs``, what decides each run. Raises: SystemExit: a training failed."""
    output.mkdir(parents=True, exist_ok=True)
    file, began, longest = output / "results.json", time.monotonic(), 0.0
    results = json.loads(file.read_text()) if file.exists() else []
    for run in runs:
        started = time.monotonic()
        if find(results, run) is not None or (longest and started - began + longest > time_limit):
            continue
        try:
            results.append({**run, **train(run)})
        except RuntimeError as error:
            sys.exit(f"error: {run['setting']!r}, logs in {output}: {error}")
        longest = max(longest, time.monotonic() - started)
        file.write_text(json.dumps(results, indent=1) + "\n")
    present = [result for run in runs if (result := find(results, run)) is not None]
    (output / "results.md").write_text(table(present, runs[0]["setting"]))
    if left := len(runs) - len(present):
        print(f"{left} of {len(runs)} runs are left: start again for them", flush=True)
    return present


def table(results: list[dict], baseline: str) -> str:
    """Markdown, one row a run: losses, and by class of traffic the megabytes of an iteration and their
    share of the uncompressed ones."""
    traffic = list(
        dict.fromkeys(name for result in results for name in result["bytes_per_iteration"])
    )
    traffic = [name for name in traffic if not name.endswith(".other")]
    columns = ["setting", "seed", "validation loss", f"against {baseline}", "test loss"]
    columns += [text for name in traffic for text in (f"{name} MB", "of uncompressed")]
    lines = [columns]
    for result in results:
        base = find(results, {"setting": baseline, "seed": result["seed"]})
        cells = [result["setting"], str(result["seed"]), f"{result['validation_loss']:.4f}", "-"]
        if base is not None and base is not result:
            cells[-1] = f"{result['validation_loss'] / base['validation_loss'] - 1:+.2%}"
        cells.append(f"{result['test_loss']:.4f}")
        for name in traffic:
            pair = result["bytes_per_iteration"].get(name, {"sent": 0.0, "uncompressed": 0.0})
            part = pair["sent"] / pair["uncompressed"] if pair["uncompressed"] else 0.0
            cells += [f"{pair['sent'] / 1e6:.3f}", f"{part:.3f}"]
        lines.append(cells)
    losses = [result["validation_loss"] for result in results if result["setting"] == baseline]
    noise = max(losses, default=1.0) / min(losses, default=1.0) - 1
    note = (
        f"A seed alone changes the validation loss of {baseline} by {noise:.2%}." if noise else ""
    )
    return "\n".join([*markdown(*lines), "", note]) + "\n"


def train(
    setting: BenchSetting, run: dict, data: dict[str, str], options: argparse.Namespace
) -> dict:
    """One training; what is kept of its report. Raises: RuntimeError: it failed."""
    name = "".join(c if c.isalnum() or c in ".=" else "-" for c in setting.text)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{run['seed']}-", dir=options.output))
    flags, parts = PARALLEL[options.dimension]
    shape, iterations = SHAPES[run["model"]].split(), run["iterations"]
    batch = int(shape[shape.index("--global-batch-size") + 1])
    micro = batch // (parts or options.ranks)
    micro = min(micro, MOST_TOKENS // int(shape[shape.index("--seq-length") + 1]))
    words = [*shape, *TRAINING.split(), *flags.format(ranks=options.ranks).split()]
    words += ["--micro-batch-size", micro]
    words += ["--train-iters", iterations, "--eval-interval", max(1, iterations // 4)]
    words += ["--eval-iters", 16, "--log-interval", max(1, min(10, iterations // 4))]
    words += [word for split in SPLITS for word in (f"--{split}-data-path", data[split])]
    words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", data["tokenizer"]]
    words += ["--compression-report", folder / "report", "--seed", run["seed"]]
    words += [*setting.words(options.dimension), *options.extra]
    environment = setting.environment | ({} if options.on_gpus else {"CUDA_VISIBLE_DEVICES": ""})
    began = time.monotonic()

    def show(line: str) -> None:
        log.write(line)
        if "validation loss at iteration" in line:
            print(f"{setting.text}: {line.strip().split(' | lm loss PPL')[0]}", flush=True)

    with (folder / "log.txt").open("w") as log:
        torchrun(options.ranks, "pretrain_gpt.py", words, show, **environment)
    summary = json.loads((folder / "report" / "report.json").read_text())["summary"]
    print(f"{setting.text}, seed {run['seed']}: {summary['validation_loss']:.4f}", flush=True)
    kept = (
        "validation_loss",
        "test_loss",
        "last_loss",
        "bytes_per_iteration",
        "milliseconds_per_iteration",
    )
    return {key: summary[key] for key in kept} | {"seconds": round(time.monotonic() - began, 1)}


def common_of(options: argparse.Namespace, data: dict[str, str]) -> dict:
    """What decides every run besides its setting and seed, the tokens of all splits among it."""
    tokens = sha256()
    for split in SPLITS:
        with open(f"{data[split]}.bin", "rb") as file:
            tokens.update(file_digest(file, "sha256").digest())
    return {
        "model": options.model,
        "ranks": options.ranks,
        "iterations": options.iterations or (400 if options.on_gpus else 60),
        "dimension": options.dimension,
        "extra": shlex.join(options.extra),
        "data": tokens.hexdigest()[:16],
    }


def main() -> None:
    """Train what is missing and print the table."""
    options = parse_args()
    options.on_gpus = gpu_count() >= options.ranks
    options.model = options.model or ("small" if options.on_gpus else "tiny")
    options.output = (options.output or ROOT / "runs" / options.dimension).resolve()
    folder = options.data.resolve() if options.data else options.output / "data"
    tiny = options.model == "tiny"
    text, megabytes, vocabulary = ("stdlib", 8, 2048) if tiny else ("site-packages", 90, 16384)
    data = prepare(folder, text, options.corpus_mb or megabytes, vocabulary)
    common, settings = (
        common_of(options, data),
        {setting.text: setting for setting in options.settings},
    )
    planned = plan(list(settings), options.seeds, options.noise_seed)
    runs = [{**common, "setting": text, "seed": seed} for text, seed in planned]

    def one(run: dict) -> dict:
        return train(settings[run["setting"]], run, data, options)

    results = train_missing(runs, one, options.output, options.time_limit)
    print("\n" + table(results, options.settings[0].text), end="")


if __name__ == "__main__":
    main()
