"""Bits by site: the knapsack against every choice, the spec it prints, and a campaign of made-up runs."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bits_by_site
from bits_by_site import CODECS, choose, probe_spec, spec_of, squared_error

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.policy import Rule
from megatron.compression.tensor_parallel.by_site import parse_choices

SLOPES = {("fc1", 0): 5.0, ("fc1", 1): 60.0, ("fc2@0-1", 0): 1.0, ("fc2@0-1", 1): 200.0}
WHAT = ("predicted", "measured")
WEIGHTS = dict.fromkeys(SLOPES, 0.25)


def test_the_choice_is_the_best_of_all() -> None:
    """Within the budget, and at most a hundredth of a bit over what trying everything finds."""
    known = {spec: (parse_codec(spec).bits_per_value(), squared_error(parse_codec(spec))) for spec in CODECS}
    for budget in (0.1, 0.3, 1.0):
        chosen = choose(SLOPES, WEIGHTS, CODECS, budget)
        assert sum(SLOPES[item] * known[spec][1] for item, spec in chosen.items()) <= budget
        every = (
            sum(known[spec][0] for spec in specs) / 4
            for specs in itertools.product(CODECS, repeat=4)
            if sum(s * known[spec][1] for s, spec in zip(SLOPES.values(), specs, strict=True)) <= budget
        )
        bits = sum(known[spec][0] for spec in chosen.values()) / 4
        assert bits <= min(every) + 0.01
    assert chosen["fc2@0-1", 0] == CODECS[-1] != chosen["fc2@0-1", 1], "bits go where they matter"
    with pytest.raises(ValueError, match="give more"):
        choose(SLOPES, WEIGHTS, CODECS, 1e-4)


def test_what_is_printed_is_a_setting() -> None:
    chosen = dict(zip(SLOPES, ("int6", "int6", "int5", "int8"), strict=True))
    text = spec_of(chosen, "int8")
    assert text == "int8;fc1=int6;fc2@0-1=int5/int8"
    codec, choices = parse_choices(text, "--tp-compression")
    rule = Rule(codec, choices=choices)
    assert rule.codec_at("decoder.layers.1.mlp.linear_fc2", 1).name == "int5/int8"
    assert rule.codec_at("decoder.layers.2.mlp.linear_fc2", 2).name == "int8"
    assert probe_spec(("fc1", 1), "int4", "int8") == "none;fc1=int8/int4"


def test_a_campaign(tmp_path, monkeypatch, capsys) -> None:
    """Runs whose loss is known: sensitivities are found, the budget is kept, and nothing is run twice."""
    true = {"qkv": (1.0, 2.0), "fc2": (40.0, 80.0)}  # per cent a squared error; proj sends nothing
    runs = []

    def torchrun(ranks, script, words, log):
        words = [str(word) for word in words]
        spec = words[words.index("--tp-compression") + 1] if "--tp-compression" in words else "none"
        runs.append(spec)
        loss, plain = 2.0, 0
        for part in spec.split(";")[1:]:
            group, _, specs = part.partition("=")
            for slope, codec in zip(true.get(group, ()), parse_codec(specs).hops, strict=False):
                loss += 2.0 * slope * squared_error(codec) / 100
                plain = 1000
        report = Path(words[words.index("--compression-report") + 1], "report.json")
        report.parent.mkdir(parents=True)
        pair = {"compressed": {"sent": 0, "plain": plain}} if plain else {}
        row = {"bytes_per_iteration": {"tp.forward": pair, "tp.backward": pair}}
        report.write_text(json.dumps({"summary": {"validation_loss": loss}, "history": [row]}))
        return 0, ""

    monkeypatch.setattr(bits_by_site, "torchrun", torchrun)
    command = ["--budget", "0.2", "--groups", "qkv", "proj", "fc2", "--output", str(tmp_path), "--", "--x=1"]
    bits_by_site.main(command)
    text = capsys.readouterr().out
    assert len(runs) == 1 + 6 + 1 and runs[-1].startswith("int8;qkv=int4:grid=quadratic")
    assert f"--tp-compression '{runs[-1]}'" in text and "proj " not in text.partition("exchange")[2]
    predicted, measured = (
        float(re.search(rf"(\S+) % {what}", text)[1]) for what in ("predicted", "measured")
    )
    assert predicted == pytest.approx(measured, abs=0.01) and 0.1 < measured <= 0.2
    bits_by_site.main(command)
    assert len(runs) == 8, "results.json remembers"
