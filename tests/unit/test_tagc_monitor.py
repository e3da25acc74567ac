"""What the log says of TAGC's sketches."""

import pytest
import torch

from megatron.compression.tagc.monitor import TagcMonitor
from taco_kernels import count_sketch
from tests.kernels.test_count_sketch import ordered_sum, receive, send, sparse


def _reading(
    layout: count_sketch.SketchLayout, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of three decodes of one sum; its true error, and what was decoded."""
    monitor = TagcMonitor()
    monitor.sums = 1
    wires, exponents, sent = send(x, layout)
    decoded = receive(wires, exponents, layout, len(x))
    for _ in range(3):
        monitor.add(decoded, layout.numel, layout.exact_density * layout.numel)
    reading = monitor.read()
    assert not monitor.read().any(), "a reading starts anew"
    return reading, decoded.values - ordered_sum(sent), decoded.values


def _line(reading: torch.Tensor) -> str:
    (line,) = TagcMonitor().lines(reading)
    return line


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_values_that_were_estimated_are_told_with_their_error(factor: float) -> None:
    layout = count_sketch.SketchLayout(count_sketch.SketchConfig(), 60_000)
    reading, error, values = _reading(layout, sparse(4, layout.numel, factor * layout.exact_density))
    scalars = TagcMonitor().scalars(reading)
    wrong = error != 0
    true = float(error.abs().sum() / values[wrong].abs().sum())
    assert abs(scalars["tagc/relative error of estimates"] - true) < 0.35 * true
    leftovers, union = scalars["tagc/values estimated"], int(reading[3])
    assert int(leftovers) == int(reading[4]) >= 3 * int(wrong.sum()) > 0
    percent = 100 * scalars["tagc/relative error of estimates"]
    expected = f"; {leftovers:.0f} of {union} values were estimated, not recovered, and are wrong by "
    assert _line(reading).endswith(f"{expected}about {percent:.0f} % of their size")


def test_values_that_were_recovered() -> None:
    layout = count_sketch.SketchLayout(count_sketch.SketchConfig(), 60_000)
    reading, error, _ = _reading(layout, sparse(4, layout.numel, 0.9 * layout.exact_density))
    assert not error.any()
    assert _line(reading).endswith(f"all {int(reading[3])} values recovered exactly")
    assert TagcMonitor().scalars(reading)["tagc/relative error of estimates"] == 0


def test_nothing_was_compressed() -> None:
    """Said where sums were started; before, gradients go uncompressed by intent."""
    monitor = TagcMonitor()
    assert monitor.lines(monitor.read()) == []
    monitor.sums += 1
    reading = monitor.read()
    assert "nothing was compressed" in _line(reading)
    assert monitor.scalars(reading) == {}
