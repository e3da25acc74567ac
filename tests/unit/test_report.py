"""The log line, scalars, the report's files, its history, and the comparison of two reports."""

import builtins
import json

import pytest

from megatron.compression.errors import CompressionConfigError
from megatron.compression.report import check_report_directory
from megatron.compression.report.__main__ import main
from megatron.compression.report.figures import _median_time, log_line, scalars
from megatron.compression.report.history import History, load_report, read_history
from megatron.compression.report.render import compare, write_report

PER_ITERATION = {
    "tp.forward": {"compressed": {"sent": 0.5e6, "plain": 1e6}},
    "tp.other": {"exact": {"sent": 0.1e6, "plain": 0.1e6}},
    "dp.gradient": {"off": {"sent": 2e6, "plain": 2e6}},
}


class TestLogLine:
    def test_it_has_the_bytes_of_each_traffic_class(self) -> None:
        line = log_line(5, 100, PER_ITERATION)
        assert "communication        5/     100 |" in line
        assert "tp.forward (MB): 0.500 of 1.000 |" in line
        assert "dp.gradient (MB): 2.000 |" in line

    def test_the_ratio_counts_every_tensor_parallel_byte_the_exact_ones_too(self) -> None:
        assert "tensor-parallel ratio: 1.833 |" in log_line(5, 100, PER_ITERATION)

    def test_without_a_number_of_iterations(self) -> None:
        """A run with --train-samples has none."""
        assert "communication        5 | tp.forward" in log_line(5, None, PER_ITERATION)

    def test_it_has_the_bytes_between_nodes(self) -> None:
        between_nodes = {"dp.gradient": {"sent": 5e5, "plain": 2e6}}
        line = log_line(3, 10, PER_ITERATION, between_nodes)
        assert "dp.gradient (MB): 2.000 | between nodes: 0.500 of 2.000 |" in line


def test_scalars_are_bytes_and_the_ratio() -> None:
    values = scalars(PER_ITERATION)
    assert values["communication/tp.forward bytes"] == 0.5e6
    assert values["communication/tensor-parallel ratio"] == pytest.approx(1.1 / 0.6)


def _report() -> dict:
    history = [
        {"iteration": 1, "losses": {"lm loss": 5.0}, "bytes_per_iteration": PER_ITERATION},
        {"iteration": 2, "split": "valid", "losses": {"lm loss": 4.5}},
        {"iteration": 2, "split": "test", "losses": {"lm loss": 4.7}},
        {"iteration": 2, "losses": {"lm loss": 4.0}, "bytes_per_iteration": PER_ITERATION},
    ]
    measured = {"relative_error": 0.03, "ordinary_error": 0.03, "peak": 9.0, "samples": 1}
    sites = [f"decoder.layers.{layer}.mlp.linear_fc2" for layer in range(3)]
    errors = [{"site": site, "traffic": "tp.forward", **measured} for site in sites]
    return {
        "settings": {},
        "world_size": 2,
        "history": history,
        "ledger_by_rank": [],
        "errors": errors,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a report."""
    folder = tmp_path_factory.mktemp("report")
    write_report(_report(), folder)
    return folder


class TestFiles:
    def test_the_json_has_a_summary(self, folder) -> None:
        summary = json.loads((folder / "report.json").read_text())["summary"]
        assert summary["tp_bytes_per_iteration"] == pytest.approx(0.6e6)
        assert summary["dimensions"]["tensor parallel"]["ratio"] == pytest.approx(1.1 / 0.6)
        assert summary["first_loss"] == 5.0
        assert summary["last_loss"] == 4.0
        assert summary["validation_loss"] == 4.5

    def test_the_markdown_shows_the_summary(self, folder) -> None:
        markdown = (folder / "report.md").read_text()
        assert "| tp.forward | 0.500 | 1.000 | 2.000 |" in markdown
        assert "| validation | 4.500000 | 4.500000 |" in markdown
        assert "| test | - | 4.700000 |" in markdown

    def test_the_markdown_shows_a_picture(self, folder) -> None:
        assert "loss.png" in (folder / "report.md").read_text()
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_history_of_a_resumed_run(tmp_path) -> None:
    """The last row of a repeated iteration counts; rows are in the order of iterations."""
    rows = [{"iteration": i, "losses": {"lm loss": float(i)}} for i in (1, 2, 3)]
    rows += [
        {"iteration": 3, "losses": {"lm loss": 30.0}},
        {"iteration": 3, "split": "valid", "losses": {}},
    ]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = read_history(path)
    assert [row["iteration"] for row in history] == [1, 2, 3, 3]
    assert history[2]["losses"]["lm loss"] == 30.0


class TestDirectory:
    """Nothing is overwritten: only a resumed run may continue a report."""

    def test_a_new_one_or_none_is_accepted(self, tmp_path) -> None:
        check_report_directory(str(tmp_path / "new"), resuming=False)
        check_report_directory(None, resuming=False)

    def test_that_of_another_run_is_refused(self, tmp_path) -> None:
        (tmp_path / "history.jsonl").write_text("{}\n")
        with pytest.raises(CompressionConfigError, match="already holds"):
            check_report_directory(str(tmp_path), resuming=False)

    def test_a_resumed_run_continues_its_own(self, tmp_path) -> None:
        (tmp_path / "history.jsonl").write_text("{}\n")
        check_report_directory(str(tmp_path), resuming=True)

    def test_a_file_is_refused(self, tmp_path) -> None:
        file = tmp_path / "history.jsonl"
        file.write_text("{}\n")
        with pytest.raises(CompressionConfigError, match="is a file"):
            check_report_directory(str(file), resuming=False)


def test_report_directory_that_cannot_be_made_is_refused(tmp_path, monkeypatch) -> None:
    """At the start, in one line: below a file, or where nothing can be written."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(
        CompressionConfigError, match=r"cannot be written \(Not a directory\); name another"
    ):
        check_report_directory(str(file / "report"), resuming=False)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(CompressionConfigError, match="No space left on device"):
        check_report_directory(str(tmp_path / "report"), resuming=False)


