"""scripts/bench_end_to_end.py: settings, which share a run, what a failure costs, the table."""

import json
import sys
from pathlib import Path

import _launch
import bench_end_to_end as bench
import pytest

from megatron.compression.auto import check


def test_auto_is_timed_behind_its_check() -> None:
    options = bench.parse(["--tensor-parallel", "2", "--pipeline-parallel", "2"])
    assert bench.iterations_of_check(options, "none") == check.most_iterations(2)


def test_auto_in_graphs_is_timed_behind_its_longer_check() -> None:
    """A block of the check then has an iteration without a graph and a capture, too."""
    options = bench.parse(["--tensor-parallel", "2", "--pipeline-parallel", "2"])
    expected = check.most_iterations(2, bench.WARM_UP, check.CAPTURING)
    assert bench.iterations_of_check(options, "full_iteration") == expected


def test_auto_of_data_parallelism_is_timed_behind_its_check() -> None:
    options = bench.parse(["--data-parallel", "2"])
    assert bench.iterations_of_check(options, "none") == 1 + check.WARM_UP + 2 * 2 * check.BLOCK


TRAFFIC = ("tp.forward", "tp.backward")


def measured(
    codec: str, times: tuple[float, ...], graphs: str = "full_iteration"
) -> bench.BenchRow:
    """A row of made-up iterations, each of which sends 1.5 MB forward and nothing backward."""
    kinds = {"compressed": {"sent": 1e6, "plain": 4e6}, "exact": {"sent": 5e5, "plain": 5e5}}
    history = [
        {
            "milliseconds_per_iteration": time,
            "losses": {"lm loss": 5.0},
            "bytes_per_iteration": {"tp.forward": kinds},
        }
        for time in times
    ]
    return bench.BenchRow(
        shape="1.75b",
        communicators=2,
        ranks=2,
        regime="pcie",
        graphs=graphs,
        codec=codec,
        auto=False,
        payloads="over NCCL",
        flags="",
        peak_memory={"device_used": 12.3e9},
        **bench.summary(history, TRAFFIC),
    )


EAGER = measured("none", (40.0, 44.0, 48.0), graphs="none")
NONE = measured("none", (20.0, 22.0, 24.0))
INT6 = measured("int6", (10.0, 11.0, 12.0))
CELLS = "| pcie | full_iteration | {} | over NCCL | device_used 12.30 | {} | 1.5 | 0.0 | 5.0000 |"


def test_the_table_compares_with_the_same_kind_of_graphs() -> None:
    text = bench.table([EAGER, NONE, INT6], TRAFFIC, "none")
    assert CELLS.format("none", "22.0 (20.0 - 24.0) | 1.00 (0.83 - 1.20)") in text
    assert CELLS.format("int6", "11.0 (10.0 - 12.0) | 2.00 (1.67 - 2.40)") in text
    assert text.endswith("Communicators of every message: 2.")


def test_the_table_has_no_speed_up_without_the_baseline() -> None:
    text = bench.table([INT6], TRAFFIC, "none")
    assert CELLS.format("int6", "11.0 (10.0 - 12.0) | -") in text


def test_the_table_compares_with_uncompressed_halves_too() -> None:
    halves = measured("none --tp-compression-overlap halves", (16.0, 16.5, 17.0))
    both = measured("int8 --tp-compression-overlap halves", (8.0, 8.25, 8.5))
    text = bench.table([NONE, INT6, halves, both], TRAFFIC, "none")
    assert "| speed-up (range) | against uncompressed halves | tp.forward MB |" in text
    assert "8.2 (8.0 - 8.5) | 2.67 (2.35 - 3.00) | 2.00 (1.88 - 2.12) |" in text
    assert "16.5 (16.0 - 17.0) | 1.33 (1.18 - 1.50) | 1.00 (0.94 - 1.06) |" in text
    assert "11.0 (10.0 - 12.0) | 2.00 (1.67 - 2.40) | 1.50 (1.33 - 1.70) |" in text


def test_the_table_of_nothing() -> None:
    assert bench.table([], TRAFFIC, "none") == "No rows."


# Stands for torch.distributed.run and its ranks: int9 is refused at the start, int6 hangs.
RUN = """
import json, os, pathlib, sys, time
if "int9" in os.environ["BENCH_ORDER"]:
    sys.exit("error: int9 is unknown")
words = sys.argv[1:]
report = pathlib.Path(words[words.index("--compression-report") + 1])
report.mkdir()
length, blocks = 6, int(words[words.index("--train-iters") + 1]) // 6
row = {"milliseconds_per_iteration": 5.0, "losses": {"lm loss": 2.0}, "bytes_per_iteration": {}}
for block in range(blocks):
    if "int6" in json.loads(os.environ["BENCH_ORDER"])["settings"][block]:
        time.sleep(60)
    with open(report / "history.jsonl", "a") as history:
        history.writelines(json.dumps(row) + "\\n" for _ in range(length))
    print("payloads travel over stand-ins")
    print('bench block {"allocated": 1e9}', flush=True)
"""


