#!/usr/bin/env python
"""Compare validation losses on real text: the same tokens, first weights and order for every
setting.

    python scripts/losses.py --data-parallel 4 --codecs none sdp4bit "none --grad-reduce-in-bf16"
    --seeds 1 2 python scripts/losses.py --pipeline-parallel 4 --codecs none pipeline-6bit tah-quant
    python scripts/losses.py --tensor-parallel 4 --model 111m --codecs none int6 \\
        "none --caat-net-sync-fraction 0.5" "int6 --caat-net-sync-fraction 0.5"
    python scripts/losses.py --expert-parallel 2 --codecs none int8 int6

Each run is `torchrun pretrain_gpt.py`. Its text are the sources of the installed Python packages
(--model tiny: Python's own). It is validated, and in the end tested, on files that it has not seen.
The table compares each setting with the first one of the same seed. One more run of the first
setting with another seed shows how much a seed alone changes.

results.json remembers every run under all that decides it, so a script that is started again trains
only what is missing. Flags that are not this script's go to Megatron.
"""

import argparse
import json
import math
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path

from _corpus import SPLITS, prepare, write_whole
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
from megatron.compression.errors import InputError, one_line_errors, spelled
from megatron.compression.names import FLAG_NAMES, PARALLELISMS
from megatron.compression.report.render import table as markdown


@dataclass(frozen=True)
class Shape:
    """A model, and how it is trained."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    """Tokens."""
    batch: int
    """Sequences of an iteration, over all ranks."""
    lr: str
    min_lr: str
    more: tuple[str, ...] = ()

    def flags(self) -> list:
        """Return Megatron's flags."""
        flags = ["--num-layers", self.layers, "--hidden-size", self.hidden]
        flags += ["--num-attention-heads", self.heads]
        flags += ["--seq-length", self.sequence, "--max-position-embeddings", self.sequence]
        flags += ["--global-batch-size", self.batch, "--lr", self.lr, "--min-lr", self.min_lr]
        return [*flags, *self.more]


SHAPES = {
    "tiny": Shape(4, 128, 4, sequence=128, batch=16, lr="2e-3", min_lr="2e-4"),
    "small": Shape(8, 512, 8, sequence=512, batch=64, lr="1e-3", min_lr="1e-4"),
    "111m": Shape(
        12,
        768,
        12,
        sequence=1024,
        batch=32,
        lr="6e-4",
        min_lr="6e-5",
        more=("--untie-embeddings-and-output-weights",),
    ),
}
TRAINING = """--transformer-impl local
    --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --no-create-attention-mask-in-dataloader"""
"""Flags of every run."""
MOST_TOKENS = 32768
"""Tokens of a micro-batch at most."""

LAYOUTS = {
    "tensor": "--tensor-model-parallel-size {ranks}",
    "context": "--context-parallel-size {ranks}",
    "data": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "pipeline": "--pipeline-model-parallel-size {ranks}",
    "expert": "--expert-model-parallel-size {ranks} --num-experts 8 --moe-router-topk 2 "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --use-distributed-optimizer",
}
"""Flags of each dimension."""

KEPT = (
    "validation_loss",
    "test_loss",
    "last_loss",
    "bytes_per_iteration",
    "milliseconds_per_iteration",
)
"""Figures of a run's report that results.json keeps."""


