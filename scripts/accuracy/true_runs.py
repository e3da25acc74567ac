#!/usr/bin/env python
"""The settings of the simulation in real tensor-parallel runs: pretrain_gpt.py on the same text and model.

    python -m scripts.accuracy.true_runs --work-dir /var/tmp/accuracy --tensor-parallel 4 --minutes 9 \\
        --settings none paper int6-dither --out results

One run after the other over all ranks; a record a run in results-true.jsonl, which is put beside the
simulated ones that are in --out. The corpus is that of ``run`` in the same work directory, or is made.
Weights and data order differ from the simulation's (they are Megatron's), but are alike for all settings of a
seed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.accuracy.plan import scratch
from scripts.accuracy.records import load
from scripts.accuracy.settings import SETTINGS, Setting, parse_codec
from scripts.accuracy.tables import tables
from taco_kernels import CodecConfig

ROOT = Path(__file__).resolve().parent.parent.parent

SHAPES = {
    "111m": {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "batch": 32, "vocabulary": 16384},
    "tiny": {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "batch": 4, "vocabulary": 512},
}
VALID_TOKENS = {"111m": 2_000_000, "tiny": 2048}


def taco_flags(setting: Setting) -> list[str]:
    """The command-line flags of a setting.

    Raises:
        ValueError: no flags say this (one hop alone, a codec that is none of ours, the mean removed).
    """
    codecs = [parse_codec(codec) for codec in setting.codecs()]
    if all(codec is None for codec in codecs):
        return []
    if not all(isinstance(codec, CodecConfig) and codec.hadamard for codec in codecs) or setting.remove_mean:
        raise ValueError(f"{setting.name} cannot be said with the --taco flags")
    shared = {(codec.group_size, codec.scales) for codec in codecs}
    formats, roundings = [codec.format for codec in codecs], [codec.rounding for codec in codecs]
    if len(shared) > 1 or roundings[:2] != roundings[2:]:
        raise ValueError(f"{setting.name}: the hops differ in more than format and rounding")
    flags = ["--taco", "--taco-min-message-mb", "0", "--taco-format", ",".join(formats[:2])]
    if formats[2:] != formats[:2]:
        flags += ["--taco-backward-format", ",".join(formats[2:])]
    [(group_size, scales)] = shared
    flags += ["--taco-group-size", str(group_size), "--taco-scales", scales]
    return [*flags, "--taco-rounding", ",".join(roundings[:2])]


def write_dataset(tokens: np.ndarray, prefix: Path, eos: int, vocabulary: int) -> None:
    """Tokens as an indexed dataset, a document to each EOS (which it keeps)."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    for document in np.split(tokens, np.flatnonzero(tokens == eos) + 1):
        if len(document):
            builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
    builder.finalize(f"{prefix}.idx")