@pytest.mark.parametrize(
    ("bad", "message"),
    [("int6", "was ended at its limit"), ("int9", "failed; its output ends with\nerror")],
)
def test_a_setting_that_fails_costs_one_row(
    bad: str, message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The rows before it stay, and the settings after it run again by themselves."""
    (tmp_path / "run.py").write_text(RUN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 5\nexec {sys.executable} {tmp_path / "run.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(_launch.sys, "executable", str(python))
    words = ["--tensor-parallel", "2", "--regimes", "pcie", "--cuda-graphs", "full_iteration"]
    words += ["--codecs", "none", bad, "int8", "--limit", "1", "--iterations", "6"]
    words += ["--json", str(tmp_path / "rows.json")]
    with pytest.raises(SystemExit):
        bench.run(bench.parse(words))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["codec"] for row in rows] == ["none", "int8"]
    for row in rows:
        assert row["graphs"] == "full_iteration"
        assert row["iterations"] == 2, "of six, four of which come before the first replay"
        assert "--cuda-graph-impl full_iteration" in row["flags"]
        assert row["payloads"] == "over stand-ins"
        assert row["peak_memory"] == {"allocated": 1e9}
    shown = capsys.readouterr()
    row = "pcie | full_iteration | int8 | over stand-ins | allocated 1.00 | 5.0 (5.0 - 5.0)\n"
    assert row in shown.out
    assert f"{bad}: the run {message}" in shown.err


@pytest.mark.parametrize(("graphs", "runs"), [("none", 1), ("full_iteration", 1), ("local", 2)])
def test_what_is_captured_once_has_a_run_of_its_own(graphs: str, runs: int) -> None:
    settings = [_launch.parse_setting(text) for text in ("none", "int8")]
    assert len(bench.batches_of("tensor", settings, graphs)) == runs


def test_codecs_of_gradients_have_a_run_of_their_own() -> None:
    settings = [_launch.parse_setting(text) for text in ("none", "sdp4bit")]
    assert len(bench.batches_of("data", settings, "none")) == 2


def test_variables_of_a_setting_are_those_of_its_run() -> None:
    setting = _launch.parse_setting("sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1")
    assert setting.environment == {"MEGATRON_COMPRESSION_NODE_SIZE": "1"}
    assert setting.words("data") == ["--dp-compression", "sdp4bit"]


def test_a_flag_of_a_setting_may_have_its_value_behind_an_equals_sign() -> None:
    setting = _launch.parse_setting("none --compression=auto")
    assert setting.flags == bench.AUTO
    assert setting.words("pipeline") == ["--compression", "auto"]


def test_every_tensor_parallel_message_is_compressed() -> None:
    assert _launch.parse_setting("int8").words("tensor") == [
        "--tp-compression",
        "int8",
        "--compression-min-mb",
        "0",
    ]


def test_a_setting_may_name_the_smallest_message_itself() -> None:
    setting = _launch.parse_setting("int8 --compression-min-mb 8")
    assert setting.words("tensor") == ["--tp-compression", "int8", "--compression-min-mb", "8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--json /none/rows.json", "can't open '/none/rows.json'"),
        ("--fp32-gradients", "--fp32-gradients has no effect"),
        ("--no-overlap", "--no-overlap has no effect"),
        ("--tensor-parallel 1 --sequence-parallel", "--sequence-parallel has no effect"),
        ("--expert-parallel 2 --micro-batches 4", "--micro-batches has no effect"),
        ("--expert-parallel 2 --data-parallel 2", "experts are measured alone"),
        ("--regimes 0mbit", "--regimes 0mbit: give"),
        ("--tensor-parallel 3 --regimes 10gbit", "--regimes 10gbit: give"),
        ("--shape 1.3b --expert-parallel 2", "only go together"),
        ("--shape qwen3-30b-a3b", "only go together"),
        ("--iterations 3", "--iterations 3: give more than 3"),
        ("--iterations 4 --cuda-graphs local", "--iterations 4: give more than 4"),
        ("--pipeline-parallel 2 --communicators 2", "point-to-point messages have one"),
        ("--codecs", "expected at least one argument"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(words: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words.split())
    assert message in capsys.readouterr().err


def test_three_codecs_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--codecs", "int8 int8 int8"])
    assert "give one codec, or two, and then flags" in capsys.readouterr().err


def test_a_micro_batch_size_on_the_command_line_replaces_the_shapes() -> None:
    flags = bench.parse(["--expert-parallel", "2", "--micro-batch-size", "8"]).flags
    last = len(flags) - 1 - flags[::-1].index("--micro-batch-size")
    assert flags[last + 1] == 8


def test_without_one_the_micro_batch_size_is_the_shapes() -> None:
    flags = bench.parse(["--shape", "350m", "--tensor-parallel", "2"]).flags
    last = len(flags) - 1 - flags[::-1].index("--micro-batch-size")
    assert flags[last + 1] == 8
    assert flags[flags.index("--global-batch-size") + 1] == 32, "four micro-batches"


DATA_CENTRES = "--num-distributed-optimizer-instances"


@pytest.mark.parametrize(
    "words",
    [[DATA_CENTRES, "2"], [f"{DATA_CENTRES}=2"], ["--codecs", f"int8 {DATA_CENTRES} 2"]],
)
def test_what_data_centres_send_each_other_is_in_the_table(words: list[str]) -> None:
    alone = bench.parse(["--data-parallel", "2"]).traffic
    assert bench.parse(["--data-parallel", "2", *words]).traffic == (*alone, "dp.outer")


def test_help_is_printed(capsys) -> None:
    """A percent sign or a brace in a help text would raise."""
    with pytest.raises(SystemExit) as ended:
        bench.parse(["--help"])
    assert ended.value.code == 0
    assert "what is compared" in capsys.readouterr().out
