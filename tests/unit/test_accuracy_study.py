"""The study of losses: what runs when, what the numbers mean, and a tiny one from end to end."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
from pytest import approx

from scripts.accuracy import estimates, layers, run, summarise
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT, MASSIVE_CHANNEL, MASSIVE_LAYER, ModelConfig
from scripts.accuracy.plan import EXPERTS, Job, cost_of, make_plan, next_job
from scripts.accuracy.records import compact, load
from scripts.accuracy.settings import setting_of
from scripts.accuracy.tables import tables
from scripts.accuracy.training import Schedule, Trainer

pytestmark = pytest.mark.slow


def test_plans_name_known_settings_and_checkpoints():
    for chosen in (None, EXPERTS):
        jobs = make_plan(chosen, 1200, 3)
        assert len({job.id for job in jobs}) == len(jobs)
        saved = {target for job in jobs for target in job.save.values()}
        assert {job.start for job in jobs if job.kind == "ending"} == saved == {"late-0", "late-1", "late-2"}
        assert {setting_of(job.setting).name for job in jobs} == {job.setting for job in jobs}
        assert [job.setting for job in jobs[:3]] == ["none"] * 3, "what the others need comes first"
    with pytest.raises(ValueError, match="int7"):
        make_plan(["int7"], 10, 1)
    whole = make_plan(["paper", "none"], 10, 2, from_scratch=True)
    assert [(job.setting, job.steps, job.start) for job in whole] == [
        *[("none", 10, None)] * 2,
        *[("paper", 10, None)] * 2,
    ]


def test_next_job_waits_for_checkpoints_and_makes_lost_ones_again():
    trunk = Job("scratch/none/0", "none", 0, 100, save={50: "late-0"})
    ending = Job("ending/paper/0", "paper", 0, 10, start="late-0", kind="ending")
    plan, cost = [trunk, ending], lambda job: float(job.steps)
    assert next_job(plan, set(), set(), set(), 1000, cost) == (trunk, False)
    assert next_job(plan, set(), {trunk.id}, set(), 1000, cost) == (None, True), "wait for the checkpoint"
    assert next_job(plan, set(), {trunk.id}, {"late-0"}, 1000, cost) == (ending, False)
    assert next_job(plan, {trunk.id}, set(), {"late-0"}, 50, cost) == (ending, False)
    assert next_job(plan, {trunk.id}, set(), set(), 1000, cost) == (trunk, False), "its checkpoint is gone"
    assert next_job(plan, {trunk.id, ending.id}, set(), set(), 1000, cost) == (None, False)
    assert next_job([ending], set(), set(), set(), 1000, cost) == (None, False), "nobody makes its checkpoint"


def test_costs_follow_what_was_measured():
    guess, job = cost_of([]), Job("scratch/paper/0", "paper", 0, 1000)
    record = {"setting": {"name": "none"}, "seconds_per_step": 0.2}
    slow = cost_of([record])
    assert 60 < guess(job) < 90 and 200 < slow(job) < 220
    assert cost_of([record, record | {"setting": {"name": "paper"}, "seconds_per_step": 0.1}])(job) < 120


def test_standard_errors():
    found = estimates.estimate([1.0, 2.0, 3.0, 6.0])
    assert (found.mean, found.count) == (3.0, 4)
    assert found.error == pytest.approx(math.sqrt(14 / 3) / 2)
    assert found.interval[1] == pytest.approx(3 + 3.1824 * found.error)
    assert math.isnan(estimates.estimate([1.0]).error) and math.isnan(estimates.estimate([1.0]).interval[0])
    many = estimates.estimate([float(value) for value in range(40)])
    assert many.interval[1] - many.mean == pytest.approx(2.2622 * many.error), "on the safe side"


def _record(name: str, seed: int, valid: float, kind: str = "scratch") -> dict:
    record = {"id": f"{kind}/{name}/{seed}", "setting": setting_of(name).as_dict(), "seed": seed}
    record |= {"kind": kind, "steps": 4, "size": "tiny", "valid": valid, "seconds": 1.0, "weights": "a"}
    losses = [3.0, 2.0, *[valid] * (8 if kind == "scratch" else 2)]
    return record | {"losses": losses, "seconds_per_step": 0.07}


def test_pairs_share_a_seed(tmp_path):
    """Endings are compared with the whole uncompressed run of their seed, and whole runs with it, too."""
    records = [_record("none", 0, 2.0), _record("none", 1, 4.0), _record("paper", 0, 2.02)]
    records += [_record("paper", 1, 4.12), _record("paper", 7, 9.0)]  # seed 7 has no partner
    records += [_record("int6", seed, valid, "ending") for seed, valid in ((0, 2.002), (1, 4.004))]
    records[-1]["valid_uncompressed"] = 4.002
    records.append(_record("int6", 0, 2.5, "branch"))  # as earlier versions made them
    assert estimates.differences(records, "scratch") == {"paper": {0: approx(1.0), 1: approx(3.0)}}
    assert estimates.differences(records, "ending") == {"int6": {0: approx(0.1), 1: approx(0.1)}}
    assert estimates.differences(records, "ending", "uncompressed") == {"int6": {1: approx(0.05)}}
    assert estimates.differences(records, "ending", "train") == {"int6": {0: approx(0.1), 1: approx(0.1)}}
    path = tmp_path / "results-0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"id": "half a li')
    text = tables(load([path, path]))
    assert "| paper | 8.50 | +1.000, +3.000 | +2.000 ± 1.000 | -10.71 … +14.71 |" in text
    assert "| int6 | 6.12 | +0.100, +0.100 | +0.100 ± 0.000 |" in text and "| test loss, % |" not in text
    kept = tmp_path / "kept.json"
    summarise.write_kept(records, kept)
    assert tables(load([kept])) == text, "what is kept makes the same tables"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A tiny one done by one worker in this process."""
    patch = pytest.MonkeyPatch()
    config = ModelConfig(vocabulary=64, layers=1, hidden=32, heads=2, sequence=16, dtype=torch.float32)
    patch.setattr(run, "sizes", lambda args: (config, Schedule(args.steps, 2, warmup=2)))
    folder = tmp_path_factory.mktemp("study")
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


