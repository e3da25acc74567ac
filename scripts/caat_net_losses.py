#!/usr/bin/env python
"""Losses of CAAT-Nets on real text: sync fractions times codecs, same tokens, in one table.

    python scripts/caat_net_losses.py --output runs/caat_net

Each cell is `torchrun pretrain_gpt.py`: a GPT of 111 million parameters, trained on the sources of the
installed Python packages and validated on files of theirs that it has not seen. results.json and results.md
are written after every run; a run that is there already is not repeated, so that the table can be made in
parts (--time-limit). One more ordinary run with another seed shows the noise.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

import _convergence
from _codec_names import taco_flags
from demo import ROOT, gpu_count, prepare_data, show_progress

GPT_MODEL_ARGS = """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
    --max-position-embeddings 1024 --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights"""
TRAINING_ARGS = """--micro-batch-size 32 --global-batch-size 32 --lr 6e-4 --min-lr 6e-5
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --no-create-attention-mask-in-dataloader --eval-iters 16"""
ORDINARY = {"fraction": 1.0, "codec": "none"}

_PARAMETERS = re.compile(r"number of parameters on .* model parallel rank \(.*\): (\d+)")
_ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _convergence.add_arguments(parser, ROOT / "runs" / "caat_net")
    parser.add_argument("--fractions", nargs="+", type=float, default=[1.0, 0.5, 0.25])
    parser.add_argument(
        "--codecs", nargs="+", default=["none", "fp8-e4m3"], help="none, fp8-e4m3, int8:single, ..."
    )
    parser.add_argument("--iterations", type=int, default=600, help="of 32 sequences of 1024 tokens")
    parser.add_argument("--tensor-parallel", type=int, default=4, help="ranks")
    parser.add_argument("--corpus-mb", type=float, default=90.0, help="text for all splits, 10^6 bytes")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("extra", nargs="*", help="behind --: Megatron's flags, for example a smaller model")
    options = parser.parse_args()
    for codec in options.codecs:
        try:
            taco_flags(codec)
        except ValueError as error:
            parser.error(f"--codecs: {error}")
    return options


def train(name: str, flags: list[str], data: dict[str, str], seed: int, options) -> dict:
    """One training; returns its row's measured part.

    Raises:
        RuntimeError: it failed.
    """
    directory = options.output / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.tensor_parallel}", str(ROOT / "pretrain_gpt.py")]
    command += [*GPT_MODEL_ARGS.split(), *TRAINING_ARGS.split(), "--seed", str(seed)]
    command += ["--tensor-model-parallel-size", str(options.tensor_parallel)]
    command += ["--train-iters", str(options.iterations)]
    command += ["--eval-interval", str(max(1, options.iterations // 3))]
    command += ["--log-interval", str(max(1, min(10, options.iterations // 4)))]
    command += ["--train-data-path", data["train"], "--valid-data-path", data["valid"]]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", data["tokenizer"]]
    command += ["--compression-report", str(directory / "report"), *flags, *options.extra]
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1")
    gpus, share = _convergence.share(options, gpu_count(), options.tensor_parallel)
    command += share
    if gpus < options.tensor_parallel:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began, log = time.time(), directory / "log.txt"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            stream.write(line)
            if "validation loss" in line or line.startswith("error:"):
                show_progress(name, line)
    if process.wait():
        raise RuntimeError(f"the {name} run failed; its output is in {log}")
    text = log.read_text()
    report = json.loads((directory / "report" / "report.json").read_text())
    validation = [
        [row["iteration"], row["losses"]["lm loss"]]
        for row in report["history"]
        if row.get("split") == "valid"
    ]
    milliseconds = [float(found) for found in _ITERATION.findall(text)]
    return {
        "validation": validation,
        "validation_loss": validation[-1][1],
        "training_loss": report["summary"]["last_loss"],
        "tp_bytes_per_iteration": report["summary"]["tp_bytes_per_iteration"],
        "milliseconds_per_iteration": statistics.median(milliseconds[len(milliseconds) // 2 :]),
        "parameters_per_rank": int(_PARAMETERS.search(text)[1]),
        "seconds": round(time.time() - began, 1),
    }


def table(results: list[dict]) -> str:
    """One row a run, compared with the uncompressed ordinary run of its seed, and what a seed changes."""
    lines = [
        "| channels synchronised | codec | seed | validation loss | against ordinary | TP bytes an iteration "
        "| against ordinary | ms an iteration |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        base = _convergence.find(results, {**ORDINARY, "seed": row["seed"]})
        loss = _convergence.percent(_convergence.difference(row, results, ORDINARY))
        size = "-"
        if base is not None:
            size = f"{row['tp_bytes_per_iteration'] / base['tp_bytes_per_iteration']:.3f}"
        lines.append(
            f"| {row['fraction']:g} | {row['codec']} | {row['seed']} | {row['validation_loss']:.4f} | {loss} "
            f"| {row['tp_bytes_per_iteration']:,.0f} | {size} | {row['milliseconds_per_iteration']:.1f} |"
        )
    return "\n".join(lines) + "\n\n" + _convergence.noise_line(results, ORDINARY)


def main() -> None:
    """Run what is missing and write the table after each run."""
    options = parse_args()
    options.output = options.output.resolve()
    folder = options.data.resolve() if options.data else options.output / "data"
    data = prepare_data(folder, "site-packages", options.corpus_mb, options.vocabulary)
    common = {
        "tensor_parallel": options.tensor_parallel,
        "iterations": options.iterations,
        "extra": options.extra,
    }
    settings = [(fraction, codec) for codec in options.codecs for fraction in options.fractions]
    ordinary = (ORDINARY["fraction"], ORDINARY["codec"])
    runs = [
        {**common, "fraction": fraction, "codec": codec, "seed": seed}
        for (fraction, codec), seed in _convergence.plan(
            settings, ordinary, options.seeds, options.noise_seed
        )
    ]

    def train_one(run: dict) -> dict:
        flags = ["--caat-net-sync-fraction", f"{run['fraction']:g}", *taco_flags(run["codec"])]
        name = f"p{run['fraction']:g}-{run['codec'].replace(':', '-')}-seed{run['seed']}"
        return train(name, flags, data, run["seed"], options)

    def report(results: list[dict]) -> None:
        (options.output / "results.md").write_text(table(results))

    results = _convergence.train_missing(
        runs, train_one, options.output, options.time_limit, report, options.jobs
    )
    print(table(results), end="")


if __name__ == "__main__":
    main()