def parse_args() -> argparse.Namespace:
    """Return the command line; ``dimension`` and ``ranks`` say what is parallel."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parallel = parser.add_mutually_exclusive_group(required=True)
    for dimension in DIMENSIONS:
        parallel.add_argument(f"--{dimension}-parallel", type=int, metavar="RANKS")
    add = parser.add_argument
    add(
        "--codecs",
        dest="settings",
        nargs="+",
        required=True,
        type=parse_setting,
        metavar="SETTING",
        help=f"settings; the others are compared with the first. A setting is {SETTINGS_HELP}",
    )
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[1],
        help="train every setting with each (default: 1)",
    )
    add(
        "--noise-seed",
        type=int,
        default=2,
        help="train the first setting with this seed too; 0: do not (default: 2)",
    )
    add("--model", choices=SHAPES, help="default: small on GPUs, tiny on CPUs")
    add("--iterations", type=int, help="default: 400 on GPUs, 60 on CPUs")
    add("--corpus-mb", type=float, help="text of all splits, 10^6 bytes (default: 90; tiny: 8)")
    add("--output", type=Path, help="folder for everything (default: runs/DIMENSION)")
    add("--data", type=Path, help="folder of the tokenized text (default: below --output)")
    add(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds: start no run that would end later, judged by the longest run so far",
    )
    options, options.extra = parser.parse_known_args()
    # argparse has seen to it that one of them is given.
    for dimension in DIMENSIONS:
        ranks = getattr(options, f"{dimension}_parallel")
        if ranks is not None:
            options.dimension = dimension
            options.ranks = ranks
    for setting in options.settings:
        check_codecs(setting, options.dimension)
    return options


def check_codecs(setting: BenchSetting, dimension: str) -> None:
    """End the script with one line where a codec of a setting is unknown, before anything is
    trained."""
    parallelism = PARALLELISMS[f"{dimension}_parallel"]
    config = getattr(CompressionConfig(), parallelism.name)
    # A setting of one codec leaves the second one to the config.
    fields = dict(zip(("compression", parallelism.second), setting.specs, strict=False))
    with one_line_errors(), spelled(FLAG_NAMES):
        replace(config, **fields)


# Which runs there are
# -------------------------------------------------------------------------------------


def plan(settings: list[str], seeds: list[int], noise_seed: int) -> list[tuple[str, int]]:
    """Return (setting, seed) of every run.

    They are in such an order that what a stop leaves can be compared with its baseline.

    Args:
        settings: the first one is the baseline.
        seeds: for every setting.
        noise_seed: a further seed for the baseline; 0: none.
    """
    # A setting that is named twice is trained once.
    distinct = list(dict.fromkeys(settings))
    runs = [(setting, seed) for seed in seeds for setting in distinct]
    if noise_seed and noise_seed not in seeds:
        runs.append((settings[0], noise_seed))
    return runs


def find(results: list[dict], run: dict) -> dict | None:
    """Return the result of a run, or None: what decides a run is a part of its result."""
    for result in results:
        if run.items() <= result.items():
            return result
    return None


def read_results(path: Path) -> list[dict]:
    """Return the results of earlier starts.

    Raises:
        InputError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        results = json.loads(path.read_text())
        for result in results:
            result.items()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); remove it, or choose another --output"
        ) from None
    return results


def train_missing(
    runs: list[dict], train: Callable[[dict], dict], output: Path, time_limit: float = math.inf
) -> list[dict]:
    """Train what ``results.json`` does not hold yet, one run after the other, and write
    ``results.md``.

    Args:
        runs: what decides each run, with its "setting" and "seed". The first one's setting is the
            baseline.
        train: trains a run and returns its figures.
        output: folder of results.json and results.md.
        time_limit: seconds; no run is started that would end later.

    Returns:
        The results of the runs that are done.

    Raises:
        SystemExit: a training failed. Results so far are kept.
        InputError: results.json is damaged.
    """
    output.mkdir(parents=True, exist_ok=True)
    file = output / "results.json"
    results = read_results(file)
    began = time.monotonic()
    longest = 0.0
    for run in runs:
        if find(results, run) is not None:
            continue
        started = time.monotonic()
        # The first run is always trained: nothing is known of its time.
        if longest and started - began + longest > time_limit:
            continue
        try:
            results.append({**run, **train(run)})
        except RuntimeError as error:
            sys.exit(f"error: {run['setting']!r}, logs in {output}: {error}")
        longest = max(longest, time.monotonic() - started)
        # A stop leaves what is done, whole.
        write_whole(file, (json.dumps(results, indent=1) + "\n").encode())
    present = []
    for run in runs:
        result = find(results, run)
        if result is not None:
            present.append(result)
    (output / "results.md").write_text(table(present, runs[0]["setting"]))
    missing = len(runs) - len(present)
    if missing:
        print(f"{missing} of {len(runs)} runs are left: start again for them", flush=True)
    return present


# What is shown
# --------------------------------------------------------------------------------------------


def traffic_in(results: list[dict]) -> list[str]:
    """Return the classes of traffic that a codec may compress, of all results."""
    traffic = []
    for result in results:
        for name in result["bytes_per_iteration"]:
            if name not in traffic and not name.endswith(".other"):
                traffic.append(name)
    return traffic


def change(results: list[dict], result: dict, baseline: str) -> float | None:
    """Return by what part a validation loss differs from the baseline's of the same seed.

    Args:
        results: all results.
        result: the one that is compared.
        baseline: the setting to compare with.

    Returns:
        None for the baseline itself, and where it was not trained.
    """
    base = find(results, {"setting": baseline, "seed": result["seed"]})
    if base is None or base is result:
        return None
    return result["validation_loss"] / base["validation_loss"] - 1


