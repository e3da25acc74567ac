"""Lists of runs. The order is that of importance: workers take the first job that fits into their time."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from scripts.accuracy.settings import SETTINGS

CHECKPOINTS = {"early": 1 / 12, "middle": 1 / 3, "late": 3 / 4}
"""Where in the schedule the branches start."""
MAIN = ("none", "paper", "int6-dither", "int8-dither", "int5-dither", "int4-dither", "int6-nearest")
REST = (
    *("none-tp2", "int8-nearest", "int4-nearest", "int5-nearest", "fp8-plain", "fp8-tensor"),
    "int6-stochastic-hop2",
)
SLICED = ("paper-sp", "int6-dither-sp", "int5-dither-sp", "int4-dither-sp")
"""From scratch with sequence parallelism, when all else is done."""
BRANCHES = (
    *("none-tp2", "paper", "int8-dither", "int6-dither", "int5-dither", "int4-dither", "int6-nearest"),
    *("int8-nearest", "int4-nearest", "paper-forward", "paper-backward", "paper-hop1", "paper-hop2"),
    *("fp8-plain", "fp8-tensor", "int6-dither-hop2", "int6-stochastic-hop2", "int6-meanfree"),
    *("paper-meanfree", "int6-stochastic", "fp8-stochastic", "int5-stochastic-hop2", "int4-int6-dither"),
    "int4-int8-dither",
    *("none-sp", "paper-sp", "int8-dither-sp", "int6-dither-sp", "int5-dither-sp", "int4-dither-sp"),
    *("int6-nearest-sp", "int4-nearest-sp"),
)


@dataclass(frozen=True)
class Job:
    """One run."""

    id: str
    setting: str
    seed: int
    """Of the data's order and the random rounding; from scratch also of the weights."""
    steps: int
    start: str | None = None
    """Checkpoint to continue from; None is from scratch."""
    save: dict[int, str] = field(default_factory=dict)
    """Checkpoints to write, by step."""
    kind: str = "scratch"

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def scratch(settings: Iterable[str], seeds: Iterable[int], steps: int) -> list[Job]:
    """Whole runs; the uncompressed one of each seed leaves the checkpoints that branches start from."""
    jobs = []
    for seed in seeds:
        for name in settings:
            save = {}
            if name == "none":
                save = {round(part * steps): f"{at}-{seed}" for at, part in CHECKPOINTS.items()}
            jobs.append(Job(f"scratch/{name}/{seed}", name, seed, steps, save=save))
    return jobs


def branches(
    settings: Iterable[str], orders: Iterable[int], steps: int, trunks: Iterable[int] = (0,)
) -> list[Job]:
    """Continuations of the uncompressed runs: for each checkpoint and data order, every setting and none."""
    jobs = []
    for order in orders:
        for trunk in trunks:
            for at in CHECKPOINTS:
                start = f"{at}-{trunk}"
                jobs += [
                    Job(f"branch/{start}/{name}/{order}", name, order, steps, start=start, kind="branch")
                    for name in ("none", *settings)
                ]
    return jobs


def repeat(job: Job) -> Job:
    """The same run once more, to see whether it is bitwise the same."""
    return Job(f"{job.id}/again", job.setting, job.seed, job.steps, job.start, kind="repeat")


def make_plan(
    name: str,
    steps: int,
    branch_steps: int,
    seeds: int,
    settings: list[str] | None,
    branch_settings: list[str] | None,
) -> list[Job]:
    """The jobs of a plan: trial, scratch, branch or campaign."""
    unknown = {*(settings or ()), *(branch_settings or ())} - SETTINGS.keys()
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; see scripts/accuracy/settings.py")
    main = settings or list(MAIN)
    trunk = scratch(["none"], [0], steps)
    orders = range(1000, 1000 + seeds)
    if name == "trial":
        short = settings or ["paper", "int6-dither"]
        jobs = [*trunk, *branches(short, [1000], branch_steps)]
        return [*jobs, repeat(jobs[1]), *scratch(short, [0], steps)]
    if name == "branch":
        return [*trunk, *branches(branch_settings or BRANCHES, orders, branch_steps)]
    whole = scratch(["none", *(s for s in main if s != "none")], range(seeds), steps)
    if name == "scratch":
        return whole
    if name == "campaign":
        rest = scratch(REST, range(seeds), steps) if settings is None else []
        sliced = scratch(SLICED, range(seeds), steps) if settings is None else []
        first, *others = (branches(branch_settings or BRANCHES, [order], branch_steps) for order in orders)
        others = [job for jobs in others for job in jobs]
        return [*whole, repeat(first[0]), *rest[: len(REST)], *first, *rest[len(REST) :], *sliced, *others]
    raise ValueError(f"unknown plan {name!r}; choose trial, scratch, branch or campaign")
