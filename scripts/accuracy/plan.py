"""The runs of a study, most important first, and which of them a worker does next.

The uncompressed run of each seed leaves a checkpoint late in the schedule. Every setting continues from it to
the end: short, on the same data, and with a falling learning rate that lets chance grow little.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from scripts.accuracy.settings import setting_of

LATE = 3 / 4
"""Where in the schedule endings start."""
ENDED = (
    *("none-tp2", "int8-nearest", "int8-nearest-sp", "paper", "paper-sp", "fp8-plain"),
    *("int6-nearest", "int6-nearest-sp", "int6-quadratic"),
    *("int6-signed-g64", "int6-signed-g32", "int6655-nearest", "int6655-quadratic"),
    *("int5655-nearest", "int5655-quadratic", "int5-nearest"),
    *("int5-quadratic", "int5-signed-g64", "int5-signed-g64-sp", "int5-signed-g32", "int5-signed-g32-sp"),
    *("int5-nearest-g32", "int4-nearest", "int4-quadratic", "int4-signed-g32"),
)
"""Where no settings are named."""
EXPERTS = (
    "none-tp2",
    "ep-int8",
    "ep-fp8",
    "ep-int6",
    "ep-int8-dispatch",
    "ep-fp8-dispatch",
    "ep-fp8-to-experts",
)
"""Endings of a mixture of experts."""
STEP_SECONDS, SAVE_SECONDS, REST_SECONDS = 0.07, 1.5, 5.0
"""A step of 32 x 1024 tokens on an H200, until one is measured; saving; weights and validation."""


@dataclass(frozen=True)
class Job:
    """One run."""

    id: str
    setting: str
    seed: int
    """Of the weights and the data's order."""
    steps: int
    start: str | None = None
    """Checkpoint to continue from; None is from scratch."""
    save: dict[int, str] = field(default_factory=dict)
    """Checkpoints to write, by step."""
    kind: str = "scratch"
    """scratch, or ending (from a checkpoint to the end)."""

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def make_plan(
    settings: Iterable[str] | None, steps: int, seeds: int, from_scratch: bool = False
) -> list[Job]:
    """The uncompressed run of every seed, then each setting from every seed before the next setting.

    Args:
        settings: names or specs, see ``setting_of``; None: ENDED.
        steps: of a whole run.
        from_scratch: whole runs instead of endings.

    Raises:
        ValueError: an unknown setting.
    """
    chosen = [name for name in settings or ENDED if name != "none"]
    for name in chosen:
        setting_of(name)
    late = max(1, round(LATE * steps))
    plan = []
    for seed in range(seeds):
        plan.append(Job(f"scratch/none/{seed}", "none", seed, steps, save={late: f"late-{seed}"}))
    for name in chosen:
        for seed in range(seeds):
            if from_scratch:
                plan.append(Job(f"scratch/{name}/{seed}", name, seed, steps))
            else:
                job = f"ending/{name}/{seed}"
                plan.append(Job(job, name, seed, steps - late, f"late-{seed}", kind="ending"))
    return plan


def cost_of(records: Sequence[dict]) -> Callable[[Job], float]:
    """Seconds that a job takes, from the results of others on the same kind of device."""
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record["setting"]["name"], []).append(record["seconds_per_step"])
    medians = {name: statistics.median(found) for name, found in times.items()}
    other = max(medians.values(), default=STEP_SECONDS)

    def cost(job: Job) -> float:
        rest = REST_SECONDS + SAVE_SECONDS * len(job.save)
        return 1.02 * job.steps * medians.get(job.setting, other) + rest

    return cost


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
