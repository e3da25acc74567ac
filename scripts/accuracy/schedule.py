#!/usr/bin/env python
"""Which job a worker does next, how long it will take, and what a plan gets done in the time there is.

    python -m scripts.accuracy.schedule --plan campaign --workers 4 --minutes 9.3 9.3

plays a plan through with the times seen on an H200 (with --results, with those of earlier runs) and prints
what is done after each call. Needs neither a GPU nor torch's CUDA.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.accuracy.plan import Job, make_plan
from scripts.accuracy.records import load
from scripts.accuracy.settings import SETTINGS, Setting, parse_codec
from taco_kernels import CodecConfig

START_SECONDS, WARM_START_SECONDS = 28.0, 22.0
"""From the launch until a worker's first run, with empty and with filled compiler caches."""
FORM_SECONDS = 12.0
"""Compiling the layers for sequence parallelism, before a worker's first such run."""
REST_SECONDS = {"scratch": 3.5, "branch": 1.3, "ending": 4.5, "errors": 25.0}
"""A run without its steps: weights and validation."""
SAVE_SECONDS = 1.5
"""Of a checkpoint."""
MARGIN = 1.02


def step_seconds(setting: Setting) -> float:
    """Seconds of a step of 32 x 1024 tokens on an H200, measured for uncompressed, nearest and dither."""
    codecs = [parse_codec(text) for text in setting.codecs()]
    if all(codec is None for codec in codecs):
        return 0.0650
    random = any(isinstance(codec, CodecConfig) and codec.rounding != "nearest" for codec in codecs)
    seconds = 0.0735 if random else 0.0685
    return seconds + 0.012 * setting.remove_mean + 0.003 * setting.sequence_parallel


class Estimate:
    """How long runs take: as measured, or a guess scaled by what was measured of others."""

    def __init__(self, records: Iterable[dict] = ()) -> None:
        self._steps: dict[str, float] = {}
        self._rest: dict[str, float] = {}
        for record in records:
            self.observe(record)

    def observe(self, record: dict) -> None:
        """Learn from a result."""
        per_step, steps = record.get("seconds_per_step", 0.0), record["steps"]
        if steps:
            self._steps[record["setting"]["name"]] = per_step
        kind = "branch" if record["kind"] == "repeat" else record["kind"]
        self._rest[kind] = max(0.1, record["seconds"] - per_step * steps)  # saving counts as steps

    def step(self, name: str) -> float:
        """Seconds of a step of a setting."""
        if name in self._steps:
            return self._steps[name]
        ratios = [seconds / step_seconds(SETTINGS[known]) for known, seconds in self._steps.items()]
        return step_seconds(SETTINGS[name]) * (statistics.median(ratios) if ratios else 1.0)

    def seconds(self, job: Job) -> float:
        """Of a whole run, with a margin."""
        kind = "branch" if job.kind == "repeat" else job.kind
        rest = self._rest.get(kind, REST_SECONDS[kind]) + SAVE_SECONDS * len(job.save)
        return MARGIN * (job.steps * self.step(job.setting) if job.steps else 0.0) + rest


def unfinished(plan: Sequence[Job], finished: set[str], checkpoints: set[str]) -> list[Job]:
    """Jobs without a result, and those whose checkpoints are missing although such a job starts from them."""
    needed = {job.start for job in plan if job.start and job.id not in finished}
    missing = needed - checkpoints
    return [job for job in plan if job.id not in finished or missing & set(job.save.values())]


def next_job(
    plan: Sequence[Job],
    finished: set[str],
    taken: set[str],
    checkpoints: set[str],
    seconds_left: float,
    cost: Callable[[Job], float],
) -> tuple[Job | None, bool]:
    """The first job that can be done now and in time, and else whether one waits for a checkpoint.

    Args:
        finished: ids of the jobs with a result.
        taken: ids of those that a worker has begun or failed in.
        checkpoints: names of those there are.
        cost: seconds of a job.
    """
    todo, waiting = unfinished(plan, finished, checkpoints), False
    coming = {target for job in todo if job.id in taken for target in job.save.values()}
    for job in todo:
        if job.id in taken or cost(job) > seconds_left:
            continue
        if job.start and job.start not in checkpoints:
            waiting |= job.start in coming
            continue
        return job, False
    return None, waiting


