"""scripts/draw_readme.py: benchmarks' rows go into today.csv, and the picture comes from it."""

import csv
import json
from pathlib import Path

import bench_end_to_end as bench
import draw_readme
import pytest

STAMP = {"machine": "2 x H100", "date": "2026-12-01", "commit": "abc"}


@pytest.fixture
def today() -> list[dict]:
    """The rows of docs/results/today.csv."""
    with draw_readme.FILE.open(newline="") as stream:
        return list(csv.DictReader(stream))


def bench_row(words: str, codec: str, times: tuple[float, float, float], **more) -> dict:
    """A row as bench_end_to_end.py writes it. ``times``: median, least and most milliseconds."""
    options = bench.parse(["--codecs", codec, *words.split()])
    flags = bench.words_of(options, options.settings[0], options.flags)
    row = {
        "shape": options.shape,
        "regime": "pcie",
        "graphs": "none",
        "codec": codec,
        "ranks": options.ranks,
        "milliseconds": times[0],
        "least": times[1],
        "most": times[2],
        "flags": " ".join(map(str, flags)),
        "peak_memory": {"allocated": 2e9},
    }
    return row | more


# The file.


def test_the_file_is_as_it_would_be_written(today) -> None:
    assert draw_readme.merged([dict(row) for row in today]) == today


@pytest.mark.parametrize(
    ("words", "codec", "key"),
    [
        (
            "--tensor-parallel 2 --sequence-parallel",
            "int8",
            ("TP 2, SP", "8 layers of 4096", "4 x 2048", "int8"),
        ),
        (
            "--shape qwen2.5-7b --tensor-parallel 2 --num-layers 8",
            "none --compression auto",
            ("TP 2", "8 layers of Qwen2.5-7B", "8 x 512", "compression auto"),
        ),
        (
            "--shape 1.3b --data-parallel 2",
            "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1",
            ("DP 2, one GPU a node", "GPT-1.3B", "4 x 2048", "sdp4bit"),
        ),
        (
            "--expert-parallel 2 --num-experts 16",
            "int8",
            ("EP 2", "16 experts of 4 layers of Qwen3-30B-A3B", "4 x 2048", "int8"),
        ),
        (
            "--context-parallel 2 --seq-length 8192",
            "int8",
            ("CP 2", "8 layers of 4096", "4 x 8192", "int8"),
        ),
        (
            "--shape thin --pipeline-parallel 2",
            "int8",
            ("PP 2", "2 layers of 2048", "4 x 2048", "int8"),
        ),
    ],
)
def test_a_row_says_what_was_measured(words: str, codec: str, key: tuple) -> None:
    rows = [
        bench_row(words, "none", (40, 39, 44)),
        bench_row(words, codec, (20, 19, 22)),
        bench_row(words, "none", (42, 41, 43)),
    ]
    [row] = draw_readme.measured(rows, **STAMP)
    assert (row["layout"], row["model"], row["batch"], row["codec"]) == key
    assert row["link"] == "pcie"
    assert row["memory"] == "2.0"
    assert row["commit"] == "abc"


def test_a_prompt_and_graphs_are_modes_of_their_own() -> None:
    row = bench_row("--tensor-parallel 2", "int8", (1, 1, 1), graphs="full_iteration", tokens=4096)
    assert draw_readme.mode_of(row) == "graphs, prefill"
    assert draw_readme.batch_of(row) == "4 x 4096"


def test_a_row_is_compared_with_the_mean_of_its_runs_uncompressed_rows() -> None:
    words = "--tensor-parallel 2"
    rows = [
        bench_row(words, "none", (40, 39, 44)),
        bench_row(words, "int8", (20, 19, 22)),
        bench_row(words, "none", (42, 41, 43)),
    ]
    [row] = draw_readme.merged(draw_readme.measured(rows, **STAMP))
    assert [row[name] for name in ("none", "none_least", "none_most")] == ["41.0", "39.0", "44.0"]
    assert [row[name] for name in ("ms", "least", "most")] == ["20.0", "19.0", "22.0"]
    assert (row["speed"], row["low"], row["high"]) == ("2.05", "1.77", "2.32")


def test_halves_are_compared_with_both_uncompressed_schedules() -> None:
    """A codec in halves, halves alone, and the codec as usual, all in one run."""
    words = "--tensor-parallel 2"
    halves = " --tp-compression-overlap halves"
    settings = [("none", 700), ("int8", 450), (f"none{halves}", 550), (f"int8{halves}", 350)]
    rows = [bench_row(words, codec, (ms, ms, ms)) for codec, ms in settings]
    merged = draw_readme.merged(draw_readme.measured(rows, **STAMP))
    speeds = {row["codec"]: (row["speed"], row["speed_over_halves"]) for row in merged}
    assert speeds == {
        "int8": ("1.56", "1.22"),
        "none, halves": ("1.27", "1.00"),
        "int8, halves": ("2.00", "1.57"),
    }


