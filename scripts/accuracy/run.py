#!/usr/bin/env python
"""Run a plan of trainings under different codecs, one worker a GPU, for a limited time.

    python -m scripts.accuracy.run --work-dir /var/tmp/accuracy --plan campaign --minutes 9 --out results

The workers share a queue: each takes the first job of the plan that is not done, whose checkpoint exists and
that fits into the time left. Results are one JSON line a run in results-*.jsonl of --out; a later call with
the same --work-dir goes on where this one stopped. Prints a summary at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="corpus, checkpoints, claims, results")
    parser.add_argument("--out", type=Path, help="where to copy the results (default: the work directory)")
    parser.add_argument("--plan", default="campaign", help="trial, scratch, branch or campaign (plan.py)")
    parser.add_argument("--settings", nargs="*", help="names for the runs from scratch (settings.py)")
    parser.add_argument("--branch-settings", nargs="*", help="names for the branches")
    parser.add_argument("--steps", type=int, default=1232, help="of a run from scratch")
    parser.add_argument("--branch-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything, the start included")
    parser.add_argument("--workers", type=int, help="processes, one a GPU (default: all GPUs)")
    parser.add_argument("--size", choices=("111m", "tiny"), default="111m")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def sizes(args: argparse.Namespace):
    """ModelConfig and Schedule of ``--size``."""
    import torch

    from scripts.accuracy.model import ModelConfig
    from scripts.accuracy.training import Schedule

    if args.size == "tiny":
        model = ModelConfig(512, 2, 64, 2, 32, torch.float32)
        return model, Schedule(args.steps, 4, warmup=5)
    return ModelConfig(), Schedule(args.steps)


def done(work: Path) -> set[str]:
    """Ids of the jobs that have a result."""
    found = set()
    for path in work.glob("results-*.jsonl"):
        found |= {json.loads(line)["id"] for line in path.read_text().splitlines()}
    return found


def claim(work: Path, job_id: str) -> bool:
    """Whether this worker is the first to want the job."""
    try:
        (work / "claims" / job_id.replace("/", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Estimate:
    """How long a run will take, from those before it."""

    def __init__(self) -> None:
        self.step, self.rest = 0.15, 8.0

    def seconds(self, steps: int) -> float:
        """For a run of so many steps, evaluation included."""
        return self.step * steps + self.rest

    def observe(self, seconds_per_step: float, steps: int, seconds: float) -> None:
        """Learn from a run."""
        self.step = seconds_per_step
        self.rest = max(1.0, seconds - seconds_per_step * steps)


def warm_up(model, schedule, device: str, settings: list[str], sharers: tuple[int, int]) -> None:
    """Compile: the layers in both forms, and the codec kernels of this worker's share of the settings."""
    import torch

    from scripts.accuracy import layers
    from scripts.accuracy.exchange import Exchange
    from scripts.accuracy.settings import SETTINGS

    index, count = sharers
    forms = [
        name for name in ("none", "none-sp") if name == "none" or any(s.endswith("-sp") for s in settings)
    ]
    mine = [name for name in settings if name not in forms][index::count]
    shape = (schedule.batch, model.config.sequence)
    ids = torch.randint(model.config.vocabulary, shape, device=device)
    model.initialise(0)
    for name in [*forms, *mine]:
        setting = SETTINGS[name]
        layers.bind(Exchange(setting))
        model.use_sequence_parallelism(setting.sequence_parallel)
        model(ids, ids).mean().backward()
        model.zero_grad(set_to_none=True)
        if name in forms:
            with torch.no_grad():
                model(ids, ids)
    layers._bound.clear()


