"""scripts/draw_readme.py: what the pages show is docs/results/today.csv, and benchmarks' rows go into it."""

import csv

import bench_end_to_end as bench
import draw_readme
import pytest

STAMP = {"machine": "2 x H100", "date": "2026-12-01", "commit": "abc"}


@pytest.fixture
def today() -> list[dict]:
    with draw_readme.FILE.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("page", draw_readme.PAGES, ids=lambda page: page.name)
def test_pages_show_the_file(page, today) -> None:
    text = page.read_text()
    assert draw_readme.filled(text, today) == text


def test_the_file_is_as_it_would_be_written(today) -> None:
    assert draw_readme.merged([dict(row) for row in today]) == today


def row(words: str, codec: str, times: tuple[float, float, float], **more) -> dict:
    """As bench_end_to_end.py writes it."""
    options = bench.parse(["--codecs", codec, *words.split()])
    flags = " ".join(map(str, bench._words(options, options.settings[0], options.flags)))
    one = {
        "shape": options.shape,
        "regime": "pcie",
        "graphs": "none",
        "codec": codec,
        "ranks": options.ranks,
    }
    one |= dict(zip(("milliseconds", "least", "most"), times, strict=True))
    return one | {"flags": flags, "peak_memory": {"allocated": 2e9}} | more


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
def test_where_a_row_was_measured(words, codec, key) -> None:
    rows = [
        row(words, "none", (40, 39, 44)),
        row(words, codec, (20, 19, 22)),
        row(words, "none", (42, 41, 43)),
    ]
    [one] = draw_readme.merged(draw_readme.measured(rows, **STAMP))
    assert (one["layout"], one["model"], one["batch"], one["codec"]) == key
    assert [one[name] for name in draw_readme.TIMES] == [
        "41.0",
        "39.0",
        "44.0",
        "20.0",
        "19.0",
        "22.0",
    ]
    assert (one["speed"], one["low"], one["high"]) == ("2.05", "1.77", "2.32")
    assert one["memory"] == "2.0" and one["commit"] == "abc"


def test_a_newer_row_replaces_an_older_one(today) -> None:
    words = "--tensor-parallel 2"
    settings = ("a", "none", 40), ("a", "int8", 20), ("b", "none", 90), ("b", "int6", 30)
    runs = [row(words, codec, (ms, ms, ms), row=run) for run, codec, ms in settings]
    runs += [row(words, codec, (9, 9, 9), regime="50mbit") for codec in ("none", "int8")]
    rows = draw_readme.merged(today + draw_readme.measured(runs, **STAMP))
    assert len(rows) == len({tuple(one[name] for name in draw_readme.KEY) for one in today + rows})
    page = "<!--=pcie;TP 2;eager;{};8 layers of 4096-->{}<!---->"
    assert draw_readme.filled(page.format("int8", "1.38"), rows) == page.format("int8", "2.00")
    assert draw_readme.filled(page.format("int8/int6", ""), rows) == page.format(
        "int8/int6", "2.00 - 3.00"
    )
    assert draw_readme.filled(page.format("int2", ""), rows) == page.format("int2", "not measured")
