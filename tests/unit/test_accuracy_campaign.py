"""The accuracy bench's campaign: what runs when, what the numbers mean, and a tiny one from end to end."""

import json
import math
import random
import statistics

import numpy as np
import pytest
import torch

from scripts.accuracy import estimates, layers, plots, run, summarise
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT, MASSIVE_CHANNEL, MASSIVE_LAYER, ModelConfig
from scripts.accuracy.plan import Job, cost_of, make_plan, next_job
from scripts.accuracy.records import compact, load
from scripts.accuracy.settings import setting_of
from scripts.accuracy.tables import tables
from scripts.accuracy.training import Schedule, Trainer

pytestmark = pytest.mark.slow


def test_plans_name_known_settings_and_checkpoints():
    for name in ("ending", "campaign"):
        jobs = make_plan(name, 1200, 50, 3, None, None)
        assert len({job.id for job in jobs}) == len(jobs)
        saved = {target for job in jobs for target in job.save.values()}
        assert {job.start for job in jobs if job.start} <= saved
        assert {setting_of(job.setting).name for job in jobs} == {job.setting for job in jobs}
        blocks = {(job.start, job.seed, job.steps) for job in jobs if job.kind in ("scratch", "branch")}
        base = {(j.start, j.seed, j.steps) for j in jobs if j.setting == "none"}
        assert blocks <= base, "every run has its uncompressed partner"
    with pytest.raises(ValueError, match="int7"):
        make_plan("ending", 10, 2, 1, ["int7"], None)
    chosen = {job.setting for job in make_plan("campaign", 10, 2, 1, ["paper"], ["sdp4bit"])}
    assert chosen == {"none", "paper", "sdp4bit"}


def test_next_job_waits_for_checkpoints_and_makes_lost_ones_again():
    trunk = Job("scratch/none/0", "none", 0, 100, save={50: "late-0"})
    branch = Job("branch/late-0/paper/1000", "paper", 1000, 10, start="late-0", kind="branch")
    plan, cost = [trunk, branch], lambda job: float(job.steps)
    assert next_job(plan, set(), set(), set(), 1000, cost) == (trunk, False)
    assert next_job(plan, set(), {trunk.id}, set(), 1000, cost) == (None, True), "wait for the checkpoint"
    assert next_job(plan, set(), {trunk.id}, {"late-0"}, 1000, cost) == (branch, False)
    assert next_job(plan, {trunk.id}, set(), {"late-0"}, 50, cost) == (branch, False)
    assert next_job(plan, {trunk.id}, set(), set(), 1000, cost) == (trunk, False), "its checkpoint is gone"
    assert next_job(plan, {trunk.id, branch.id}, set(), set(), 1000, cost) == (None, False)
    assert next_job([branch], set(), set(), set(), 1000, cost) == (None, False), "nobody makes its checkpoint"


def test_costs_follow_what_was_measured():
    guess, job = cost_of([]), Job("scratch/paper/0", "paper", 0, 1000)
    record = {"setting": {"name": "none"}, "seconds_per_step": 0.2}
    slow = cost_of([record])
    assert 60 < guess(job) < 90 and 200 < slow(job) < 220
    assert cost_of([record, record | {"setting": {"name": "paper"}, "seconds_per_step": 0.1}])(job) < 120


def test_standard_errors():
    found = estimates.estimate([1.0, 2.0, 3.0, 6.0])
    assert (found.mean, found.count, found.freedom) == (3.0, 4, 3)
    assert found.error == pytest.approx(math.sqrt(14 / 3) / 2)
    assert found.interval[1] == pytest.approx(3 + 3.1824 * found.error)
    assert math.isnan(estimates.estimate([1.0]).error)
    for freedom, exact in ((1, 12.7062), (9, 2.2622), (10, 2.2281), (24, 2.0639), (30, 2.0423), (1e6, 1.96)):
        assert estimates.t_quantile(freedom) == pytest.approx(exact, abs=3e-4)
    assert estimates.t_quantile(9) > estimates.t_quantile(9.5) > estimates.t_quantile(10)