def command(args: argparse.Namespace, setting: Setting, seed: int, report: Path) -> list[str]:
    """The launch of one run."""
    shape, data = SHAPES[args.size], args.work_dir / "indexed"
    flags = {
        "--num-layers": shape["layers"],
        "--hidden-size": shape["hidden"],
        "--num-attention-heads": shape["heads"],
        "--seq-length": shape["sequence"],
        "--max-position-embeddings": shape["sequence"],
        "--micro-batch-size": shape["batch"],
        "--global-batch-size": shape["batch"],
        "--train-iters": args.steps,
        "--lr-decay-iters": args.steps,
        "--lr-warmup-iters": min(100, args.steps // 4),
        "--lr": 6e-4,
        "--min-lr": 0.0,
        "--lr-decay-style": "cosine",
        "--weight-decay": 0.1,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--clip-grad": 1.0,
        "--init-method-std": 0.02,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--seed": seed + 1,
        "--tensor-model-parallel-size": args.tensor_parallel,
        "--train-data-path": data / "train",
        "--valid-data-path": data / "valid",
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": shape["vocabulary"] - 1,
        "--make-vocab-size-divisible-by": 128,
        "--eval-interval": args.steps,
        "--eval-iters": args.eval_iters,
        "--log-interval": 1,
        "--compression-report": report,
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(args.tensor_parallel), str(ROOT / "pretrain_gpt.py")]
    launch += [str(word) for pair in flags.items() for word in pair]
    launch += ["--bf16", "--untie-embeddings-and-output-weights", "--no-create-attention-mask-in-dataloader"]
    if setting.sequence_parallel:
        launch.append("--sequence-parallel")
    return [*launch, *taco_flags(setting), *args.extra]


def measured(report: Path, steps: int) -> dict:
    """Losses, the last validation loss and what the ledger says of a finished run."""
    rows = [json.loads(line) for line in (report / "history.jsonl").read_text().splitlines()]
    valid = [row for row in rows if row.get("split") == "valid"] or [row for row in rows if "split" in row]
    losses = {row["iteration"]: row["losses"]["lm loss"] for row in rows if "split" not in row}
    if len(losses) != steps or not valid:
        raise ValueError(f"{report}: {len(losses)} of {steps} losses, {len(valid)} validation losses")
    return {
        "losses": [round(losses[i], 5) for i in sorted(losses)],
        "valid": round(valid[-1]["losses"]["lm loss"], 6),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="that of scripts.accuracy.run")
    parser.add_argument("--out", type=Path, required=True, help="folder for results-true.jsonl")
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--settings", nargs="+", default=["none", "paper", "int6-dither"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1232)
    parser.add_argument("--size", choices=SHAPES, default="111m")
    parser.add_argument("--minutes", type=float, default=9.0)
    args, args.extra = parser.parse_known_args(argv)
    began, shape = time.time(), SHAPES[args.size]
    args.work_dir, args.out = args.work_dir.resolve(), args.out.resolve()
    corpus, longest = args.work_dir / "corpus", 0.0
    if not (corpus / "meta.json").exists():
        from scripts.accuracy.corpus import prepare

        print(prepare(corpus, vocab_size=shape["vocabulary"]), flush=True)
    from scripts.accuracy.corpus import EOS

    for part in ("train", "valid"):
        if not (args.work_dir / "indexed" / f"{part}.idx").exists():
            tokens = np.load(corpus / f"{part}.npy")
            tokens = tokens[: VALID_TOKENS[args.size]] if part == "valid" else tokens
            write_dataset(tokens, args.work_dir / "indexed" / part, EOS, shape["vocabulary"])
    valid_tokens = min(len(np.load(corpus / "valid.npy", mmap_mode="r")), VALID_TOKENS[args.size])
    args.eval_iters = max(1, valid_tokens // (shape["sequence"] * shape["batch"]))
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results-true.jsonl"
    done = [record["id"] for record in load([results])] if results.exists() else []
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    for job in scratch(args.settings, range(args.seeds), args.steps):
        name, start = job.id.replace("scratch", "true", 1), time.time()
        if name in done or start - began + longest > 60 * args.minutes:
            continue
        report = args.work_dir / "reports" / name.replace("/", "-")
        setting = SETTINGS[job.setting]
        result = subprocess.run(
            command(args, setting, job.seed, report), env=environment, capture_output=True, text=True
        )
        if result.returncode:
            print(f"{name} failed:\n{(result.stdout + result.stderr)[-3000:]}", flush=True)
            continue
        seconds = time.time() - start
        longest = max(longest, seconds)
        record = {
            **job.as_dict(),
            "id": name,
            "kind": "true",
            "setting": setting.as_dict(),
            "size": args.size,
        }
        record |= {**measured(report, args.steps), "seconds": round(seconds, 1)}
        record |= {"valid_tokens": args.eval_iters * shape["batch"] * shape["sequence"]}
        record["tensor_parallel"] = args.tensor_parallel
        with results.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(f"{name}: valid {record['valid']:.5f}, {seconds:.0f} s", flush=True)
    print(tables(load(sorted(args.out.glob("results-*.jsonl")))))


if __name__ == "__main__":
    main()
