"""scripts/accuracy/trend: sizes of the models, and costs by size from the records of runs."""

import json
from pathlib import Path

import pytest

from scripts.accuracy import run, trend
from scripts.accuracy.model import GPT, ModelConfig


@pytest.mark.parametrize("size", run.WIDTHS)
def test_sizes_have_their_parameters(size: str) -> None:
    """A name says the parameters in millions; the count is that of the model itself."""
    assert run.parameters_of(size) == pytest.approx(1e6 * int(size[:-1]), rel=0.03)
    layers, hidden = run.WIDTHS[size]
    assert hidden % 128 == 0, "groups end where tokens do"
    if size == "30m":
        model = GPT(ModelConfig(layers=layers, hidden=hidden, heads=hidden // 64))
        assert sum(parameter.numel() for parameter in model.parameters()) == run.parameters_of(size)


def test_sizes_see_equally_many_tokens_for_each_parameter() -> None:
    assert run.default_steps("111m") == 1232
    for size in run.WIDTHS:
        tokens = run.default_steps(size) * 32 * 1024
        assert tokens / run.parameters_of(size) == pytest.approx(0.363, rel=0.01)


def test_other_sizes_keep_the_steps(tmp_path: Path) -> None:
    words = ["--work-dir", str(tmp_path), "--size"]
    assert run.parse([*words, "350m"]).steps == 1232
    assert run.parse([*words, "60m"]).steps == 682
    assert run.parse([*words, "60m", "--steps", "9"]).steps == 9


@pytest.fixture
def records(tmp_path: Path) -> list[Path]:
    """Files of two sizes, whose runs have the same names: int8 costs 1 and 3 % of 30 M, 2 of 60."""
    files = []
    for size, costs in (("30m", (1.0, 3.0)), ("60m", (2.0,))):
        lines = []
        for seed, cost in enumerate(costs):
            for kind, name, valid in (
                ("scratch", "none", 2.0),
                ("ending", "int8", 2 + 0.02 * cost),
            ):
                record = {"id": f"{kind}/{name}/{seed}", "kind": kind, "seed": seed, "size": size}
                lines.append(json.dumps(record | {"setting": {"name": name}, "valid": valid}))
        files.append(tmp_path / f"results-{size}.jsonl")
        files[-1].write_text("\n".join(lines) + "\n")
    return files


def test_costs_are_of_each_size(records: list[Path]) -> None:
    costs = trend.by_size(trend.load_all(records))
    assert costs == {"int8": {"30m": pytest.approx([1.0, 3.0]), "60m": pytest.approx([2.0])}}


def test_the_table_and_the_figure(records: list[Path], tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="of the extra plots")
    picture = tmp_path / "trend.png"
    trend.main([*map(str, records), "--figure", str(picture)])
    assert "| int8 | +2.000 ± 1.000 | +2.000 |" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
