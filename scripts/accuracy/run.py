#!/usr/bin/env python
"""Train under different codecs, the last quarter of a training each: final-quarter continuation
runs.

    python -m scripts.accuracy.run --work-dir W --settings taco:outliers=off int8 int6:group=64-sp tah-quant-pp
    sdp4bit-dp

The uncompressed run of each seed leaves a checkpoint at three quarters of its steps. Every setting
(named as in settings.py) continues from it on the same data. There is one worker for each GPU, but
no more than seeds; it does the runs of its seeds one after the other. Results are a JSON line for
each run in W/results-SEED.jsonl. A later call does what is missing, and each call prints the table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts import _corpus
from scripts._launch import ROOT, gpu_count
from scripts.accuracy.results import BASE, load, tables

WIDTHS = {"30m": (10, 384), "60m": (14, 512), "111m": (12, 768), "210m": (14, 1024)}
"""Layers and hidden sizes of the models that show the trend with size; heads are of 64 channels."""
SIZES = (*WIDTHS, "350m", "qwen2.5-0.5b", "qwen3-0.6b", "tiny")
STEPS = 1232
"""Of a whole run of 111 M parameters. Those of the other sizes of WIDTHS see as many tokens for each
parameter: 0.36."""
LATE = 3 / 4
"""The part of the schedule after which the settings start."""
SETTINGS = (
    "none-tp2",
    "int8",
    "taco:outliers=off",
    "int6",
    "int6,,int5",
    "int5/int6,,int5",
    "int5",
    "int4",
)
"""What is trained without --settings. none-tp2 is the same mathematics with other roundings."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="folder of corpus, checkpoints and results")
    add("--settings", nargs="+", default=SETTINGS, help="codecs, joined by + (settings.py)")
    add(
        "--steps", type=int, help=f"steps of a whole run (default: {STEPS}, of 30m to 210m by size)"
    )
    add("--seeds", type=int, default=3, help="how many (default: 3)")
    add(
        "--minutes",
        type=float,
        default=9.0,
        help="start no run that would end later (default: 9)",
    )
    add("--size", choices=SIZES, default="111m", help="the model (default: 111m)")
    add(
        "--corpus-mb",
        type=float,
        default=250,
        help="text of the installed packages, 10^6 bytes (default: 250)",
    )
    # A worker's own: its number and how many there are, and when its time is over.
    add("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    add("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.resolve()
    args.settings = [name for name in args.settings if name != BASE]
    if args.steps is None:
        args.steps = default_steps(args.size)
    return args


def parameters_of(size: str) -> int:
    """Return the parameters of a size of WIDTHS, with 16384 tokens and sequences of 1024."""
    layers, hidden = WIDTHS[size]
    embeddings = (2 * 16384 + 1024) * hidden  # input, output and positions
    # A layer has 12 h^2 in its matrices, and 13 h in their biases and its norms.
    return embeddings + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def default_steps(size: str) -> int:
    """Return how many steps a whole run of a size has."""
    if size not in WIDTHS:
        return STEPS
    return round(STEPS * parameters_of(size) / parameters_of("111m"))


def claim(args: argparse.Namespace) -> None:
    """Note in the folder what its runs are of, which their names do not say.

    Raises:
        SystemExit: it has runs of another model, length or text. They would be compared with these.
    """
    file = args.work_dir / "runs.json"
    asked = {"size": args.size, "steps": args.steps, "corpus-mb": args.corpus_mb}
    if not file.exists():
        _corpus.write_whole(file, json.dumps(asked).encode())
        return
    earlier = json.loads(file.read_text())
    for name, value in asked.items():
        if earlier[name] != value:
            sys.exit(
                f"error: --work-dir {args.work_dir}: its runs are of --{name} {earlier[name]}, and not of "
                f"{value}; give the same, or another folder"
            )


def sizes(args: argparse.Namespace):
    """Return the ModelConfig and the Schedule of ``--size``."""
    import torch

    from megatron.compression.huggingface.models import MODELS
    from scripts.accuracy.model import ModelConfig
    from scripts.accuracy.training import Schedule

    if args.size.startswith("qwen"):
        # The TACO paper's ranks, and its batches of 64 x 512 tokens.
        qwen = MODELS[args.size.removeprefix("qwen")]
        model = ModelConfig(
            layers=qwen.layers,
            hidden=qwen.hidden,
            heads=qwen.heads,
            qwen=qwen,
            ranks=2,
            stages=2,
            sequence=512,
        )
        schedule = Schedule(
            args.steps, batch=64, learning_rate=3e-4, minimum=3e-5, warmup=args.steps // 10
        )
    elif args.size == "tiny":
        model = ModelConfig(
            vocabulary=512, layers=2, hidden=64, heads=2, sequence=32, dtype=torch.float32
        )
        schedule = Schedule(args.steps, batch=4, warmup=5)
    elif args.size in WIDTHS:
        layers, hidden = WIDTHS[args.size]
        model = ModelConfig(layers=layers, hidden=hidden, heads=hidden // 64)
        schedule = Schedule(args.steps)
    elif args.size == "350m":
        model = ModelConfig(layers=24, hidden=1024, heads=16)
        schedule = Schedule(args.steps)
    return model, schedule


def ids_of(args: argparse.Namespace, seed: int) -> list[str]:
    """Return the names of a seed's runs: the uncompressed one first, then a continuation for each
    setting."""
    return [f"scratch/{BASE}/{seed}", *(f"ending/{name}/{seed}" for name in args.settings)]


def prepare(args: argparse.Namespace) -> dict[str, str]:
    """Return the paths of the tokenized text and its tokenizer, which are made once."""
    model, _ = sizes(args)
    vocabulary = model.vocabulary
    folder = args.work_dir / f"corpus-{vocabulary}"
    return _corpus.prepare(folder, "site-packages", args.corpus_mb, vocabulary, ("train", "valid"))


class Worker:
    """Does runs on one device. Results are appended to a file for each seed.

    Args:
        args: the command line.
        data: paths of the tokenized text.
    """

    def __init__(self, args: argparse.Namespace, data: dict[str, str]) -> None:
        import torch

        from scripts.accuracy.model import GPT
        from scripts.accuracy.training import Corpus, Trainer, use_deterministic_kernels

        # A continuation has to be the same run as its beginning, to the bit.
        use_deterministic_kernels()
        self.args = args
        self.config, schedule = sizes(args)
        if torch.cuda.is_available():
            device = "cuda"
            self.device_name = torch.cuda.get_device_name()
        else:
            device = "cpu"
            self.device_name = "cpu"
        model = GPT(self.config, compile_blocks=device == "cuda").to(device)
        max_valid_tokens = 2048 if args.size == "tiny" else 2_000_000
        corpus = Corpus(data, self.config.sequence, device, max_valid_tokens)
        self.trainer = Trainer(model, corpus, schedule)
        self.seconds_per_step = 0.0
        """Of the slowest run so far."""

    def run_seed(self, seed: int) -> None:
        """Do what is missing of a seed while there is time."""
        args = self.args
        file = args.work_dir / f"results-{seed}.jsonl"
        done = {record["id"] for record in load([file] if file.exists() else [])}
        checkpoint = args.work_dir / "checkpoints" / f"late-{seed}.pt"
        late = max(1, round(LATE * args.steps))
        base, *continuations = ids_of(args, seed)
        needs_checkpoint = not done.issuperset(continuations)
        if base not in done or (needs_checkpoint and not checkpoint.exists()):
            if self._would_be_late(args.steps):
                return
            checkpoint.parent.mkdir(exist_ok=True)
            self.trainer.start(seed)
            self._run(file, base, BASE, seed, args.steps, {late: checkpoint})
        for run, name in zip(continuations, args.settings, strict=True):
            if run in done:
                continue
            if self._would_be_late(args.steps - late):
                return
            self.trainer.load(checkpoint)
            self._run(file, run, name, seed, args.steps - late)

    def _would_be_late(self, steps: int) -> bool:
        """Return whether so many steps, and an evaluation, would end after the deadline."""
        # A fifth more for the evaluation and for loading.
        seconds = 1.2 * steps * self.seconds_per_step
        return time.time() + seconds > self.args.deadline

    def _run(
        self, file: Path, run: str, name: str, seed: int, steps: int, save: dict | None = None
    ) -> None:
        """Train, and append a record of it to a file.

        Args:
            file: where the record goes.
            run: its id.
            name: the setting.
            seed: decides the order of the data.
            steps: how many to train from where the trainer is.
            save: checkpoints to write, by step.
        """
        from scripts.accuracy.settings import setting_of

        setting = setting_of(name, self.config.ranks)
        began = time.time()
        result = self.trainer.run(setting, steps, seed, save)
        del result["losses"]  # thousands of numbers, of which the table needs none
        record = {
            "id": run,
            "kind": run.split("/")[0],
            "seed": seed,
            "size": self.args.size,
            "steps": steps,
            "setting": setting.as_dict(),
            "bits": setting.bits,
            "device": self.device_name,
            **result,
            "seconds": round(time.time() - began, 2),
        }
        with file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        self.seconds_per_step = max(self.seconds_per_step, result["seconds_per_step"])
        print(f"{run}: valid {result['valid']:.5f}, {record['seconds']} s", flush=True)


def start_workers(
    args: argparse.Namespace, argv: Sequence[str], deadline: float
) -> list[subprocess.Popen]:
    """Start a worker for each GPU, or one without; no more than there are seeds.

    Args:
        args: the command line.
        argv: its words, which the workers get too.
        deadline: seconds since the epoch.
    """
    gpus = gpu_count()
    every_gpu = ",".join(map(str, range(gpus)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every_gpu).split(",")
    count = min(max(1, gpus), args.seeds)
    # Seeds are dealt out to the workers in turn, so more of them than seeds would idle.
    workers = []
    for number in range(count):
        words = [sys.executable, "-m", "scripts.accuracy.run", *argv, "--work-dir", args.work_dir]
        words += ["--worker", number, count, "--deadline", deadline]
        environment = dict(os.environ)
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = visible[number]
        workers.append(subprocess.Popen(list(map(str, words)), env=environment, cwd=ROOT))
    return workers


def launch(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Prepare the corpus, run the workers, and print the table.

    Raises:
        SystemExit: a worker failed, or the folder has other runs.
    """
    deadline = time.time() + 60 * args.minutes
    args.work_dir.mkdir(parents=True, exist_ok=True)
    claim(args)
    prepare(args)
    workers = start_workers(args, argv, deadline)
    # All are waited for: results of the others count where one has failed.
    statuses = [worker.wait() for worker in workers]
    records = load(sorted(args.work_dir.glob("results-*.jsonl")))
    print(tables(records))
    planned = {run for seed in range(args.seeds) for run in ids_of(args, seed)}
    missing = planned - {record["id"] for record in records}
    if missing:
        print(f"{len(missing)} of {len(planned)} runs are left: start again for them", flush=True)
    if any(statuses):
        sys.exit("error: a run failed; its error is above")


def main(argv: Sequence[str]) -> None:
    """Check the settings, then launch the workers or be one."""
    from megatron.compression.errors import CompressionConfigError
    from scripts.accuracy.settings import setting_of

    args = parse(argv)
    try:
        for name in args.settings:
            setting_of(name)
    except CompressionConfigError as error:
        sys.exit(f"error: {error}")
    if args.worker is None:
        launch(args, argv)
        return
    worker = Worker(args, prepare(args))
    number, count = args.worker
    for seed in range(number, args.seeds, count):
        worker.run_seed(seed)


if __name__ == "__main__":
    main(sys.argv[1:])
