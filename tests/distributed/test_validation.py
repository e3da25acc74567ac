"""--validate-uncompressed: evaluations without the codecs' noise, and training is what it was."""

import pytest

from tests.distributed.forked import ForkedRun, pretrain
from tests.distributed.launch import tiny_flags

LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
CODECS = """--taco format=int4 --compression-min-mb 0 --pp-compression tah-quant
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
"""Coarse in both dimensions, and recomputed under no_grad."""


def flags(*more: str) -> list[str]:
    """TP 2 x PP 2, an evaluation every other iteration and two at the end."""
    words = [*LAYOUT.split(), *more]
    return tiny_flags(*words, hidden_size="64", eval_interval="2", eval_iters="1")


def rows(run: ForkedRun, phase: str) -> list[list[dict]]:
    """The ledger of each rank in a phase, without what never is compressed."""
    return [
        [row for row in rank.ledger if row["phase"] == phase and not row["traffic"].endswith("other")]
        for rank in run.ranks
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[ForkedRun, ForkedRun, ForkedRun]:
    """Compressed with the flag and without; an uncompressed evaluation of the former's checkpoint."""
    directory = tmp_path_factory.mktemp("validation")
    saved = str(directory / "saved")
    words = [*flags(*CODECS.split()), "--save", saved, "--save-interval", "4"]
    exact = pretrain(*words, "--validate-uncompressed", ranks=4, directory=directory)
    evaluated = pretrain(*flags("--load", saved), ranks=4, directory=directory)
    coded = pretrain(*flags(*CODECS.split()), ranks=4, directory=directory)
    return exact, coded, evaluated


def test_losses_are_those_of_an_uncompressed_evaluation(runs) -> None:
    """Of the checkpoint, on validation and test data, to the last bit; with the codecs they are others."""
    exact, coded, evaluated = (run.ranks[-1].validation for run in runs)
    assert len(exact) == len(coded) == 4 and len(evaluated) == 2
    assert exact[2:] == evaluated
    assert all(with_flag != without for with_flag, without in zip(exact, coded, strict=True))
    assert "evaluation sends activations uncompressed (--validate-uncompressed)" in runs[0].output


def test_training_is_unaffected(runs) -> None:
    """Losses, parameters and bytes are those without the flag."""
    exact, coded, _ = runs
    assert exact.losses == coded.losses and len(exact.losses) == 4
    for with_flag, without in zip(exact.ranks, coded.ranks, strict=True):
        assert with_flag.parameters == without.parameters
    assert rows(exact, "train") == rows(coded, "train")
    assert {row["kind"] for rank in rows(exact, "train") for row in rank} == {"compressed", "off"}


def test_ledger_counts_what_evaluations_send(runs) -> None:
    """Uncompressed bytes under a kind of their own, as many as in the uncompressed run's evaluations."""
    exact, _, evaluated = runs
    for with_flag, uncompressed in zip(rows(exact, "eval"), rows(evaluated, "eval"), strict=True):
        assert with_flag and {row["kind"] for row in with_flag} == {"evaluation"}
        assert {row["kind"] for row in uncompressed} == {"off"}
        sent = {(row["traffic"], row["operation"]): row["sent_bytes"] for row in with_flag}
        twice = {(row["traffic"], row["operation"]): 2 * row["sent_bytes"] for row in uncompressed}
        assert sent == twice, "four evaluations against two"
