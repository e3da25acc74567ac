#!/usr/bin/env python
"""Train under different codecs, the last quarter of a training each: final-quarter continuation runs.

    python -m scripts.accuracy.run --work-dir W --settings taco int8 int6:group=64-sp tah-quant-pp sdp4bit-dp

The uncompressed run of each seed leaves a checkpoint at three quarters of its steps, from which every setting
(settings.py) continues on the same data. One worker a GPU does the runs of its seeds one after the other.
Results are a JSON line a run in W/results-SEED.jsonl; a later call does what is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _corpus
from _launch import ROOT, gpu_count

from scripts.accuracy.results import BASE, load, tables

SIZES = ("111m", "350m", "qwen2.5-0.5b", "qwen3-0.6b", "tiny")
LATE = 3 / 4
"""Where in the schedule the settings start."""
SETTINGS = ("none-tp2", "int8", "taco", "int6", "int6,,int5", "int5/int6,,int5", "int5", "int4")
"""Where none are named. none-tp2 is the same mathematics with other roundings."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="corpus, checkpoints, results")
    add("--settings", nargs="+", default=SETTINGS, help="specs, joined by + (settings.py)")
    add("--steps", type=int, default=1232, help="of a whole run")
    add("--seeds", type=int, default=3)
    add("--minutes", type=float, default=9.0, help="start no run that would end later")
    add("--size", choices=SIZES, default="111m")
    add("--corpus-mb", type=float, default=250, help="text of the installed packages, 10^6 bytes")
    add("--worker", type=int, nargs=2, help=argparse.SUPPRESS)  # number and count
    add("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.resolve()
    args.settings = [name for name in args.settings if name != BASE]
    return args


def sizes(args: argparse.Namespace):
    """ModelConfig and Schedule of ``--size``."""
    import torch

    from megatron.compression.huggingface.models import MODELS
    from scripts.accuracy.model import ModelConfig
    from scripts.accuracy.training import Schedule

    if args.size.startswith("qwen"):  # in the TACO paper's batches of 64 x 512, with its ranks
        qwen = MODELS[args.size.removeprefix("qwen")]
        parallel = {"ranks": 2, "stages": 2, "sequence": 512}
        model = ModelConfig(
            layers=qwen.layers, hidden=qwen.hidden, heads=qwen.heads, qwen=qwen, **parallel
        )
        return model, Schedule(args.steps, 64, 3e-4, 3e-5, warmup=args.steps // 10)
    if args.size == "tiny":
        return ModelConfig(512, 2, 64, 2, 32, torch.float32), Schedule(args.steps, 4, warmup=5)
    if args.size == "350m":
        return ModelConfig(layers=24, hidden=1024, heads=16), Schedule(args.steps)
    return ModelConfig(), Schedule(args.steps)


def ids_of(args: argparse.Namespace, seed: int) -> list[str]:
    """The runs of a seed: the uncompressed one first."""
    return [f"scratch/{BASE}/{seed}", *(f"ending/{name}/{seed}" for name in args.settings)]


def prepare(args: argparse.Namespace) -> dict[str, str]:
    """Paths of the tokenized text and its tokenizer, made once."""
    vocabulary = sizes(args)[0].vocabulary
    folder = args.work_dir / f"corpus-{vocabulary}"
    return _corpus.prepare(folder, "site-packages", args.corpus_mb, vocabulary, ("train", "valid"))


class Worker:
    """Runs on one device, whose results are appended to a file for each seed."""

    def __init__(self, args: argparse.Namespace, data: dict[str, str]) -> None:
        import torch

        from scripts.accuracy.model import GPT
        from scripts.accuracy.training import Corpus, Trainer, use_deterministic_kernels

        use_deterministic_kernels()
        self.args = args
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.config, self.schedule = sizes(args)
        model = GPT(self.config, compile_blocks=device == "cuda").to(device)
        corpus = Corpus(
            data, self.config.sequence, device, 2048 if args.size == "tiny" else 2_000_000
        )
        self.trainer = Trainer(model, corpus, self.schedule)
        self.seconds_per_step = 0.0

    def run_seed(self, seed: int) -> None:
        """Do what is missing of a seed while there is time."""
        args, file = self.args, self.args.work_dir / f"results-{seed}.jsonl"
        done = {record["id"] for record in load([file] if file.exists() else [])}
        checkpoint = args.work_dir / "checkpoints" / f"late-{seed}.pt"
        late = max(1, round(LATE * args.steps))
        base, *continuations = ids_of(args, seed)
        if base not in done or (not checkpoint.exists() and not done.issuperset(continuations)):
            if self._late(args.steps):
                return
            checkpoint.parent.mkdir(exist_ok=True)
            self.trainer.start(seed)
            self._record(file, base, BASE, seed, args.steps, {late: checkpoint})
        for run, name in zip(continuations, args.settings, strict=True):
            if run in done:
                continue
            if self._late(args.steps - late):
                return
            self.trainer.load(checkpoint)
            self._record(file, run, name, seed, args.steps - late)

    def _late(self, steps: int) -> bool:
        """Whether so many steps and an evaluation would end after the deadline."""
        return time.time() + 1.2 * steps * self.seconds_per_step > self.args.deadline

    def _record(
        self, file: Path, run: str, name: str, seed: int, steps: int, save: dict | None = None
    ) -> None:
        from scripts.accuracy.settings import setting_of

        setting, began = setting_of(name, self.config.ranks), time.time()
        result = self.trainer.run(setting, steps, seed, save)
        del result["losses"]
        record = {
            "id": run,
            "kind": run.split("/")[0],
            "seed": seed,
            "size": self.args.size,
            "steps": steps,
        }
        record |= {
            "setting": setting.as_dict(),
            "bits": setting.bits,
            "device": self.device,
            **result,
        }
        record["seconds"] = round(time.time() - began, 2)
        with file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        self.seconds_per_step = max(self.seconds_per_step, result["seconds_per_step"])
        print(f"{run}: valid {result['valid']:.5f}, {record['seconds']} s", flush=True)


def launch(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Prepare the corpus, start the workers, print the table. Raises: SystemExit: a worker failed."""
    deadline, gpus = time.time() + 60 * args.minutes, gpu_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    prepare(args)
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")  # deterministic
    workers, count = [], min(max(1, gpus), args.seeds)
    for worker in range(count):
        words = [sys.executable, "-m", "scripts.accuracy.run", *argv, "--work-dir", args.work_dir]
        words += ["--worker", worker, count, "--deadline", deadline]
        own = {"CUDA_VISIBLE_DEVICES": visible[worker]} if gpus else {}
        workers.append(subprocess.Popen(list(map(str, words)), env=environment | own, cwd=ROOT))
    statuses = [worker.wait() for worker in workers]
    records = load(sorted(args.work_dir.glob("results-*.jsonl")))
    print(tables(records))
    runs = {run for seed in range(args.seeds) for run in ids_of(args, seed)}
    if left := runs - {record["id"] for record in records}:
        print(f"{len(left)} of {len(runs)} runs are left: start again for them", flush=True)
    if any(statuses):
        raise SystemExit("error: a run failed; its error is above")


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    from megatron.compression.errors import CompressionConfigError
    from scripts.accuracy.settings import setting_of

    args = parse(argv)
    try:
        for name in args.settings:
            setting_of(name)
    except CompressionConfigError as error:
        raise SystemExit(f"error: {error}") from None
    if args.worker is None:
        launch(args, argv)
        return
    worker = Worker(args, prepare(args))
    for seed in range(args.worker[0], args.seeds, args.worker[1]):
        worker.run_seed(seed)


if __name__ == "__main__":
    main(sys.argv[1:])
