"""Lists of runs, most important first. Workers take the first job of the list that fits into their time, so
the short branches at its end fill what is left of a call when no run from scratch fits any more."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from scripts.accuracy.settings import SETTINGS

CHECKPOINTS = {"early": 1 / 12, "middle": 1 / 3, "late": 3 / 4}
"""Where in the schedule the branches start."""
SCRATCH = (
    *("none", "paper", "int6-dither", "none-tp2", "int5-dither", "int4-dither"),
    *("int6-nearest", "int8-nearest", "int6-signed", "fp8-plain", "int5-nearest"),
    *("fp8-tensor", "int4-nearest", "int8-dither", "int5-signed-g64"),
)
"""From scratch, every seed of a setting before the next setting."""
SLICED = ("int6-dither-sp", "paper-sp", "int4-dither-sp")
"""From scratch with sequence parallelism, when all else is done."""
PAIRED = ("none-tp2", "paper", "int6-dither", "int6-signed", "int5-dither", "int4-dither", "int8-dither")
"""Branches of every replicate: the null comparison and what might be recommended."""
MECHANISM = (
    *("int6-nearest", "int6-dither-hop2", "int6-meanfree"),
    *("int4-nearest", "int4-dither-hop2", "int4-meanfree", "paper-meanfree"),
)
"""Does dither in hop 2 alone, or removing the mean over the tokens, repair rounding to nearest?"""
SEQUENCE_PARALLEL = ("paper-sp", "int6-dither-sp", "int4-dither-sp", "int8-dither-sp", "int5-dither-sp")
PARTS = ("paper-forward", "paper-backward", "paper-hop1", "paper-hop2", "int6-stochastic")
"""Which hop and direction does the damage."""
FORMATS = (
    *("int8-nearest", "int5-nearest", "fp8-plain", "fp8-tensor", "fp8-stochastic"),
    *("int4-int6-dither", "int6-int4-dither", "int4-int8-dither"),
    *("int6-nearest-sp", "int4-nearest-sp", "int6-stochastic-hop2", "int4-stochastic-hop2"),
)
_ENDED = (
    *("none-tp2", "paper", "int6-dither", "int8-dither", "int6-nearest", "int6-dither-sp", "int8-dither-sp"),
    *("paper-sp", "int6-signed", "int6-signed-g32", "int5-signed-g64", "int5-signed-g32", "int4-signed-g32"),
    *(*SCRATCH[1:], "int5-nearest-g32", "int6-signed-sp", "int5-signed-g64-sp", "int5-signed-g32-sp"),
    *("int8-nearest-sp", "int6655-nearest", "int5655-nearest", "int6-nearest-sp", "int5-signed"),
    *("int4-signed", "int6-dither-hop2", "int6655-signed", "int5655-signed", "int6-signed-g64"),
)
ENDED = tuple(dict.fromkeys(_ENDED))
"""To the end of the schedule from the last checkpoint of every seed, on the data that came next."""
BRANCHES = (*PAIRED, *MECHANISM, *SEQUENCE_PARALLEL, *PARTS, *FORMATS)


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
    """scratch, branch, repeat (of a branch), ending (from a checkpoint to the end), or errors: no training,
    the codecs' errors at a checkpoint."""

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


def repeat(job: Job) -> Job:
    """The same run once more, to see whether it is bitwise the same."""
    return Job(f"{job.id}/again", job.setting, job.seed, job.steps, job.start, kind="repeat")


def error_jobs() -> list[Job]:
    """The codecs' errors on the tensors of seed 0, at its start and at its checkpoints."""
    starts = [None, *(f"{at}-0" for at in CHECKPOINTS)]
    return [Job(f"errors/{start or 'initial-0'}", "none", 0, 0, start, kind="errors") for start in starts]


def make_plan(
    name: str,
    steps: int,
    branch_steps: int,
    seeds: int,
    settings: list[str] | None,
    branch_settings: list[str] | None,
) -> list[Job]:
    """The jobs of a plan: trial, scratch, branch or campaign.

    Raises:
        ValueError: an unknown plan or setting.
    """
    unknown = {*(settings or ()), *(branch_settings or ())} - SETTINGS.keys()
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; see scripts/accuracy/settings.py")
    without_base = lambda names: [n for n in names if n != "none"]  # noqa: E731
    chosen, of_branches = without_base(settings or SCRATCH), without_base(branch_settings or BRANCHES)
    if name == "trial":
        short = without_base(settings or ["paper", "int6-dither"])
        jobs = branches(["none", *short], [0], branch_steps)
        return [*scratch(["none"], [0], steps), *jobs, repeat(jobs[0]), *scratch(short, [0], steps)]
    whole = scratch(["none", *chosen], range(seeds), steps)
    if name == "scratch":
        return whole
    if name == "branch":
        return [
            *scratch(["none"], range(seeds), steps),
            *branches(["none", *of_branches], range(seeds), branch_steps),
        ]
    if name != "campaign":
        raise ValueError(f"unknown plan {name!r}; choose trial, scratch, branch or campaign")
    if branch_settings is None:
        often, seldom = list(PAIRED), [n for n in of_branches if n not in PAIRED]
        first, last = [*MECHANISM, *SEQUENCE_PARALLEL], [*PARTS, *FORMATS]
    else:
        often, seldom, first, last = of_branches, [], [], []
    replicates = range(1, seeds)
    start = branches(["none", *often, *first], [0], branch_steps)
    final = endings(["none", *without_base(settings or ENDED)], range(seeds), steps)
    jobs = [*whole[:seeds], *start[: len(CHECKPOINTS)], repeat(start[0]), *start[len(CHECKPOINTS) :]]
    jobs += [*error_jobs(), *final, *whole[seeds:]]
    jobs += branches(["none", *often], replicates, branch_steps)
    jobs += branches(last, [0], branch_steps) + branches(seldom, replicates, branch_steps)
    return jobs + (scratch(SLICED, range(seeds), steps) if settings is None else [])
