"""scripts/bench_end_to_end.py: settings, which of them share a run, the table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import _launch
import bench_end_to_end as bench

from megatron.compression.auto import plan


def test_auto_is_timed_behind_its_check():
    """As many iterations as the check has turns."""
    options, _, _ = bench.parse(["--tensor-parallel", "2", "--pipeline-parallel", "2"])
    found = plan.Check(["tensor_parallel", "pipeline_parallel"], 0, lambda: 0, print)
    assert bench.checked_in(options) == 1 + plan.WARM_UP + found.iterations
    options, _, _ = bench.parse(["--data-parallel", "2"])
    assert bench.checked_in(options) == 1 + plan.WARM_UP + 2 * 2 * plan.BLOCK


def test_ranges_and_speed_ups_of_the_table():
    def line(milliseconds: float) -> dict:
        kinds = {"compressed": {"sent": 1e6, "plain": 4e6}, "exact": {"sent": 5e5, "plain": 5e5}}
        row = {"milliseconds_per_iteration": milliseconds, "losses": {"lm loss": 5.0}}
        return row | {"bytes_per_iteration": {"tp.forward": kinds}}

    traffic = ("tp.forward", "tp.backward")
    rows = [
        {"regime": "pcie", "communicators": 2, "codec": codec}
        | bench.summary(list(map(line, times)), traffic)
        for codec, times in (("none", (20.0, 22.0, 24.0)), ("int6", (10.0, 11.0, 12.0)))
    ]
    text = bench.table(rows, traffic)
    assert "| pcie | none | 22.0 (20.0 - 24.0) | 1.00 (0.83 - 1.20) | 1.5 | 0.0 | 5.0000 |" in text
    assert "| pcie | int6 | 11.0 (10.0 - 12.0) | 2.00 (1.67 - 2.40) | 1.5 | 0.0 | 5.0000 |" in text
    assert text.endswith("Communicators of every message: 2.")


def test_variables_of_a_setting_are_the_runs() -> None:
    nodes = _launch.parse_setting("sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1")
    assert nodes.environment == {"MEGATRON_COMPRESSION_NODE_SIZE": "1"}
    assert nodes.words("data") == ["--dp-compression", "sdp4bit"]
    auto = _launch.parse_setting("none --compression=auto")
    assert auto.flags == bench.AUTO and auto.words("pipeline") == ["--compression", "auto"]
