"""scripts/losses.py: runs are made once, a stop loses none, the noise is there to see."""

import json
from argparse import Namespace
from pathlib import Path

import losses
import pytest

from megatron.compression.errors import InputError

LOSSES = {("none", 1): 4.0, ("codec", 1): 4.1, ("control", 1): 4.4, ("none", 2): 3.92}
BASELINE = "none"


def _runs() -> list[dict]:
    plan = losses.plan(["none", "codec", "control"], [1], noise_seed=2)
    return [{"iterations": 5, "setting": setting, "seed": seed} for setting, seed in plan]


class Trainings:
    """Stands for the trainings; each takes 100 seconds of a clock that nothing else moves."""

    def __init__(self, monkeypatch) -> None:
        self.trained: list[tuple[str, int]] = []
        self.now = 0.0
        monkeypatch.setattr(losses.time, "monotonic", lambda: self.now)

    def __call__(self, run: dict) -> dict:
        self.now += 100.0
        self.trained.append((run["setting"], run["seed"]))
        loss = LOSSES[run["setting"], run["seed"]]
        return {"validation_loss": loss, "test_loss": loss, "bytes_per_iteration": {}}


def test_an_unknown_codec_is_refused_before_a_run(monkeypatch, capsys) -> None:
    words = ["losses.py", "--data-parallel", "2", "--codecs", "none", "int8 int9"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr("os._exit", print)
    losses.parse_args()
    assert "error: --dp-compression WEIGHTS: codec 'int9' is unknown" in capsys.readouterr().err


def test_what_is_parallel_is_on_the_command_line(monkeypatch) -> None:
    words = ["losses.py", "--pipeline-parallel", "4", "--codecs", "none", "--lr", "1"]
    monkeypatch.setattr("sys.argv", words)
    options = losses.parse_args()
    assert (options.dimension, options.ranks) == ("pipeline", 4)
    assert options.extra == ["--lr", "1"], "for Megatron"


@pytest.mark.parametrize(
    ("dimension", "ranks", "micro_batch_size"),
    [("tensor", 4, 64), ("pipeline", 4, 8), ("data", 4, 16), ("expert", 2, 32)],
)
def test_a_batch_is_cut_for_its_dimension(dimension, ranks, micro_batch_size) -> None:
    """Stages need micro-batches, data-parallel ranks a part each."""
    small = losses.SHAPES["small"]
    assert losses.micro_batch_size(small, dimension, ranks) == micro_batch_size


class Corpora:
    """Stands for ``_corpus.prepare``: notes what was asked for."""

    def __init__(self, monkeypatch) -> None:
        self.asked: list[tuple] = []
        monkeypatch.setattr(losses, "prepare", lambda *asked: self.asked.append(asked))


def test_models_of_one_output_folder_have_texts_of_their_own(tmp_path: Path, monkeypatch) -> None:
    corpora = Corpora(monkeypatch)
    for model in ("tiny", "111m"):
        options = Namespace(model=model, corpus_mb=None, data=None, output=tmp_path)
        losses.prepare_data(options)
    assert corpora.asked == [
        (tmp_path / "data" / "stdlib-8mb-2048", "stdlib", 8.0, 2048),
        (tmp_path / "data" / "site-packages-90mb-16384", "site-packages", 90.0, 16384),
    ]


def test_text_may_be_in_a_folder_that_was_named(tmp_path: Path, monkeypatch) -> None:
    corpora = Corpora(monkeypatch)
    options = Namespace(model="tiny", corpus_mb=2.5, data=tmp_path / "text", output=tmp_path)
    losses.prepare_data(options)
    assert corpora.asked == [(tmp_path / "text", "stdlib", 2.5, 2048)]


def test_too_little_text_is_one_line(tmp_path: Path) -> None:
    options = Namespace(model="tiny", corpus_mb=0.01, data=None, output=tmp_path)
    with pytest.raises(
        InputError, match=r"--corpus-mb 0.01: the text is too short for 2048 tokens"
    ):
        losses.prepare_data(options)


@pytest.mark.parametrize("content", ["", "[", "null", "[1]", "[" * 100_000])
def test_a_damaged_file_of_results_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match=r"results.json cannot be read .*; remove it, or choose"):
        losses.train_missing(_runs(), Trainings, tmp_path)