def table(results: list[dict], baseline: str) -> str:
    """Return a markdown table, a row for each run.

    It has the losses, and for each class of traffic the megabytes of an iteration and their share
    of the uncompressed ones.
    """
    traffic = traffic_in(results)
    header = ["setting", "seed", "validation loss", f"against {baseline}", "test loss"]
    for name in traffic:
        header += [f"{name} MB", "of uncompressed"]
    lines = [header]
    for result in results:
        against = change(results, result, baseline)
        cells = [
            result["setting"],
            str(result["seed"]),
            f"{result['validation_loss']:.4f}",
            "-" if against is None else f"{against:+.2%}",
            f"{result['test_loss']:.4f}",
        ]
        for name in traffic:
            tally = result["bytes_per_iteration"].get(name, {"sent": 0.0, "uncompressed": 0.0})
            # A setting without this class of traffic has sent nothing of it.
            share = tally["sent"] / tally["uncompressed"] if tally["uncompressed"] else 0.0
            cells += [f"{tally['sent'] / 1e6:.3f}", f"{share:.3f}"]
        lines.append(cells)
    note = ""
    baseline_losses = [
        result["validation_loss"] for result in results if result["setting"] == baseline
    ]
    if len(set(baseline_losses)) > 1:
        noise = max(baseline_losses) / min(baseline_losses) - 1
        note = f"\nA seed alone changes the validation loss of {baseline} by {noise:.2%}.\n"
    # The note needs a second seed of the baseline.
    return "\n".join(markdown(*lines)) + f"\n{note}"


def in_words(results: list[dict], baseline: str) -> str:
    """Return a line for each run: its loss, and what a rank sends in an iteration."""
    width = max((len(result["setting"]) for result in results), default=0)
    lines = []
    for result in results:
        line = f"{result['setting']:{width}}  validation loss {result['validation_loss']:.4f}"
        against = change(results, result, baseline)
        if against is not None:
            line += f" ({against:+.2%})"
        tallies = [result["bytes_per_iteration"].get(name) for name in traffic_in(results)]
        sent = sum(tally["sent"] for tally in tallies if tally)
        uncompressed = sum(tally["uncompressed"] for tally in tallies if tally)
        line += f", {sent / 1e6:.2f} MB sent an iteration"
        # An uncompressed run has sent what it would have sent.
        if sent < uncompressed:
            line += f" instead of {uncompressed / 1e6:.2f} MB"
        lines.append(line)
    return "\n".join(lines) + "\n"


def in_short(line: str) -> str | None:
    """Return what a reader waits for in a line of a run's output, or None. Megatron prints a
    thousand lines."""
    match = re.search(r"validation loss at iteration (\d+)(.*) \| lm loss value: (\S+)", line)
    if match:
        # Behind the last iteration comes " on validation set" or " on test set".
        return f"iteration {match[1]}: loss {float(match[3]):.4f}{match[2]}"
    if line.strip().startswith(("compression:", "layers:")):
        return line.strip()
    return None


# A run
# ----------------------------------------------------------------------------------------------------