def _record(name: str, seed: int, valid: float, kind: str = "scratch", start: str | None = None) -> dict:
    record = {"id": f"{kind}/{start}/{name}/{seed}", "setting": setting_of(name).as_dict(), "seed": seed}
    record |= {"kind": kind, "start": start, "steps": 4, "size": "tiny", "valid": valid, "seconds": 1.0}
    return record | {"losses": [3.0, 2.0, valid, valid], "weights": "a", "seconds_per_step": 0.07}


def test_pairs_share_seed_and_checkpoint(tmp_path):
    records = [_record("none", 0, 2.0), _record("none", 1, 4.0), _record("paper", 0, 2.02)]
    records += [_record("paper", 1, 4.12), _record("paper", 7, 9.0)]  # seed 7 has no partner
    records += [_record("none", 0, 5.0, "branch", "early-0"), _record("paper", 0, 5.05, "branch", "early-0")]
    found = estimates.differences(records, "scratch")
    assert sorted(found["paper"].values()) == pytest.approx([1.0, 3.0])
    assert list(estimates.differences(records, "branch")["paper"].values()) == pytest.approx([1.0])
    path = tmp_path / "results-0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"id": "half a li')
    text = tables(load([path, path]))
    assert "| paper | 8.50 | 2.0200, 4.1200, 9.0000 | +2.000 ± 1.000 |" in text
    assert "| paper | 8.50 | 1 | +1.000 |" in text
    kept = summarise.write_kept(records, tmp_path / "kept")
    assert tables(load([kept])) == text, "what is kept makes the same tables"


def _noisy(effects: dict[str, float], seeds: int, deviation: float, generator: random.Random) -> list[dict]:
    """Runs of the additive model: settings of known effect (per cent), seeds far apart, noise."""
    records = []
    for seed in range(seeds):
        for name, effect in effects.items():
            value = effect + 5 * seed + generator.gauss(0, deviation)
            records.append(_record(name, seed, 2.5 * math.exp(value / 100)))
    return records


def test_intervals_hold_what_they_say():
    """Over many campaigns of the additive model: the noise is found, and 95 % of the intervals are right."""
    generator = random.Random(3)
    names = (
        "none",
        "none-tp2",
        "paper",
        "int8-signed",
        "int6-signed",
        "int5-signed",
        "int4-signed",
        "fp8-plain",
    )
    effects = {name: 0.1 * max(0, i - 1) for i, name in enumerate(names)}
    deviations, right, verdicts = [], 0, []
    for _ in range(300):
        records = _noisy(effects, 3, 0.2, generator)
        noise = estimates.noise_by_stage(records, "scratch")
        assert noise[""].freedom == 14
        deviations.append(noise[""].deviation)
        summary = estimates.pooled(records, "scratch")
        found, null = summary["int4-signed"], summary["none-tp2"]
        reference = statistics.fmean(
            math.exp(effects[name] / 100) for name in (estimates.BASE, estimates.NULL)
        )
        truth = 100 * (math.exp(effects["int4-signed"] / 100) / reference - 1)
        right += found.interval[0] < truth < found.interval[1]
        verdicts.append(null.interval[0] < 0 < null.interval[1])
        assert found.freedom == pytest.approx(14)
        assert found.error == pytest.approx(null.error * math.sqrt(0.75)), "two references against one"
    assert statistics.fmean(deviations) == pytest.approx(0.2, rel=0.05)
    assert 0.92 <= right / 300 <= 0.98
    assert sum(verdicts) > 180


def _ending(effects: dict[str, float], deviations: dict[str, float], generator: random.Random) -> list[dict]:
    """Three endings of each setting, of known effect and noise, per cent."""
    return [
        _record(name, seed, 2.5 * math.exp(value / 100), "ending", f"late-{seed}")
        for seed in range(3)
        for name, effect in effects.items()
        for value in [effect + 5 * seed + generator.gauss(0, deviations[name])]
    ]


