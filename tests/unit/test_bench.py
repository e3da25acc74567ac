"""scripts/bench_end_to_end.py: settings, which of them share a run, the table."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import _launch
import bench_end_to_end as bench

from megatron.compression.auto import plan


def test_settings_are_specs_and_flags():
    one = _launch.parse_setting("int4:normalize=standardize,group=32 int6 --validate-uncompressed")
    assert one.words("pipeline") == [
        *("--pp-compression", "int4:normalize=standardize,group=32"),
        *("int6", "--validate-uncompressed"),
    ]
    assert _launch.parse_setting("int5/int6").words("tensor") == [
        *("--tp-compression", "int5/int6", "--compression-min-mb", "0")
    ]
    every = ["--compression-min-mb", "0"]
    assert _launch.parse_setting("none --compression taco-paper").words("data") == [
        "--compression",
        "taco-paper",
        *every,
    ]
    given = _launch.parse_setting("taco --compression-min-mb 8").words("tensor")
    assert given == ["--tp-compression", "taco", "--compression-min-mb", "8"]
    assert _launch.parse_setting("none --grad-reduce-in-bf16").words("data") == ["--grad-reduce-in-bf16"]
    assert _launch.parse_setting("sdp4bit none").words("data")[2:] == ["none"]
    for wrong in ("--taco", "int4 int4 int4"):
        with pytest.raises(ValueError, match="one codec"):
            _launch.parse_setting(wrong)


def test_neighbours_share_a_run_where_only_codecs_differ():
    settings = [
        _launch.parse_setting(t) for t in ("none", "int6", "int6 --tp-compression-overlap halves", "none")
    ]

    assert [len(together) for together in bench.launches("tensor", settings)] == [2, 1, 1]
    assert [len(together) for together in bench.launches("data", settings)] == [1, 1, 1, 1]


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


def test_a_layout_makes_ranks_flags_and_columns():
    def parse(text: str) -> tuple[Namespace, str, tuple[str, ...]]:
        options, flags, traffic = bench.parse(text.split())
        return options, " ".join(map(str, flags)), traffic

    options, flags, traffic = parse("")
    assert (options.ranks, options.dimension, options.shape) == (4, "tensor", "1.75b")
    assert "--global-batch-size 16" in flags and "--tensor-model-parallel-size 4" in flags
    layout = "--tensor-parallel 2 --pipeline-parallel 2 --data-parallel 2"
    options, flags, traffic = parse(f"--shape qwen2.5-7b {layout} --micro-batches 4 --no-overlap")
    assert options.ranks == 8 and "--global-batch-size 64" in flags and "--overlap-grad-reduce" not in flags
    assert "--vocab-size 152064" in flags and "--padded-vocab-size" not in flags
    assert {name[:2] for name in traffic} == {"tp", "pp", "dp"} and "--grad-reduce-in-bf16" in flags
    options, flags, traffic = parse("--expert-parallel 2 --iterations 5")
    assert (options.ranks, options.dimension, traffic) == (2, "expert", ("ep.forward", "ep.backward"))
    for text in ("--micro-batch-size 8", "--micro-batch-size=8"):
        _, flags, _ = parse(f"{text} --micro-batches 3")
        assert "--global-batch-size 24" in flags, "Megatron's flags behind win over the shape's"
    experts = ("--shape 350m", "--micro-batches 4", "--no-overlap")
    for wrong in (f"--expert-parallel 2 {one}" for one in experts):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_variables_of_a_setting_are_the_runs() -> None:
    nodes = _launch.parse_setting("sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1")
    assert nodes.environment == {"MEGATRON_COMPRESSION_NODE_SIZE": "1"}
    assert nodes.words("data") == ["--dp-compression", "sdp4bit"]
    auto = _launch.parse_setting("none --compression=auto")
    assert auto.flags == bench.AUTO and auto.words("pipeline") == ["--compression", "auto"]
