"""What the convergence scripts share: every setting and seed trained once, with results that survive a stop.

A run is remembered in ``results.json`` under everything that decides it; a script that is started again
trains what is missing. One more uncompressed run, with another seed, shows what a seed alone changes.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RESULTS = "results.json"


def add_arguments(parser: argparse.ArgumentParser, output: Path) -> None:
    """Options that all of them take."""
    parser.add_argument("--output", type=Path, default=output, help="folder for everything")
    parser.add_argument("--data", type=Path, help="folder of the tokenized text (default: data in --output)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="every setting with each of them")
    parser.add_argument(
        "--noise-seed", type=int, default=2, help="of one more uncompressed run, to see the noise; 0: none"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        help="seconds: start no run that would end later, by the longest so far; start again for the rest",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at once on the same devices: faster where one leaves them idle, on GPUs with NVIDIA's "
        "multi-process service (MPS) running; times of an iteration then mean nothing",
    )
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="run on the GPUs that there are, with several ranks on each if need be (pretrain_gpt.py's flag)",
    )


def share(options: argparse.Namespace, gpus: int, ranks: int) -> tuple[int, list[str]]:
    """GPUs that ``ranks`` ranks may count on, and the flag that makes them share."""
    if options.share_gpus and 0 < gpus < ranks:
        return ranks, ["--share-gpus"]
    return gpus, []


def add_model_arguments(parser: argparse.ArgumentParser, models: Iterable[str]) -> None:
    """Options of the scripts that train with ``demo.Training``."""
    parser.add_argument("--model", choices=models, help="default: small on GPUs, tiny on CPUs")
    parser.add_argument("--iterations", type=int, help="default: 400 on GPUs, 60 on CPUs")
    parser.add_argument(
        "--corpus-mb",
        type=int,
        help="MB of text (default: on GPUs 90 of the installed packages' sources, on CPUs 8 of Python's)",
    )


def prepare(
    options: argparse.Namespace,
    extra: list[str],
    models: dict[str, str],
    training: str,
    ranks: int,
    on_gpus: bool,
) -> tuple[dict[str, str], dict]:
    """Resolve the options' defaults, hand the model to ``demo`` and make the data.

    Returns:
        The data's paths, and what all runs have in common, JSON-ready.
    """
    import demo  # beside this file: only a script finds it

    options.iterations = options.iterations or (400 if on_gpus else 60)
    options.output = options.output.resolve()
    model = options.model or ("small" if on_gpus else "tiny")
    demo.GPT_MODEL_ARGS, demo.TRAINING_ARGS = models[model], training
    corpus_mb = options.corpus_mb or (90 if on_gpus else 8)
    folder = options.data.resolve() if options.data else options.output / "data"
    text = ("site-packages", corpus_mb, 16384) if on_gpus else ("stdlib", corpus_mb)
    data = demo.prepare_data(folder, *text)
    common = {
        "model": model,
        "ranks": ranks,
        "iterations": options.iterations,
        "corpus_mb": corpus_mb,
        "extra": extra,
    }
    return data, common


def conclude(
    output: Path, common: dict, results: list[dict], baseline: dict, rows: list[dict], table: str
) -> None:
    """Write summary.json and print the table and the noise."""
    summary = {"setup": common, "rows": rows, "seed_noise": noise(results, baseline)}
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n" + table + noise_line(results, baseline), end="")
    print(output / "summary.json")


def plan(settings: list, baseline, seeds: list[int], noise_seed: int) -> list[tuple]:
    """(setting, seed) of every run, in order: what a stop leaves behind compares with its baseline."""
    runs = [(setting, seed) for seed in seeds for setting in settings]
    if noise_seed and baseline in settings and noise_seed not in seeds:
        runs.append((baseline, noise_seed))
    return runs


def train_missing(
    runs: list[dict],
    train: Callable[[dict], dict],
    output: Path,
    time_limit: float | None = None,
    report: Callable[[list[dict]], None] | None = None,
    jobs: int = 1,
) -> list[dict]:
    """Train what ``results.json`` does not hold yet.

    Args:
        runs: what decides each run; JSON-ready.
        train: one training; what it returns is kept with the run. Raises RuntimeError if it fails.
        output: folder of results.json.
        time_limit: seconds, see ``add_arguments``.
        report: called after each training with the results of ``runs`` that there are.
        jobs: trainings at once; ``train`` is then called from several threads.

    Returns:
        The results of ``runs`` that there are, each its run with what ``train`` returned.

    Raises:
        SystemExit: a training failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    file, began, longest = output / RESULTS, time.monotonic(), 0.0
    results = json.loads(file.read_text()) if file.exists() else []

    def present() -> list[dict]:
        return [result for run in runs if (result := find(results, run)) is not None]

    lock, failed = threading.Lock(), threading.Event()

    def attempt(run: dict) -> None:
        nonlocal longest
        spent = time.monotonic() - began
        late = time_limit is not None and longest and spent + longest > time_limit
        if late or failed.is_set():
            return
        try:
            result = {**run, **train(run)}
        except BaseException:
            failed.set()  # here, since a worker takes the next run before anybody reads this one's result
            raise
        with lock:
            results.append(result)
            longest = max(longest, time.monotonic() - began - spent)
            file.write_text(json.dumps(results, indent=1) + "\n")
            if report is not None:
                report(present())

    missing = [run for run in runs if find(results, run) is None]
    with ThreadPoolExecutor(jobs) as pool:
        trainings = [pool.submit(attempt, run) for run in missing]
        for training in trainings:
            try:
                training.result()
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(1)
            except KeyboardInterrupt:
                failed.set()  # start no more
                raise
    left = len(runs) - len(present())
    if left:
        print(f"{left} of {len(runs)} runs are left: start again for them", flush=True)
    return present()


def find(results: list[dict], run: dict) -> dict | None:
    """The result of a run, if it is there."""
    return next((result for result in results if run.items() <= result.items()), None)


def difference(result: dict, results: list[dict], baseline: dict) -> float | None:
    """Relative difference of the validation loss to that of ``baseline`` with the same seed, if any."""
    base = find(results, {**baseline, "seed": result["seed"]})
    return None if base is None or base is result else result["validation_loss"] / base["validation_loss"] - 1


def noise(results: list[dict], baseline: dict) -> float | None:
    """What a seed changes: the baseline's largest validation loss over its smallest, less 1."""
    losses = [result["validation_loss"] for result in results if baseline.items() <= result.items()]
    return max(losses) / min(losses) - 1 if len(losses) > 1 else None


def percent(part: float | None) -> str:
    """``+0.52%``, or a dash."""
    return "-" if part is None else f"{part:+.2%}"


def noise_line(results: list[dict], baseline: dict) -> str:
    """A sentence for below the table, or nothing."""
    spread = noise(results, baseline)
    return (
        "" if spread is None else f"A seed alone changes the uncompressed validation loss by {spread:.2%}.\n"
    )