def test_a_loud_setting_does_not_widen_the_others():
    """A coarse codec that scatters thirty times as much has its own error, and is not common noise."""
    effects = {
        "none": 0.0,
        "none-tp2": 0.0,
        "paper": 0.1,
        "int8-signed": 0.0,
        "int6-signed": 0.1,
        "int4-signed": 2.0,
    }
    deviations = dict.fromkeys(effects, 0.01) | {"int4-signed": 0.3}
    records = _ending(effects, deviations, random.Random(5))
    assert estimates.loud(records, "ending") == {"late": {"int4-signed"}}
    assert 0.005 < estimates.noise_by_stage(records, "ending")["late"].deviation < 0.02
    summary = estimates.pooled(records, "ending")
    assert summary["int4-signed"].error > 10 * summary["paper"].error
    assert summary["int4-signed"].freedom == summary["paper"].freedom == pytest.approx(2)


def test_own_intervals_hold_what_they_say():
    """Endings: 95 % of the intervals are right, whatever each setting's noise."""
    generator, right = random.Random(8), []
    effects = {"none": 0.0, "none-tp2": 0.0, "paper": 0.1, "int4-signed": 2.0}
    deviations = {"none": 0.0, "none-tp2": 0.0, "paper": 0.01, "int4-signed": 0.2}
    for _ in range(400):
        summary = estimates.pooled(_ending(effects, deviations, generator), "ending")
        for name in ("paper", "int4-signed"):
            low, high = summary[name].interval
            right.append(low < 100 * (math.exp(effects[name] / 100) - 1) < high)
    assert 0.93 <= statistics.fmean(right) <= 0.97


def test_what_cannot_be_told_apart():
    effects = {"none": 0.0, "none-tp2": 0.0, "paper": 0.5}
    loud, quiet = (_noisy(effects, 3, deviation, random.Random(1)) for deviation in (1.0, 0.02))
    assert "so 0.3 % cannot be." in tables(loud) and "so 0.3 % can be." in tables(quiet)


def test_branches_of_unequal_replicates():
    """A single run gets its error from the settings with three, unless it is a coarse codec's; three have
    their own, stage by stage."""
    generator, records = random.Random(5), []
    for stage, scale in (("early", 0.1), ("late", 0.02)):
        for replicate in range(3):
            for name in ("none", "none-tp2", "paper", "int6-nearest", "int4-nearest"):
                if name in ("none", "none-tp2", "paper") or replicate == 0:
                    value = 2 * math.exp(generator.gauss(2.0 * (name == "int4-nearest"), scale) / 100)
                    records.append(_record(name, 1000 + replicate, value, "branch", f"{stage}-{replicate}"))
    noise = estimates.noise_by_stage(records, "branch")
    assert {stage: found.freedom for stage, found in noise.items()} == {"early": 4, "late": 4}
    assert noise["early"].deviation > 3 * noise["late"].deviation
    summary = estimates.pooled(records, "branch")
    once = math.hypot(*(noise[stage].deviation * math.sqrt(1.5) for stage in noise)) / 2
    assert summary["int6-nearest"].error == pytest.approx(once) and summary["int6-nearest"].count == 2
    assert math.isnan(summary["int4-nearest"].error)
    own = estimates.differences(records, "branch")["paper"]
    stages = {"early": [], "late": []}
    for block, value in own.items():
        stages[block.stage].append(value)
    error = math.sqrt(sum(statistics.variance(values) / 3 for values in stages.values())) / 2
    assert summary["paper"].error == pytest.approx(error)
    assert 2 <= summary["paper"].freedom < 4


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A tiny campaign done by one worker in this process."""
    patch = pytest.MonkeyPatch()
    config = ModelConfig(vocabulary=64, layers=1, hidden=32, heads=2, sequence=16, dtype=torch.float32)
    patch.setattr(run, "sizes", lambda args: (config, Schedule(args.steps, 2, warmup=2)))
    folder = tmp_path_factory.mktemp("campaign")
    generator = np.random.default_rng(0)
    words = generator.integers(0, 64, (40, 8))
    (folder / "work" / "corpus").mkdir(parents=True)
    for name, count in (("train", 600), ("valid", 40), ("test", 40)):
        ids = words[generator.integers(0, 40, count)].reshape(-1)
        np.save(folder / "work" / "corpus" / f"{name}.npy", ids.astype(np.uint16))
    (folder / "work" / "corpus" / "meta.json").write_text("{}")
    do(folder / "work", folder / "out")
    yield folder
    patch.undo()


def do(work, out, *more: str) -> run.Worker:
    """One worker's part of a call of ``run``."""
    args = ["--work-dir", str(work), "--out", str(out), "--size", "tiny", "--steps", "8", *more]
    args += ["--branch-steps", "2", "--seeds", "2", "--settings", "none-tp2", "--branch-settings", "paper"]
    args = run.parse([*args, "--worker", "0", "--deadline", "inf"])
    run.prepare_folders(args)
    worker = run.Worker(args, run.plan_of(args))
    worker.loop()
    return worker