def micro_batch_size(shape: Shape, dimension: str, ranks: int) -> int:
    """Return the sequences of a micro-batch.

    Args:
        shape: the model.
        dimension: what is parallel.
        ranks: how many there are.
    """
    if dimension == "pipeline":
        micro_batches = 8  # enough to keep four stages busy
    elif dimension in ("data", "expert"):
        micro_batches = ranks  # one for each rank
    else:
        micro_batches = 1
    return min(shape.batch // micro_batches, MOST_TOKENS // shape.sequence)


def words_of(
    setting: BenchSetting, run: dict, data: dict[str, str], options: argparse.Namespace
) -> list:
    """Return the command line of a run for pretrain_gpt.py, without its report's folder.

    Args:
        setting: what is compressed.
        run: its model, iterations and seed.
        data: paths of the tokenizer and of each split's dataset.
        options: the command line of this script.
    """
    shape = SHAPES[run["model"]]
    iterations = run["iterations"]
    words = [*shape.flags(), *TRAINING.split()]
    words += LAYOUTS[options.dimension].format(ranks=options.ranks).split()
    words += ["--micro-batch-size", micro_batch_size(shape, options.dimension, options.ranks)]
    words += ["--train-iters", iterations, "--eval-interval", max(1, iterations // 4)]
    # Four validations, each of 16 batches, and about ten lines of the log.
    words += ["--eval-iters", 16, "--log-interval", max(1, min(10, iterations // 4))]
    for split in SPLITS:
        words += [f"--{split}-data-path", data[split]]
    words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", data["tokenizer"]]
    words += ["--seed", run["seed"], *setting.words(options.dimension), *options.extra]
    return words


def train(
    setting: BenchSetting, run: dict, data: dict[str, str], options: argparse.Namespace
) -> dict:
    """Train one run and return what results.json keeps of its report.

    Args:
        setting: what is compressed.
        run: its model, iterations and seed.
        data: paths of the tokenizer and of each split's dataset.
        options: the command line.

    Raises:
        RuntimeError: it failed.
    """
    # A folder of its own for each start: a run that failed keeps its log.
    name = "".join(c if c.isalnum() or c in ".=" else "-" for c in setting.text)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{run['seed']}-", dir=options.output))
    log_path = folder / "log.txt"
    label = f"{setting.text}, seed {run['seed']}"
    print(f"\n{label}: {run['iterations']} iterations; the whole log is {log_path}", flush=True)
    words = words_of(setting, run, data, options)
    words += ["--compression-report", folder / "report"]
    environment = dict(setting.environment)
    if not options.on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    with log_path.open("w") as log:

        def show(line: str) -> None:
            log.write(line)
            short = in_short(line)
            if short is not None:
                print(f"  {short}", flush=True)

        torchrun(options.ranks, "pretrain_gpt.py", words, show, **environment)
    summary = json.loads((folder / "report" / "report.json").read_text())["summary"]
    figures = {name: summary[name] for name in KEPT}
    return {**figures, "seconds": round(time.monotonic() - began, 1)}


def common_of(options: argparse.Namespace, data: dict[str, str]) -> dict:
    """Return what decides every run besides its setting and seed; the tokens of all splits among
    it."""
    tokens = sha256()
    # The same text with another tokenizer is other data.
    for split in SPLITS:
        with open(f"{data[split]}.bin", "rb") as file:
            tokens.update(file_digest(file, "sha256").digest())
    iterations = options.iterations
    if iterations is None:
        iterations = 400 if options.on_gpus else 60
    return {
        "model": options.model,
        "ranks": options.ranks,
        "iterations": iterations,
        "dimension": options.dimension,
        "extra": shlex.join(options.extra),
        "data": tokens.hexdigest()[:16],
    }


def prepare_data(options: argparse.Namespace) -> dict[str, str]:
    """Make the corpus of the model and return its paths; a folder of --output holds one for each
    kind.

    Raises:
        InputError: it cannot be made.
    """
    if options.model == "tiny":
        source = "stdlib"
        megabytes = 8.0
        vocabulary = 2048
    else:
        source = "site-packages"
        megabytes = 90.0
        vocabulary = 16384
    if options.corpus_mb is not None:
        megabytes = options.corpus_mb
    folder = options.data
    if folder is None:
        # Two models in one --output do not replace each other's text.
        folder = options.output / "data" / f"{source}-{megabytes:g}mb-{vocabulary}"
    try:
        return prepare(folder.resolve(), source, megabytes, vocabulary)
    except RuntimeError as error:
        raise InputError(f"--corpus-mb {megabytes:g}: {error}") from error


def main() -> None:
    """Train what is missing, and print the table."""
    options = parse_args()
    # Ranks cannot share a GPU, so with too few of them the run is on CPUs.
    options.on_gpus = gpu_count() >= options.ranks
    if options.model is None:
        options.model = "small" if options.on_gpus else "tiny"
    options.output = (options.output or ROOT / "runs" / options.dimension).resolve()
    with one_line_errors():
        data = prepare_data(options)
        common = common_of(options, data)
        settings = {setting.text: setting for setting in options.settings}
        planned = plan(list(settings), options.seeds, options.noise_seed)
        runs = [{**common, "setting": text, "seed": seed} for text, seed in planned]

        def train_one(run: dict) -> dict:
            return train(settings[run["setting"]], run, data, options)

        results = train_missing(runs, train_one, options.output, options.time_limit)
    baseline = options.settings[0].text
    print(f"\n{table(results, baseline)}\n{in_words(results, baseline)}", end="")


if __name__ == "__main__":
    main()
