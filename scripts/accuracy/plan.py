"""Lists of runs, most important first, and which of them a worker does next.

Workers take the first job of the list that fits into their time, so the short branches at its end fill what
is left of a call when no run from scratch fits any more.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from scripts.accuracy.settings import setting_of

CHECKPOINTS = {"early": 1 / 12, "middle": 1 / 3, "late": 3 / 4}
"""Where in the schedule the branches start; endings start at the last."""
SCRATCH = (
    *("none", "paper", "int6-signed", "none-tp2", "int6-nearest", "int8-nearest"),
    *("fp8-plain", "int5-nearest", "int4-nearest", "int5-signed-g64"),
)
"""From scratch, every seed of a setting before the next setting."""
ENDED = (
    *("none-tp2", "paper", "int6-signed", "int6-nearest", "int8-nearest", "paper-sp", "int6-signed-g32"),
    *("int5-signed-g64", "int5-signed-g32", "int4-signed-g32", *SCRATCH[6:9], "int5-nearest-g32"),
    *("int6-signed-sp", "int5-signed-g64-sp", "int5-signed-g32-sp", "int8-nearest-sp", "int6-nearest-sp"),
    *("int6655-nearest", "int5655-nearest", "int5-signed", "int4-signed", "int6655-signed"),
    *("int5655-signed", "int6-signed-g64", "int5-quadratic", "int6-quadratic", "int5655-quadratic"),
    *("int6655-quadratic", "int5-quadratic-g64", "int6-quadratic-g64", "int4-quadratic"),
    *("int5-quadratic-g256", "int6-quadratic-g256"),
)
"""To the end of the schedule from the last checkpoint of every seed, on the data that came next."""
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
PAIRED = ("none-tp2", "paper", "int6-signed", "int6-nearest", "int4-nearest", "paper-sp", "paper-forward")
"""Branches of every replicate: the null comparison and what might be recommended."""
BRANCHES = (
    *(*PAIRED, "paper-backward", "int8-nearest", "int5-nearest", "fp8-plain"),
    *("int6-nearest-sp", "int4-nearest-sp"),
)
START_SECONDS, STEP_SECONDS, SAVE_SECONDS = 30.0, 0.07, 1.5
"""Until a worker's first step; a step of 32 x 1024 tokens on an H200, until one is measured; saving."""
REST_SECONDS = {"scratch": 4.0, "branch": 1.5, "ending": 5.0}
"""A run without its steps: weights and validation."""


@dataclass(frozen=True)
class Job:
    """One run."""

    id: str
    setting: str
    seed: int
    """Of the data's order; from scratch also of the weights."""
    steps: int
    start: str | None = None
    """Checkpoint to continue from; None is from scratch."""
    save: dict[int, str] = field(default_factory=dict)
    """Checkpoints to write, by step."""
    kind: str = "scratch"
    """scratch, branch, repeat (of a branch), or ending (from a checkpoint to the end)."""

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def scratch(settings: Iterable[str], seeds: Iterable[int], steps: int) -> list[Job]:
    """Whole runs; the uncompressed one of each seed leaves the checkpoints that branches start from."""
    jobs, seeds = [], list(seeds)
    for name in settings:
        for seed in seeds:
            save = {}
            if name == "none":
                save = {max(1, round(part * steps)): f"{at}-{seed}" for at, part in CHECKPOINTS.items()}
            jobs.append(Job(f"scratch/{name}/{seed}", name, seed, steps, save=save))
    return jobs


def branches(settings: Iterable[str], replicates: Iterable[int], steps: int) -> list[Job]:
    """Continuations of the uncompressed runs, each setting at every checkpoint before the next setting.

    Replicate r continues from the checkpoints of seed r, with a data order of its own.
    """
    return [
        Job(f"branch/{at}-{r}/{name}/{1000 + r}", name, 1000 + r, steps, start=f"{at}-{r}", kind="branch")
        for r in replicates
        for name in settings
        for at in CHECKPOINTS
    ]


def endings(settings: Iterable[str], seeds: Iterable[int], steps: int) -> list[Job]:
    """The last part of the uncompressed runs again, each setting from every seed before the next setting."""
    at, part = list(CHECKPOINTS.items())[-1]
    left, seeds = steps - max(1, round(part * steps)), list(seeds)
    return [
        Job(f"ending/{name}/{seed}", name, seed, left, start=f"{at}-{seed}", kind="ending")
        for name in settings
        for seed in seeds
    ]


def make_plan(
    name: str,
    steps: int,
    branch_steps: int,
    seeds: int,
    settings: list[str] | None,
    branch_settings: list[str] | None,
) -> list[Job]:
    """The jobs of a plan: ending or campaign.

    Args:
        settings: for the runs from scratch and the endings; names or specs, see ``setting_of``.
        branch_settings: for the branches.

    Raises:
        ValueError: an unknown plan or setting.
    """
    if name not in ("ending", "campaign"):
        raise ValueError(f"unknown plan {name!r}; choose ending or campaign")
    without_base = lambda names: [n for n in names if n != "none"]  # noqa: E731
    chosen = without_base(settings or SCRATCH)
    of_branches = without_base(branch_settings if branch_settings is not None else BRANCHES)
    for one in (*chosen, *of_branches):
        setting_of(one)
    whole = scratch(["none", *chosen], range(seeds), steps)
    final = endings(without_base(settings or ENDED), range(seeds), steps)
    if name == "ending":
        late = [replace(job, save=dict([max(job.save.items())])) for job in whole[:seeds]]
        return [*late, *final]
    first = branches(["none", *of_branches], [0], branch_steps)
    again = Job(f"{first[0].id}/again", "none", first[0].seed, branch_steps, first[0].start, kind="repeat")
    often = [one for one in of_branches if branch_settings is not None or one in PAIRED]
    rest = branches(["none", *often], range(1, seeds), branch_steps)
    return [*whole[:seeds], *first, again, *final, *whole[seeds:], *rest]


def cost_of(records: Sequence[dict]) -> Callable[[Job], float]:
    """Seconds that a job takes, from the results of others on the same kind of device."""
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record["setting"]["name"], []).append(record["seconds_per_step"])
    medians = {name: statistics.median(found) for name, found in times.items()}
    other = max(medians.values(), default=STEP_SECONDS)

    def cost(job: Job) -> float:
        rest = REST_SECONDS["branch" if job.kind == "repeat" else job.kind]
        return 1.02 * job.steps * medians.get(job.setting, other) + rest + SAVE_SECONDS * len(job.save)

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
