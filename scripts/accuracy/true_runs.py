#!/usr/bin/env python
"""The settings of the simulation in real tensor-parallel runs: pretrain_gpt.py on the same text and model.

    python -m scripts.accuracy.true_runs --work-dir /var/tmp/accuracy --tensor-parallel 4 --minutes 9 \\
        --settings none paper int6-signed --out results

One run after the other over all ranks; a record a run in results-true.jsonl, which is put beside the
simulated ones that are in --out. The corpus is that of ``run`` in the same work directory, or is made.
Weights and data order differ from the simulation's (they are Megatron's), but are alike for all settings of a
seed.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts._launch import torchrun
from scripts.accuracy.plan import scratch
from scripts.accuracy.records import load
from scripts.accuracy.settings import Setting, setting_of
from scripts.accuracy.tables import tables

SHAPES = {
    "111m": {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "batch": 32, "vocabulary": 16384},
    "tiny": {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "batch": 4, "vocabulary": 512},
}
VALID_TOKENS = {"111m": 2_000_000, "tiny": 2048}


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


def words_of(args: argparse.Namespace, setting: Setting, seed: int, report: Path) -> list[object]:
    """The flags of one run of pretrain_gpt.py."""
    shape, data = SHAPES[args.size], args.work_dir / "indexed"
    flags = f"""--num-layers {shape["layers"]} --hidden-size {shape["hidden"]}
        --num-attention-heads {shape["heads"]} --seq-length {shape["sequence"]}
        --max-position-embeddings {shape["sequence"]} --micro-batch-size {shape["batch"]}
        --global-batch-size {shape["batch"]} --train-iters {args.steps} --lr-decay-iters {args.steps}
        --lr-warmup-iters {min(100, args.steps // 4)} --lr 6e-4 --min-lr 0 --lr-decay-style cosine
        --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1 --init-method-std 0.02
        --transformer-impl local
        --attention-dropout 0 --hidden-dropout 0 --bf16 --untie-embeddings-and-output-weights
        --no-create-attention-mask-in-dataloader --seed {seed + 1}
        --tensor-model-parallel-size {args.tensor_parallel} --tokenizer-type NullTokenizer
        --vocab-size {shape["vocabulary"] - 1} --make-vocab-size-divisible-by 128
        --eval-interval {args.steps} --eval-iters {args.eval_iters} --log-interval 1"""
    paths = ["--train-data-path", data / "train", "--valid-data-path", data / "valid"]
    return [*flags.split(), *paths, "--compression-report", report, *setting.flags, *args.extra]


def measured(report: Path, steps: int) -> dict:
    """Losses of the steps and the last validation loss of a finished run."""
    rows = [json.loads(line) for line in (report / "history.jsonl").read_text().splitlines()]
    valid = [row for row in rows if row.get("split") == "valid"] or [row for row in rows if "split" in row]
    losses = {row["iteration"]: row["losses"]["lm loss"] for row in rows if "split" not in row}
    if len(losses) != steps or not valid:
        raise ValueError(f"{report}: {len(losses)} of {steps} losses, {len(valid)} validation losses")
    return {
        "losses": [round(losses[i], 5) for i in sorted(losses)],
        "valid": round(valid[-1]["losses"]["lm loss"], 6),
    }


def prepare(args: argparse.Namespace) -> None:
    """Corpus and indexed datasets, each made once; sets ``args.eval_iters``."""
    from scripts.accuracy import corpus

    folder, shape = args.work_dir / "corpus", SHAPES[args.size]
    if not (folder / "meta.json").exists():
        print(corpus.prepare(folder, vocab_size=shape["vocabulary"]), flush=True)
    for part, most in (("train", None), ("valid", VALID_TOKENS[args.size])):
        if not (args.work_dir / "indexed" / f"{part}.idx").exists():
            tokens = np.load(folder / f"{part}.npy")[:most]
            write_dataset(tokens, args.work_dir / "indexed" / part, corpus.EOS, shape["vocabulary"])
    valid_tokens = min(len(np.load(folder / "valid.npy", mmap_mode="r")), VALID_TOKENS[args.size])
    args.eval_iters = max(1, valid_tokens // (shape["sequence"] * shape["batch"]))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="that of scripts.accuracy.run")
    parser.add_argument("--out", type=Path, required=True, help="folder for results-true.jsonl")
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--settings", nargs="+", default=["none", "paper", "int6-signed"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1232)
    parser.add_argument("--size", choices=SHAPES, default="111m")
    parser.add_argument("--minutes", type=float, default=9.0)
    args, args.extra = parser.parse_known_args(argv)
    began, longest = time.time(), 0.0
    args.work_dir, args.out = args.work_dir.resolve(), args.out.resolve()
    prepare(args)
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results-true.jsonl"
    done = [record["id"] for record in load([results])] if results.exists() else []
    for job in scratch(args.settings, range(args.seeds), args.steps):
        name, start = job.id.replace("scratch", "true", 1), time.time()
        if name in done or start - began + longest > 60 * args.minutes:
            continue
        report = args.work_dir / "reports" / name.replace("/", "-")
        setting = setting_of(job.setting)
        words = words_of(args, setting, job.seed, report)
        status, end = torchrun(args.tensor_parallel, "pretrain_gpt.py", words, report.with_suffix(".log"))
        if status:
            print(f"{name} failed:\n{end}", flush=True)
            continue
        seconds = time.time() - start
        longest = max(longest, seconds)
        record = {**job.as_dict(), "id": name, "kind": "true", "setting": setting.as_dict()}
        record |= {"size": args.size, **measured(report, args.steps), "seconds": round(seconds, 1)}
        record["tensor_parallel"] = args.tensor_parallel
        with results.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(f"{name}: valid {record['valid']:.5f}, {seconds:.0f} s", flush=True)
    print(tables(load(sorted(args.out.glob("results-*.jsonl")))))


if __name__ == "__main__":
    main()