class Done(NamedTuple):
    """A job in a played plan: which call and worker, and when in the call, seconds."""

    call: int
    worker: int
    began: float
    ended: float
    job: Job


def play(
    plan: Sequence[Job], workers: int, minutes: Sequence[float], estimate: Estimate | None = None
) -> list[Done]:
    """What gets done in calls of so many minutes, one after the other with the same work directory."""
    estimate = estimate or Estimate()
    finished: set[str] = set()
    checkpoints: set[str] = set()
    done: list[Done] = []
    for call, limit in enumerate(minutes):
        deadline = 60 * limit - 5
        free = [WARM_START_SECONDS if call else START_SECONDS] * workers
        taken: set[str] = set()
        forms: list[set[bool]] = [{False} for _ in range(workers)]
        running: list[Done] = []
        idle = set(range(workers))
        now = min(free)
        while True:
            for entry in [entry for entry in running if entry.ended <= now]:
                running.remove(entry)
                done.append(entry)
                finished.add(entry.job.id)
                checkpoints |= set(entry.job.save.values())
                idle.add(entry.worker)
            for worker in sorted(idle):
                cost = lambda job, warm=forms[worker]: (  # noqa: E731
                    estimate.seconds(job)
                    + FORM_SECONDS * (SETTINGS[job.setting].sequence_parallel not in warm)
                )
                job, _ = next_job(plan, finished, taken, checkpoints, deadline - now, cost)
                if job is None:
                    continue
                running.append(Done(call, worker, now, now + cost(job), job))
                forms[worker].add(SETTINGS[job.setting].sequence_parallel)
                taken.add(job.id)
                idle.discard(worker)
            if not running:
                break
            now = min(entry.ended for entry in running)
    return done


def report(plan: Sequence[Job], done: Sequence[Done]) -> str:
    """What is done after each call: settings from scratch by number of seeds, branches by replicate."""
    lines = []
    for call in sorted({entry.call for entry in done}):
        part = [entry for entry in done if entry.call <= call]
        last = [entry for entry in part if entry.call == call]
        seeds, places, ends = defaultdict(int), defaultdict(int), defaultdict(int)
        for entry in part:
            if entry.job.kind == "scratch":
                seeds[entry.job.setting] += 1
            elif entry.job.kind == "branch":
                places[entry.job.setting] += 1
            elif entry.job.kind == "ending":
                ends[entry.job.setting] += 1
        busy = sum(entry.ended - entry.began for entry in last)
        lines += [
            f"After call {call + 1}: {sum(seeds.values())} from scratch, {sum(ends.values())} endings, "
            f"{sum(places.values())} branches, "
            f"{sum(e.job.kind == 'errors' for e in part)} error stages",
            f"  {busy:.0f} worker-seconds in this call, the last ends at {max(e.ended for e in last):.0f} s",
        ]
        for title, counts in (
            ("from scratch, seeds", seeds),
            ("endings, seeds", ends),
            ("branches, checkpoints", places),
        ):
            if counts:
                lines.append(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    ids = {entry.job.id for entry in done}
    left = [job for job in plan if job.id not in ids]
    kinds = defaultdict(int)
    for job in left:
        kinds[f"{job.kind} {job.setting}"] += 1
    if kinds:
        lines.append("Not done: " + ", ".join(f"{name} x{n}" for name, n in kinds.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="campaign", help="trial, scratch, branch or campaign (plan.py)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minutes", type=float, nargs="+", default=[9.3, 9.3], help="of each call")
    parser.add_argument("--steps", type=int, default=1232)
    parser.add_argument("--branch-steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="results-*.jsonl with times")
    args = parser.parse_args(argv)
    records = load(args.results)
    plan = make_plan(args.plan, args.steps, args.branch_steps, args.seeds, None, None)
    print(report(plan, play(plan, args.workers, args.minutes, Estimate(records))))


if __name__ == "__main__":
    main()
