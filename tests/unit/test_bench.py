"""scripts/bench_end_to_end.py: settings, which of them share a run, the table."""

import json
import sys

import _launch
import bench_end_to_end as bench
import pytest

from megatron.compression.auto import plan


def test_auto_is_timed_behind_its_check():
    """As many iterations as the check has turns."""
    options = bench.parse(["--tensor-parallel", "2", "--pipeline-parallel", "2"])
    found = plan.Check(["tensor_parallel", "pipeline_parallel"], 0, lambda: 0, print)
    assert bench.checked_in(options, "none") == 1 + plan.WARM_UP + found.iterations
    found = plan.Check(
        ["tensor_parallel", "pipeline_parallel"], 0, lambda: 0, print, bench.WARM_UP + 1
    )
    assert bench.checked_in(options, "full_iteration") == 1 + plan.WARM_UP + found.iterations
    options = bench.parse(["--data-parallel", "2"])
    assert bench.checked_in(options, "none") == 1 + plan.WARM_UP + 2 * 2 * plan.BLOCK


def test_ranges_and_speed_ups_of_the_table():
    def line(milliseconds: float) -> dict:
        kinds = {"compressed": {"sent": 1e6, "plain": 4e6}, "exact": {"sent": 5e5, "plain": 5e5}}
        row = {"milliseconds_per_iteration": milliseconds, "losses": {"lm loss": 5.0}}
        return row | {"bytes_per_iteration": {"tp.forward": kinds}}

    traffic = ("tp.forward", "tp.backward")
    rows = [
        {"regime": "pcie", "graphs": graphs, "communicators": 2, "codec": codec}
        | {"payloads": "over NCCL", "peak_memory": {"device_used": 12.3e9}}
        | bench.summary(list(map(line, times)), traffic)
        for graphs, codec, times in (
            ("none", "none", (40.0, 44.0, 48.0)),
            ("full_iteration", "none", (20.0, 22.0, 24.0)),
            ("full_iteration", "int6", (10.0, 11.0, 12.0)),
        )
    ]
    text = bench.table(rows, traffic, "none")
    row = "| pcie | full_iteration | {} | over NCCL | device_used 12.30 | {} | 1.5 | 0.0 | 5.0000 |"
    assert row.format("none", "22.0 (20.0 - 24.0) | 1.00 (0.83 - 1.20)") in text
    assert row.format("int6", "11.0 (10.0 - 12.0) | 2.00 (1.67 - 2.40)") in text
    assert text.endswith("Communicators of every message: 2.")
    assert "| 11.0 (10.0 - 12.0) | - |" in bench.table(rows[2:], traffic, "none")


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
    ("bad", "said"),
    [("int6", "was ended at its limit"), ("int9", "failed; its output ends with\nerror")],
)
def test_a_setting_that_fails_costs_one_row(bad, said, tmp_path, monkeypatch, capsys) -> None:
    """Its rows before stay, its later settings run again by themselves; in graphs, eager, local."""
    (tmp_path / "run.py").write_text(RUN)
    python = tmp_path / "python"  # in the place of torch.distributed.run and what it starts
    python.write_text(f'#!/bin/sh\nshift 5\nexec {sys.executable} {tmp_path / "run.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(_launch.sys, "executable", str(python))
    words = f"--tensor-parallel 2 --regimes pcie --codecs none {bad} int8 --limit 1 --iterations 6 --cuda-graphs"
    with pytest.raises(SystemExit):
        bench.run(
            bench.parse([*words.split(), "full_iteration", "--json", str(tmp_path / "rows.json")])
        )
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["codec"], row["graphs"], row["iterations"]) for row in rows] == [
        (codec, "full_iteration", 2) for codec in ("none", "int8")
    ]
    assert "--cuda-graph-impl full_iteration" in rows[0]["flags"]
    assert rows[0]["payloads"] == "over stand-ins" and rows[0]["peak_memory"] == {"allocated": 1e9}
    row = "pcie | full_iteration | int8 | over stand-ins | allocated 1.00 | 5.0 (5.0 - 5.0)\n"
    shown = capsys.readouterr()
    assert row in shown.out and f"{bad}: the run {said}" in shown.err


def test_what_is_captured_once_has_a_run_of_its_own() -> None:
    settings = [_launch.parse_setting(text) for text in ("none", "int8")]
    counts = [len(bench.launches("tensor", settings, graphs)) for graphs in bench.GRAPHS]
    assert counts == [1, 1, 2]


def test_variables_of_a_setting_are_the_runs() -> None:
    nodes = _launch.parse_setting("sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1")
    assert nodes.environment == {"MEGATRON_COMPRESSION_NODE_SIZE": "1"}
    assert nodes.words("data") == ["--dp-compression", "sdp4bit"]
    auto = _launch.parse_setting("none --compression=auto")
    assert auto.flags == bench.AUTO and auto.words("pipeline") == ["--compression", "auto"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--json /none/rows.json", "can't open '/none/rows.json'"),
        ("--fp32-gradients", "--fp32-gradients has no effect"),
        ("--regimes 0mbit", "--regimes 0mbit: give"),
        ("--shape 1.3b --expert-parallel 2", "go together"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(words, said, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words.split())
    assert said in capsys.readouterr().err


def test_what_is_given_is_what_runs() -> None:
    flags = bench.parse(["--expert-parallel", "2", "--micro-batch-size", "8"]).flags
    assert flags[len(flags) - flags[::-1].index("--micro-batch-size")] == 8


SITES = "--num-distributed-optimizer-instances"


@pytest.mark.parametrize("sites", [[SITES, "2"], [f"{SITES}=2"], ["--codecs", f"int8 {SITES} 2"]])
def test_what_sites_send_is_in_the_table(sites: list[str]) -> None:
    alone = bench.parse(["--data-parallel", "2"]).traffic
    assert bench.parse(["--data-parallel", "2", *sites]).traffic == (*alone, "dp.outer")
