#!/usr/bin/env python
"""Train under different codecs, the last quarter each or from scratch, one worker a GPU, for a limited time.

    python -m scripts.accuracy.run --work-dir /var/tmp/accuracy --out results --settings paper int8

The workers share a queue (plan.py): each takes the first job of the plan that is not done, whose checkpoint
exists and that fits into the time left. Results are one JSON line a run in results-*.jsonl of the work
directory and of --out, written when the run ends. A later call with the same --work-dir goes on where this
one stopped; so does one that finds earlier results-*.jsonl in a new work directory. Prints a summary at the
end.
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

from megatron.compression.errors import CompressionConfigError
from scripts._cli import runs_left

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("111m", "111m-massive", "350m", "qwen2.5-0.5b", "qwen3-0.6b", "tiny", "moe", "moe-tiny")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="corpus, checkpoints, claims, results")
    parser.add_argument("--out", type=Path, help="where to copy the results (default: the work directory)")
    parser.add_argument("--settings", nargs="*", help="names (settings.py) or specs (default: plan.py's)")
    parser.add_argument("--from-scratch", action="store_true", help="whole runs instead of last quarters")
    parser.add_argument("--steps", type=int, default=1232, help="of a whole run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything, the start included")
    parser.add_argument("--workers", type=int, help="processes (default: one a GPU); several share a GPU")
    parser.add_argument("--size", choices=SIZES, default="111m")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.resolve()
    args.out = args.out.resolve() if args.out else args.work_dir
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
        model = ModelConfig(layers=qwen.layers, hidden=qwen.hidden, heads=qwen.heads, qwen=qwen, **parallel)
        return model, Schedule(args.steps, 64, 3e-4, 3e-5, warmup=args.steps // 10)
    experts = {"experts": 8} if "moe" in args.size else {}
    if "tiny" in args.size:
        model = ModelConfig(512, 2, 64, 2, 32, torch.float32, **experts, expert_width=64)
        return model, Schedule(args.steps, 4, warmup=5)
    if args.size == "350m":
        return ModelConfig(layers=24, hidden=1024, heads=16), Schedule(args.steps)
    massive = 1000.0 if "massive" in args.size else 0.0
    return ModelConfig(**experts, massive=massive), Schedule(args.steps)


def records_of(folder: Path) -> list[dict]:
    """All results in a folder, each job once."""
    from scripts.accuracy.records import load

    return load(sorted(folder.glob("results-*.jsonl")))


def claim_of(work: Path, job_id: str, what: str = "taken") -> Path:
    """The file that says that a worker has begun a job or failed in it."""
    return work / "claims" / f"{job_id.replace('/', '_')}.{what}"


def claim(work: Path, job_id: str) -> bool:
    """Whether this worker is the first to want the job."""
    try:
        claim_of(work, job_id).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Worker:
    """One process on one GPU.

    Args:
        args: the command line.
        plan: the jobs.
    """

    def __init__(self, args: argparse.Namespace, plan) -> None:
        import torch

        from scripts.accuracy.model import GPT
        from scripts.accuracy.training import use_deterministic_kernels

        self.args, self.plan, self.began = args, plan, time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        use_deterministic_kernels()
        self.config, self.schedule = sizes(args)
        self.model = GPT(self.config, self.device == "cuda").to(self.device)
        self.trainer = None

    def say(self, text: str) -> None:
        """A line on stdout."""
        print(f"[worker {self.args.worker}] {time.time() - self.began:6.1f} s  {text}", flush=True)

    def wait_for_corpus(self) -> bool:
        """Read the corpus when it is there; False if the time is up before."""
        from scripts.accuracy.training import Corpus, Trainer

        while not (self.args.work_dir / "corpus" / "meta.json").exists():
            if time.time() > self.args.deadline:
                return False
            time.sleep(0.5)
        meta = json.loads((self.args.work_dir / "corpus" / "meta.json").read_text())
        if meta.get("vocab_size", self.config.vocabulary) != self.config.vocabulary:
            raise ValueError("the corpus has another vocabulary than the model; give another --work-dir")
        valid_tokens = 2048 if "tiny" in self.args.size else 2_000_000
        corpus = Corpus(self.args.work_dir / "corpus", self.config.sequence, self.device, valid_tokens)
        if int(corpus.train.max()) >= self.config.vocabulary:
            raise ValueError("the corpus has more tokens than the model; give another --work-dir")
        self.trainer = Trainer(self.model, corpus, self.schedule)
        return True

    def choose(self):
        """The next job, claimed, and whether later ones wait for a checkpoint."""
        from scripts.accuracy.plan import cost_of, next_job

        work = self.args.work_dir
        records = records_of(work)
        cost = cost_of([r for r in records if r.get("device") == self.device_name])
        while True:
            plan = [job for job in self.plan if not claim_of(work, job.id, "failed").exists()]
            taken = {job.id for job in plan if claim_of(work, job.id).exists()}
            checkpoints = {path.stem for path in (work / "checkpoints").glob("*.pt")}
            left = self.args.deadline - time.time()
            job, waiting = next_job(plan, {r["id"] for r in records}, taken, checkpoints, left, cost)
            if job is None or claim(work, job.id):
                return job, waiting

    def train(self, job) -> dict:
        """Do a run; what its record holds of it."""
        from scripts.accuracy.settings import setting_of

        checkpoints, start = self.args.work_dir / "checkpoints", time.time()
        setting = setting_of(job.setting, self.config.ranks)
        if job.start:
            self.trainer.load(checkpoints / f"{job.start}.pt")
        else:
            self.trainer.start(job.seed)
        first = self.trainer.step
        save = {step: checkpoints / f"{target}.pt" for step, target in job.save.items()}
        result = self.trainer.run(setting, job.steps, job.seed, save)
        seconds = round(time.time() - start, 2)
        return {"setting": setting.as_dict(), "first_step": first, **result, "seconds": seconds}

    def do(self, job) -> None:
        """Do a job and write its record."""
        import torch

        try:
            result = self.train(job)
        except Exception:
            traceback.print_exc()
            self.say(f"{job.id} failed")
            claim_of(self.args.work_dir, job.id, "failed").touch()
            if self.device == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost: no more jobs for this worker
            return
        record = {**job.as_dict(), **result, "device": self.device_name, "size": self.args.size}
        record |= {"schedule_steps": self.schedule.steps, "torch": torch.__version__}
        for folder in dict.fromkeys((self.args.work_dir, self.args.out)):
            with (folder / f"results-{self.args.worker}.jsonl").open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        milliseconds = 1e3 * result["seconds_per_step"]
        self.say(f"{job.id}: valid {result['valid']:.5f}, {milliseconds:.1f} ms/step, {result['seconds']} s")

    def loop(self) -> None:
        """Jobs until the time is up."""
        if not self.wait_for_corpus():
            return
        while time.time() < self.args.deadline:
            job, waiting = self.choose()
            if job is not None:
                self.do(job)
            elif waiting:
                time.sleep(0.5)
            else:
                break
        self.say("done")


def plan_of(args: argparse.Namespace):
    """The jobs that the command line asks for."""
    from scripts.accuracy.plan import EXPERTS, make_plan

    settings = args.settings or (list(EXPERTS) if "moe" in args.size else None)
    return make_plan(settings, args.steps, args.seeds, args.from_scratch)


def prepare_folders(args: argparse.Namespace) -> None:
    """A work directory without claims, and earlier results in --out."""
    shutil.rmtree(args.work_dir / "claims", ignore_errors=True)
    for folder in (args.work_dir / "claims", args.work_dir / "checkpoints", args.out):
        folder.mkdir(parents=True, exist_ok=True)
    if args.out != args.work_dir:
        for path in args.work_dir.glob("results-*.jsonl"):
            shutil.copy(path, args.out)


def launch(args: argparse.Namespace) -> None:
    """Prepare the corpus, start the workers, collect."""
    import torch

    deadline = time.time() + 60 * args.minutes - 5
    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    workers = args.workers or max(1, gpus)
    prepare_folders(args)
    # Deterministic cuBLAS; compiler caches that the workers and later calls share.
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(args.work_dir / "cache" / "inductor"))
    environment.setdefault("TRITON_CACHE_DIR", str(args.work_dir / "cache" / "triton"))

    def start(module: str, arguments: Sequence[str], gpu: int = 0) -> subprocess.Popen:
        own = environment | ({"CUDA_VISIBLE_DEVICES": visible[gpu % gpus]} if gpus else {})
        return subprocess.Popen(
            [sys.executable, "-m", f"scripts.accuracy.{module}", *arguments], env=own, cwd=ROOT
        )

    helpers = []
    if not (args.work_dir / "corpus" / "meta.json").exists():
        words = ["--output-dir", args.work_dir / "corpus", "--vocabulary", sizes(args)[0].vocabulary]
        helpers.append(start("corpus", list(map(str, words))))
    arguments = [*sys.argv[1:], "--work-dir", str(args.work_dir), "--out", str(args.out)]
    arguments += ["--workers", str(workers), "--deadline", str(deadline)]
    processes = [start("run", [*arguments, "--worker", str(i)], i) for i in range(workers)]
    statuses = [process.wait() for process in processes]
    for process in helpers:
        process.terminate()
        process.wait()
    meta = args.work_dir / "corpus" / "meta.json"
    if args.out != args.work_dir and meta.exists():
        shutil.copy(meta, args.out)
    finish(args, statuses)


def finish(args: argparse.Namespace, statuses: Sequence[int]) -> None:
    """Print the tables, and what is left.

    Raises:
        SystemExit: a run failed, or a worker ended with another status than 0.
    """
    from scripts.accuracy.tables import tables

    records, plan = records_of(args.work_dir), plan_of(args)
    print(tables(records))
    left = {job.id for job in plan} - {record["id"] for record in records}
    if left:
        print(runs_left(len(left), len(plan)), flush=True)
    failed = sorted(job.id for job in plan if claim_of(args.work_dir, job.id, "failed").exists())
    if any(statuses) or failed:
        raise SystemExit(f"error: not all runs ended well: {', '.join(failed) or 'a worker died'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse(argv)
    try:
        plan_of(args)
    except CompressionConfigError as error:
        raise SystemExit(f"error: {error}") from None
    if args.worker is None:
        launch(args)
    else:
        Worker(args, plan_of(args)).loop()


if __name__ == "__main__":
    main()