def test_history_survives_a_full_disk(tmp_path, monkeypatch) -> None:
    """A row that could not be written is written later, behind the half line that is there."""
    history = History(tmp_path)
    real = open
    history.append({"iteration": 1, "losses": {}})

    def half(path, mode="r"):
        if mode == "a+b":
            with real(path, mode) as file:
                file.write(b'{"iteration": 2, "lo')
            raise OSError(28, "No space left on device")
        return real(path, mode)

    monkeypatch.setattr(builtins, "open", half)
    with pytest.raises(OSError):
        history.append({"iteration": 2, "losses": {}})
    assert [row["iteration"] for row in history.rows()] == [1, 2]
    monkeypatch.setattr(builtins, "open", real)
    history.append({"iteration": 3, "losses": {}})
    assert [row["iteration"] for row in read_history(tmp_path / "history.jsonl")] == [1, 2, 3]


def test_report_without_matplotlib(tmp_path, monkeypatch) -> None:
    """Everything but the pictures, and one line that says so."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    (line,) = write_report(_report(), tmp_path)
    assert "matplotlib is not installed" in line and "pip install" in line
    assert "matplotlib is not installed" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.json").exists() and not list(tmp_path.glob("*.png"))


def _two_runs(tmp_path):
    """Report folders of a baseline and of a run that sends half of it in two thirds of the time."""
    for name, factor, milliseconds in (("baseline", 2.0, 30.0), ("run", 1.0, 20.0)):
        report = _report()
        report["settings"] = {
            "compression": {"tensor_parallel": {"compression": "none" if factor > 1 else "int6"}},
            "megatron": {"seed": 1, "seq_length": 512 if factor > 1 else 1024},
        }
        report["memory_by_rank"] = [{"resident": 100e6 * factor}]
        for row in report["history"]:
            row["losses"] = {"lm loss": row["losses"]["lm loss"] + (0.04 if name == "run" else 0)}
            if "bytes_per_iteration" in row:
                row["milliseconds_per_iteration"] = milliseconds
                row["bytes_per_iteration"] = {
                    "tp.forward": {"compressed": {"sent": 1e6 * factor, "plain": 2e6}}
                }
        report["history"] += [
            row | {"iteration": 3} for row in report["history"][-1:] if name == "run"
        ]
        write_report(report, tmp_path / name)
    return tmp_path / "baseline", tmp_path / "run"


ROWS_OF_TWO_RUNS = (
    "| time of an iteration (ms) | 30.0 | 20.0 | 1.50x as fast |",
    "| bytes sent, tensor parallel (MB) | 2.000 | 1.000 | 2.000x fewer |",
    "| training loss, iteration 2 | 4.0000 | 4.0400 | +1.00% |",
    "| validation loss, iteration 2 | 4.5000 | 4.5400 | +0.89% |",
    "| test loss, iteration 2 | 4.7000 | 4.7400 | +0.85% |",
    "| peak memory of the process (MB) | 200 | 100 | -50.00% |",
)


@pytest.mark.parametrize("row", ROWS_OF_TWO_RUNS, ids=lambda row: row.split("|")[1].strip())
def test_the_command_prints_a_comparison(row: str, tmp_path, capsys) -> None:
    """Losses are those of the last iteration that both runs have."""
    baseline, run = _two_runs(tmp_path)
    assert main([str(baseline), str(run)]) == 0
    printed = capsys.readouterr().out
    assert row in printed
    assert f"| {baseline} | {run} | change |" in printed.splitlines()[0]


def test_the_command_says_which_time_it_compares(tmp_path, capsys) -> None:
    assert main([str(folder) for folder in _two_runs(tmp_path)]) == 0
    assert "median of the log intervals without the first one" in capsys.readouterr().out


def test_the_command_names_settings_as_they_are_typed(tmp_path, capsys) -> None:
    assert main([str(folder) for folder in _two_runs(tmp_path)]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert (
        line == "Settings that differ: --tp-compression: none -> int6; --seq-length: 512 -> 1024."
    )


def test_the_command_writes_a_comparison_with_both_curves(tmp_path, capsys) -> None:
    baseline, run = _two_runs(tmp_path)
    output = tmp_path / "new" / "comparison"
    assert main([str(baseline), str(run), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() in (output / "comparison.md").read_text()
    for name in ("loss.png", "time.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")


def test_losses_without_a_common_iteration_are_explained(tmp_path, capsys) -> None:
    baseline, run = _two_runs(tmp_path)
    report = json.loads((run / "report.json").read_text())
    for row in report["history"]:
        row["iteration"] += 100
    (run / "report.json").write_text(json.dumps(report))
    assert main([str(baseline), str(run)]) == 0
    printed = capsys.readouterr().out
    assert "training loss, iteration" not in printed
    assert (
        "No training loss is compared: the runs logged it at different iterations (1 to 2 in "
        "steps of 1 "
        "and 101 to 103 in steps of 1); run both with the same --log-interval"
    ) in printed


GOOD = {"settings": {}, "history": [], "summary": {}}
NO_REPORTS = {
    "empty": b"",
    "an object": b"{}",
    "a list": b"[1]",
    "null": b"null",
    "a summary that is a list": json.dumps({**GOOD, "summary": []}).encode(),
    "a history of numbers": json.dumps({**GOOD, "history": [1]}).encode(),
    "a history without iterations": json.dumps({**GOOD, "history": [{}]}).encode(),
    "bytes that are a list": json.dumps(
        {**GOOD, "history": [{"iteration": 1, "losses": {}, "bytes_per_iteration": [1]}]}
    ).encode(),
    "nested too deeply": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("content", NO_REPORTS)
def test_a_file_that_is_no_report_is_one_line(content: str, tmp_path, capsys) -> None:
    _, run = _two_runs(tmp_path)
    (tmp_path / "report.json").write_bytes(NO_REPORTS[content])
    assert main([str(tmp_path), str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path} holds no readable report.json; name")
    assert error.count("\n") == 1


def test_a_folder_that_is_a_file_is_one_line(tmp_path, capsys) -> None:
    baseline, run = _two_runs(tmp_path)
    assert main([str(baseline / "report.md"), str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


DAMAGED_LINES = {
    "cut off": b'{"iterat',
    "null": b"null",
    "a number": b"5",
    "a list": b"[]",
    "without an iteration": b"{}",
    "not UTF-8": b"\xff\xfe",
    "an iteration in words": b'{"iteration": "a"}',
    "nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED_LINES)
def test_a_damaged_line_of_a_history_is_left_out(content: str, tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    good = b'{"iteration": 1, "losses": {}}\n'
    path.write_bytes(good + DAMAGED_LINES[content] + b"\n")
    assert read_history(path) == [{"iteration": 1, "losses": {}}]


def test_numbers_that_json_lacks(tmp_path) -> None:
    """A NaN loss and an infinite error are null in both files; a later comparison reads them."""
    report = _report() | {
        "settings": {"compression": {"tensor_parallel": {"codec": "int6"}}, "lr": None}
    }
    report["history"][-1]["losses"] = {"lm loss": float("nan")}
    report["errors"][0]["relative_error"] = float("inf")
    write_report(report, tmp_path)
    history = History(tmp_path)
    history.append(report["history"][-1])
    for text in ((tmp_path / "report.json").read_text(), (tmp_path / "history.jsonl").read_text()):
        assert "null" in text and "NaN" not in text and "Infinity" not in text
    read = load_report(tmp_path)
    assert read["summary"]["last_loss"] is None and read["settings"] == report["settings"]
    assert [name for name, *_ in compare(read, read) if "loss" in name] == [
        "training loss, iteration 1",
        "validation loss, iteration 2",
        "test loss, iteration 2",
    ]


def test_the_first_interval_warms_up_and_is_not_in_the_median_time() -> None:
    intervals = [{"milliseconds_per_iteration": time} for time in (900.0, 10.0, 12.0)]
    assert _median_time(intervals) == 11.0