def test_without_uncompressed_halves_there_is_no_second_speed_up() -> None:
    rows = [bench_row("--tensor-parallel 2", codec, (9, 9, 9)) for codec in ("none", "int8")]
    [row] = draw_readme.merged(draw_readme.measured(rows, **STAMP))
    assert (row["halves"], row["speed_over_halves"]) == ("", "")
    assert set(row) == set(draw_readme.COLUMNS)


def test_a_row_without_an_uncompressed_one_is_left_out() -> None:
    rows = [bench_row("--tensor-parallel 2", "int8", (20, 19, 22))]
    assert draw_readme.measured(rows, **STAMP) == []


def test_rows_of_another_run_are_no_baseline() -> None:
    """Several runs in one file name themselves in "row"."""
    words = "--tensor-parallel 2"
    settings = [("a", "none", 40), ("a", "int8", 20), ("b", "none", 90), ("b", "int6", 30)]
    rows = [bench_row(words, codec, (ms, ms, ms), row=run) for run, codec, ms in settings]
    speeds = {
        row["codec"]: row["speed"]
        for row in draw_readme.merged(draw_readme.measured(rows, **STAMP))
    }
    assert speeds == {"int8": "2.00", "int6": "3.00"}


def test_a_newer_row_replaces_an_older_one(today) -> None:
    words = "--tensor-parallel 2"
    rows = [
        bench_row(words, "none", (40, 40, 40)),
        bench_row(words, "int8", (20, 20, 20)),
        bench_row(words, "none", (9, 9, 9), regime="50mbit"),
        bench_row(words, "int8", (9, 9, 9), regime="50mbit"),
    ]
    merged = draw_readme.merged(today + draw_readme.measured(rows, **STAMP))
    assert len(merged) == len(today) + 1, "a link that is new, and a row that is not"
    [replaced] = [
        row
        for row in merged
        if (row["link"], row["layout"], row["mode"]) == ("pcie", "TP 2", "eager")
        and (row["model"], row["batch"]) == ("8 layers of 4096", "4 x 2048")
        and row["codec"] == "int8"
    ]
    assert replaced["speed"] == "2.00"
    assert merged[-1]["link"] == "50mbit", "links that are not known come last"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("null", "not the rows of a benchmark"),
        ("[1]", "not the rows of a benchmark"),
        ('[{"codec": "int8"}]', "not the rows of a benchmark"),
    ],
)
def test_what_is_no_benchmarks_file_is_refused_in_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        draw_readme.read_rows(path)
    assert ended.value.code.startswith(f"error: --add {path}: {message}")


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = [bench_row("--tensor-parallel 2", "int8", (20, 19, 22))]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert draw_readme.read_rows(tmp_path / "rows.json") == rows


# The picture and the pages.


@pytest.mark.parametrize("bar", draw_readme.BARS, ids=lambda bar: bar.label)
def test_every_bar_was_measured(bar, today) -> None:
    assert bar.speeds(today)


@pytest.mark.parametrize("bar", draw_readme.BARS, ids=lambda bar: bar.label)
def test_a_bar_is_in_words(bar) -> None:
    """Neither codecs nor codes such as "TP 2"."""
    assert not any(character.isdigit() for character in bar.label)


def test_prompts_are_not_among_the_iterations(today) -> None:
    [bar] = [bar for bar in draw_readme.BARS if bar.label == "PCIe, tensor parallel"]
    iterations = [row for row in today if "prefill" not in row["mode"]]
    assert bar.speeds(iterations) == bar.speeds(today)
    prompts = [row for row in today if "prefill" in row["mode"]]
    assert prompts and bar.speeds(prompts) == []


def test_the_picture_is_drawn(today, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_readme.draw(today, tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_gets_the_numbers_between_its_two_comments(today) -> None:
    begin, end = draw_readme.BLOCK
    page = f"before\n{begin}old\n{end}after\n"
    filled = draw_readme.with_figures(page, today)
    assert filled == f"before\n{begin}{draw_readme.figures(today)}{end}after\n"
    assert draw_readme.with_figures(filled, today) == filled


def test_the_table_has_the_median_and_the_extremes() -> None:
    situation = {"link": "pcie", "layout": "TP 2", "mode": "eager", "codec": "int8"}
    rows = [
        situation | {"speed": speed, "speed_over_halves": ""} for speed in ("1.50", "0.90", "1.20")
    ]
    row = "| PCIe, tensor parallel | `--tp-compression int8` | 1.20 | 0.90 to 1.50 | - | 3 |\n"
    assert draw_readme.figures(rows).endswith(row)


def test_a_page_without_the_comments_stays_as_it_is(today) -> None:
    assert draw_readme.with_figures("a page\n", today) == "a page\n"


@pytest.mark.parametrize("page", draw_readme.PAGES, ids=lambda page: page.name)
def test_pages_show_the_file(page: Path, today) -> None:
    """No number in a generated block is older than the file, and no page has two blocks."""
    text = page.read_text()
    assert text.count(draw_readme.BLOCK[0]) == text.count(draw_readme.BLOCK[1]) <= 1
    assert draw_readme.with_figures(text, today) == text