def work(args: argparse.Namespace) -> None:
    """One worker: jobs until the time is up."""
    import torch

    from scripts.accuracy.model import GPT
    from scripts.accuracy.settings import SETTINGS
    from scripts.accuracy.training import Corpus, Trainer, use_deterministic_kernels

    start, label = time.time(), f"[worker {args.worker}]"
    say = lambda text: print(f"{label} {time.time() - start:6.1f} s  {text}", flush=True)  # noqa: E731
    use_deterministic_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, schedule = sizes(args)
    plan = plan_of(args)
    settings = list(dict.fromkeys(job.setting for job in plan))
    compiled = not args.eager and device == "cuda"
    share = (args.worker, args.workers or 1)
    model = GPT(config, compiled).to(device)
    if device == "cuda":
        try:
            warm_up(model, schedule, device, settings, share)
        except Exception:
            traceback.print_exc()
            say("compiling failed, going on without" if compiled else "warm-up failed")
            compiled, model = False, GPT(config, False).to(device)
    say(f"warm ({'compiled' if compiled else 'eager'})")
    while not (args.work_dir / "corpus" / "meta.json").exists():
        if time.time() > args.deadline:
            return
        time.sleep(0.5)
    valid_tokens = 2_000_000 if args.size == "111m" else 2048
    corpus = Corpus(args.work_dir / "corpus", config.sequence, device, valid_tokens)
    if int(corpus.train.max()) >= config.vocabulary:
        raise ValueError("the corpus has more tokens than the model; give another --work-dir")
    trainer, estimate = Trainer(model, corpus, schedule), Estimate()
    checkpoints = args.work_dir / "checkpoints"
    folders = dict.fromkeys((args.work_dir, args.out or args.work_dir))  # at once: time may run out
    targets = [folder / f"results-{args.worker}.jsonl" for folder in folders]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    while time.time() < args.deadline:
        job, waiting = choose(plan, args, estimate)
        if job is None:
            if not waiting:
                break
            time.sleep(1.0)
            continue
        began = time.time()
        try:
            if job.start:
                trainer.load(checkpoints / f"{job.start}.pt")
            else:
                trainer.start(job.seed)
            first = trainer.step
            save = {step: checkpoints / f"{target}.pt" for step, target in job.save.items()}
            every = 0 if job.start else max(1, schedule.steps // 6)
            result = trainer.run(SETTINGS[job.setting], job.steps, job.seed, save, every)
        except Exception:
            traceback.print_exc()
            say(f"{job.id} failed")
            continue
        seconds = time.time() - began
        estimate.observe(result["seconds_per_step"], job.steps, seconds)
        record = {**job.as_dict(), "first_step": first, "setting": SETTINGS[job.setting].as_dict(), **result}
        record |= {"seconds": round(seconds, 2), "device": name, "size": args.size, "compiled": compiled}
        record |= {"schedule_steps": schedule.steps, "torch": torch.__version__}
        for path in targets:
            with path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        say(
            f"{job.id}: valid {result['valid']:.5f}, {1e3 * result['seconds_per_step']:.1f} ms/step, "
            f"{seconds:.1f} s"
        )
    say("done")


def plan_of(args: argparse.Namespace):
    """The jobs that the command line asks for."""
    from scripts.accuracy.plan import make_plan

    return make_plan(
        args.plan, args.steps, args.branch_steps, args.seeds, args.settings, args.branch_settings
    )


def choose(plan, args: argparse.Namespace, estimate: Estimate):
    """The next job, claimed, and whether later ones wait for a checkpoint."""
    finished, waiting = done(args.work_dir), False
    pending = {target for job in plan if job.id not in finished for target in job.save.values()}
    for job in plan:
        if job.id in finished or (args.work_dir / "claims" / job.id.replace("/", "_")).exists():
            continue
        if time.time() + estimate.seconds(job.steps) > args.deadline:
            continue
        if job.start and not (args.work_dir / "checkpoints" / f"{job.start}.pt").exists():
            waiting |= job.start in pending
            continue
        if claim(args.work_dir, job.id):
            return job, False
    return None, waiting


def launch(args: argparse.Namespace) -> None:
    """Prepare the corpus, start the workers, collect."""
    import torch

    deadline = time.time() + 60 * args.minutes - 5
    workers = args.workers or max(1, torch.cuda.device_count())
    folder = args.work_dir
    for name in ("claims", "checkpoints"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "claims")
    (folder / "claims").mkdir()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    processes = []
    if not (folder / "corpus" / "meta.json").exists():
        command = [sys.executable, "-m", "scripts.accuracy.corpus", "--output-dir", str(folder / "corpus")]
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    arguments = [*sys.argv[1:], "--workers", str(workers), "--deadline", str(deadline)]
    for i in range(workers):
        command = [sys.executable, "-m", "scripts.accuracy.run", *arguments, "--worker", str(i)]
        own = environment if not torch.cuda.is_available() else environment | {"CUDA_VISIBLE_DEVICES": str(i)}
        processes.append(subprocess.Popen(command, env=own, cwd=ROOT))
    for process in processes:
        process.wait()
    if args.out:
        for path in [*folder.glob("results-*.jsonl"), folder / "corpus" / "meta.json"]:
            if path.exists():  # results of earlier calls too
                shutil.copy(path, args.out)
    from scripts.accuracy.summarise import load, tables

    print(tables(load(sorted(folder.glob("results-*.jsonl")))))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse(argv)
    args.work_dir = args.work_dir.resolve()
    args.out = args.out.resolve() if args.out else None
    if args.worker is None:
        launch(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