def do(work, out, *more: str) -> argparse.Namespace:
    """One worker's part of a call of ``run``; its arguments."""
    args = ["--work-dir", str(work), "--out", str(out), "--size", "tiny", "--steps", "8", *more]
    args += ["--seeds", "2", "--settings", "none-tp2", "paper"]
    args = run.parse([*args, "--worker", "0", "--deadline", "inf"])
    run.prepare_folders(args)
    run.Worker(args, run.plan_of(args)).loop()
    return args


def test_a_tiny_study(study):
    records = load([study / "out" / "results-0.jsonl"])
    assert {r["id"] for r in records} == {job.id for job in make_plan(["none-tp2", "paper"], 8, 2)}
    ending = next(r for r in records if r["id"] == "ending/paper/1")
    assert ending["first_step"] == 6 and len(ending["losses"]) == 2
    text = tables(records)
    assert "| none-tp2 | 16.00 | " in text and "| weights used uncompressed, % | test loss, % |" in text
    small = compact(records)
    assert tables(small) == text and len(json.dumps(small)) < len(json.dumps(records))


def test_a_second_call_goes_on(study, tmp_path):
    """It does what is missing; elsewhere, with the results alone, the trunk again, with the same bits."""
    before = load([study / "out" / "results-0.jsonl"])
    args = do(study / "work", tmp_path / "same")
    run.finish(args, [0])
    with pytest.raises(SystemExit, match="a worker died"):
        run.finish(args, [0, -9])
    assert load([tmp_path / "same" / "results-0.jsonl"]) == before
    known = [r for r in before if r["id"] != "ending/paper/1"]
    [lost] = [r for r in before if r not in known]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "results-3.jsonl").write_text("".join(json.dumps(r) + "\n" for r in known))
    (tmp_path / "work" / "corpus").symlink_to(study / "work" / "corpus")
    do(tmp_path / "work", tmp_path / "out")
    again = load([tmp_path / "work" / "results-0.jsonl"])
    assert [r["id"] for r in again] == ["scratch/none/1", lost["id"]]
    assert again[1]["weights"] == lost["weights"]
    assert {r["id"] for r in load(sorted((tmp_path / "work").glob("results-*")))} == {r["id"] for r in before}


def test_a_failing_run_costs_only_itself(study, tmp_path, monkeypatch, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "corpus").symlink_to(study / "work" / "corpus")
    whole = Trainer.run

    def broken(self, setting, steps, seed, save):
        if seed == 0 and save:
            raise RuntimeError("no such luck")
        return whole(self, setting, steps, seed, save)

    monkeypatch.setattr(Trainer, "run", broken)
    args = do(tmp_path / "work", tmp_path / "out")
    with pytest.raises(SystemExit, match="not all runs ended well: scratch/none/0"):
        run.finish(args, [0])
    assert "3 of 6 runs are left" in capsys.readouterr().out
    ids = {r["id"] for r in load([tmp_path / "out" / "results-0.jsonl"])}
    expected = {"scratch/none/1", "ending/none-tp2/1", "ending/paper/1"}
    assert ids == expected, "nothing of the seed whose trunk failed, and no waiting"


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