def test_a_seed_is_planned_once() -> None:
    assert losses.plan(["none", "none"], [1, 2], 2) == [("none", 1), ("none", 2)]


UNCOMPRESSED = {"sent": 2e6, "uncompressed": 2e6}
COMPRESSED = {"sent": 5e5, "uncompressed": 2e6}
NONE = {
    "setting": "none",
    "seed": 1,
    "validation_loss": 4.0,
    "test_loss": 4.1,
    "bytes_per_iteration": {"pp.forward": UNCOMPRESSED, "pp.other": UNCOMPRESSED},
}
INT4 = {
    "setting": "int4 int6",
    "seed": 1,
    "validation_loss": 4.1,
    "test_loss": 4.2,
    "bytes_per_iteration": {"pp.forward": COMPRESSED, "pp.backward": UNCOMPRESSED},
}


def test_the_table_shows_loss_and_traffic() -> None:
    """A class of traffic that only some settings have is zero elsewhere."""
    text = losses.table([NONE, INT4], BASELINE)
    columns = (
        "| setting | seed | validation loss | against none | test loss | pp.forward MB | of "
        "uncompressed"
    )
    assert f"{columns} | pp.backward MB" in text
    assert "| int4 int6 | 1 | 4.1000 | +2.50% | 4.2000 | 0.500 | 0.250 | 2.000 | 1.000 |" in text
    assert "| none | 1 | 4.0000 | - | 4.1000 | 2.000 | 1.000 | 0.000 | 0.000 |" in text


def test_the_table_says_what_a_seed_alone_changes() -> None:
    another_seed = NONE | {"seed": 2, "validation_loss": 3.92}
    text = losses.table([NONE, INT4, another_seed], BASELINE)
    assert "A seed alone changes the validation loss of none by 2.04%" in text
    assert "A seed alone" not in losses.table([NONE, INT4], BASELINE)


@pytest.mark.parametrize(
    ("line", "short"),
    [
        (
            " validation loss at iteration 30 | lm loss value: 6.145814E+00 | lm loss PPL: "
            "4.6E+02 | \n",
            "iteration 30: loss 6.1458",
        ),
        (
            " validation loss at iteration 120 on test set | lm loss value: 5.394963E+00 | lm\n",
            "iteration 120: loss 5.3950 on test set",
        ),
        ("compression: tensor parallelism: int8\n", "compression: tensor parallelism: int8"),
        ("layers: torch-native\n", "layers: torch-native"),
        ("  compression ..................................... none\n", None),
        (" iteration       30/     120 | lm loss: 6.1E+00 |\n", None),
    ],
)
def test_of_a_runs_output_a_few_lines_are_shown(line: str, short: str | None) -> None:
    assert losses.in_short(line) == short


def test_the_last_lines_are_in_words() -> None:
    assert losses.in_words([NONE, INT4], BASELINE) == (
        "none       validation loss 4.0000, 2.00 MB sent an iteration\n"
        "int4 int6  validation loss 4.1000 (+2.50%), 2.50 MB sent an iteration instead of 4.00 MB\n"
    )


def test_the_time_limit_leaves_the_rest_for_the_next_start(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Two runs of 100 seconds fit into 250; the next start makes the other two and no more."""
    first = Trainings(monkeypatch)
    assert len(losses.train_missing(_runs(), first, tmp_path, time_limit=250)) == 2
    assert "2 of 4 runs are left: start again" in capsys.readouterr().out
    again = Trainings(monkeypatch)
    results = losses.train_missing(_runs(), again, tmp_path, time_limit=250)
    assert first.trained + again.trained == list(LOSSES) and len(results) == 4
    assert [(row["setting"], row["seed"]) for row in results] == list(LOSSES)
    assert (tmp_path / "results.md").read_text().count("\n| ") == 4


def test_a_failed_run_ends_the_script_and_keeps_the_others(tmp_path: Path) -> None:
    def train(run: dict) -> dict:
        if run["setting"] == "codec":
            raise RuntimeError("the codec run failed")
        return {"validation_loss": 4.0, "test_loss": 4.0, "bytes_per_iteration": {}}

    with pytest.raises(SystemExit) as ended:
        losses.train_missing(_runs(), train, tmp_path)
    assert ended.value.code == f"error: 'codec', logs in {tmp_path}: the codec run failed"
    assert [row["setting"] for row in json.loads((tmp_path / "results.json").read_text())] == [
        "none"
    ]