def test_a_tiny_campaign(campaign, tmp_path):
    out = campaign / "out"
    records = load([out / "results-0.jsonl"])
    plan = make_plan("campaign", 8, 2, 2, ["none-tp2"], ["paper"])
    assert {r["id"] for r in records} == {job.id for job in plan}
    branch = next(r for r in records if r["kind"] == "branch" and r["start"] == "late-1")
    assert branch["first_step"] == 6 and len(branch["losses"]) == 2
    text = tables(records)
    assert (
        "twice: bitwise the same" in text
        and "null comparison" in text
        and "| early, % | middle, % | late, % |" in text
    )
    small = compact(records)
    assert tables(small) == text and len(json.dumps(small)) < len(json.dumps(records))
    names = ["scratch.png", "ending.png", "branch.png", "curves.png"]
    assert [path.name for path in plots.plots(small, tmp_path)] == names


def test_a_second_call_goes_on(campaign, tmp_path):
    """It does what is missing; elsewhere, with the results alone, the trunk again, with the same bits."""
    before = load([campaign / "out" / "results-0.jsonl"])
    do(campaign / "work", tmp_path / "same")
    assert load([tmp_path / "same" / "results-0.jsonl"]) == before
    known = [r for r in before if r["start"] != "late-1" or r["setting"]["name"] != "paper"]
    [lost] = [r for r in before if r not in known]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "results-3.jsonl").write_text("".join(json.dumps(r) + "\n" for r in known))
    (tmp_path / "work" / "corpus").symlink_to(campaign / "work" / "corpus")
    do(tmp_path / "work", tmp_path / "out")
    again = load([tmp_path / "work" / "results-0.jsonl"])
    assert [r["id"] for r in again] == ["scratch/none/1", lost["id"]]
    assert again[1]["weights"] == lost["weights"]
    assert {r["id"] for r in load(sorted((tmp_path / "work").glob("results-*")))} == {r["id"] for r in before}


def test_a_failing_run_costs_only_itself(campaign, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "corpus").symlink_to(campaign / "work" / "corpus")
    whole = Trainer.run

    def broken(self, setting, steps, seed, save, part):
        if setting.name == "none" and save:
            raise RuntimeError("no such luck")
        return whole(self, setting, steps, seed, save, part)

    monkeypatch.setattr(Trainer, "run", broken)
    do(tmp_path / "work", tmp_path / "out")
    ids = {r["id"] for r in load([tmp_path / "out" / "results-0.jsonl"])}
    assert ids == {"scratch/none-tp2/0", "scratch/none-tp2/1"}, "no trunk, no waiting"


def test_a_model_made_to_have_massive_activations():
    """The first token's neuron adds to one channel of what fc2 sends, of that token alone, and learns."""
    model = GPT(ModelConfig(64, 2, 32, 2, 16, torch.float32, massive=1000.0))
    model.initialise(0)
    sent = []

    class Recorded(Exchange):
        def reduce(self, partials, direction, whole=False):
            sent.append(partials.detach())
            return super().reduce(partials, direction, whole)

    layers.attach(Recorded(setting_of("none")))
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model(ids, ids).mean().backward()
    size = sent[2 * (1 + MASSIVE_LAYER)].abs().amax(0).view(2, 16, 32)  # embedding, then two a layer
    assert (size[:, 0, MASSIVE_CHANNEL % 32] > 900).all()
    assert size[:, 1:].max() < 1 and len(sent) == 1 + 4 + 1 + 4
    assert model.blocks[MASSIVE_LAYER].fc2.grad[MASSIVE_CHANNEL % 32, 0] != 0
