"""The tool that measures formats and group sizes on a run, and the flags of the accuracy bench's settings."""

import sys
from pathlib import Path

import pytest
import torch

from megatron.compression.codecs import build_codec
from megatron.compression.config import TACO_FORMATS, TACO_GROUP_SIZES
from megatron.compression.tensor_parallel.survey import CodecSurvey
from scripts.accuracy.settings import SETTINGS
from scripts.accuracy.true_runs import taco_flags

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import choose_codec


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Two ranks' measures of one site."""
    parts = []
    for rank in range(2):
        survey = CodecSurvey(iteration=4)
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(rank)).bfloat16()
        assert not survey.due("fc2", "tp.forward", 3) and survey.due("fc2", "tp.forward", 4)
        survey.measure("fc2", "tp.forward", x, build_codec("taco"))
        assert not survey.due("fc2", "tp.forward", 4), "once a site and channel"
        assert not survey.tripped
        parts.append(survey.squares())
    return choose_codec.merge(parts)


def test_survey_measures_every_format_and_group_size(rows):
    assert len(rows) == len(TACO_FORMATS) * len(TACO_GROUP_SIZES)
    table = {(r["format"], r["group_size"]): r for r in choose_codec.summary(rows)}
    assert table["int6", 128]["bits"] == 6.125
    # Gaussian values; the documentation's errors of one encoding
    assert table["fp8-e4m3", 128]["error"] == pytest.approx(0.0257, rel=0.03)
    assert table["int6", 128]["error"] == pytest.approx(0.0268, rel=0.05)
    assert table["int4", 128]["error"] == pytest.approx(0.119, rel=0.05)
    for number_format in ("int8", "int6", "int5", "int4"):
        errors = [table[number_format, group_size]["error"] for group_size in TACO_GROUP_SIZES]
        assert errors == sorted(errors), "a smaller group has the smaller error"


def test_report_marks_one_group_size_a_format(rows):
    table = choose_codec.summary(rows)
    assert set(choose_codec.best(table)) == {("tp.forward", f) for f in TACO_FORMATS}
    text = choose_codec.report(table)
    assert text.count(" <\n") == len(TACO_FORMATS)


def test_worst_site_and_mean():
    row = {"channel": "tp.forward", "format": "int4", "group_size": 32, "bits": 4.5}
    sites = [
        {**row, "site": "a", "error": 1.0, "signal": 100.0},
        {**row, "site": "b", "error": 49.0, "signal": 100.0},
    ]
    [one] = choose_codec.summary(sites)
    assert (one["worst"], one["worst_site"]) == (0.7, "b") and one["error"] == pytest.approx(0.5)


def test_flags_of_settings():
    assert taco_flags(SETTINGS["none"]) == []
    flags = taco_flags(SETTINGS["int6-int4-dither"])
    assert flags[flags.index("--taco-format") + 1] == "int6,int4" and "--taco-backward-format" not in flags
    assert flags[flags.index("--taco-rounding") + 1] == "dither,dither"
    flags = taco_flags(SETTINGS["int6-stochastic-hop2"])
    assert flags[flags.index("--taco-rounding") + 1] == "nearest,stochastic"
    for name in ("paper-forward", "int6-meanfree", "fp8-plain", "fp8-tensor"):
        with pytest.raises(ValueError, match=name):
            taco_flags(SETTINGS[name])
