"""Local steps between data centres: each a job of its own on this host, over gloo."""

import re
from pathlib import Path

import pytest

from tests.distributed.data_centres import OPTIMIZER, pretrain_in_data_centres
from tests.distributed.launch import free_port, go_back_to, pretrain, tiny_flags

SCALINGS = {
    "plain": (),
    "average in collective": ("--ddp-average-in-collective",),
    "per token": ("--calculate-per-token-loss",),
}
"""Megatron's three ways of scaling gradients."""

UNTIED = "--untie-embeddings-and-output-weights"
COPIES = (
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--local-steps", "1", "--outer-compression", "int4"),
)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_without_an_exchange_a_data_centre_is_a_run_of_its_own(scaling: str) -> None:
    """Two data centres of two ranks with the same samples: losses, gradient norms and weights have
    the bits of one run without data centres."""
    flags = SCALINGS[scaling]
    alone = pretrain(*tiny_flags(*OPTIMIZER[:2], *flags), ranks=2)
    centres = pretrain_in_data_centres(
        *flags, "--local-steps", "100", ranks=2, through="tests/distributed/same_samples.py"
    )
    for run in centres.runs:
        assert run.losses == alone.losses
        assert run.log("grad norm") == alone.log("grad norm")
        assert run.parameters == alone.parameters
        assert "dp.outer" not in "".join(re.findall(r"communication .*", run.output))


def test_every_step_averaged_in_fp32_keeps_data_centres_alike() -> None:
    """H = 1, fp32, outer rate 1 without momentum: the same weights everywhere after each step."""
    settings = "--local-steps 1 --outer-compression none --outer-lr 1 --outer-momentum 0"
    centres = pretrain_in_data_centres(*settings.split())
    first, second = centres.runs
    assert first.parameters == second.parameters
    assert first.losses != second.losses, "they read different samples"
    assert first.output.count("round after iteration") == 4


def copies_are_alike(run) -> None:
    """Fail where ranks of one data centre hold different bits of a copy."""
    for name in run.ranks[0].replicated:
        # Of tensor-parallel ranks of one stage; names of two stages may be the same.
        for stage in (0, 1):
            ranks = [rank for rank in run.ranks if rank.coordinates["pipeline"] == stage]
            values = {rank.parameters.get(name) for rank in ranks}
            assert len(values) == 1, f"{name} on stage {stage}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--sequence-parallel",),
        ("--mtp-num-layers", "1", "--position-embedding-type", "rope", UNTIED),
        ("--outer-fragments", "2", "--local-steps", "2", "--outer-delay", "1"),
    ],
    ids=["tied", "sequence-parallel", "mtp", "fragments"],
)
def test_copies_stay_alike(extra) -> None:
    """TP 2 x PP 2, tied embeddings, after three rounds and more in four bits."""
    centres = pretrain_in_data_centres(*COPIES, *extra, ranks=4)
    for run in centres.runs:
        copies_are_alike(run)
        for tensor_rank in (0, 1):
            stages = [r for r in run.ranks if r.coordinates["tensor"] == tensor_rank]
            first, last = (
                {value for name, value in rank.parameters.items() if _is_embedding(name)}
                for rank in stages
            )
            assert first & last, "both stages hold the same bits of the word embeddings"
    if "--outer-delay" not in extra:
        assert centres.parameters[0] == centres.parameters[1]


def _is_embedding(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name


SAVING = ("--local-steps", "4", "--train-iters", "6", "--save-interval", "3")


@pytest.mark.parametrize(
    "extra",
    [
        ("--ddp-bucket-size", "20000"),
        pytest.param(
            ("--outer-fragments", "2", "--outer-delay", "2", "--overlap-grad-reduce"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("--data-centres", "3", "--outer-fragments", "2", "--outer-delay", "3"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("--overlap-grad-reduce", "--overlap-param-gather", "--dp-compression", "sdp4bit"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["plain", "in flight", "pieces in flight", "compressed weights"],
)
def test_a_resume_within_a_round_has_the_same_bits(tmp_path: Path, extra) -> None:
    """Saved after iteration 3; the round is after iteration 4, or a fragment is under way."""
    flags = (*SAVING, *extra, "--save", str(tmp_path))
    data_centres = 3 if "--data-centres" in extra else 2
    # Two ranks in each of two, one in each of three.
    setting = dict(data_centres=data_centres, ranks=4 - data_centres)
    whole = pretrain_in_data_centres(*flags, **setting)
    for number in range(data_centres):
        go_back_to(3, tmp_path / f"data_centre_{number}")
    resumed = pretrain_in_data_centres(*flags, "--load", str(tmp_path), **setting)
    for before, after in zip(whole.runs, resumed.runs, strict=True):
        assert after.parameters == before.parameters
        assert after.losses == {i: loss for i, loss in before.losses.items() if i > 3}


def test_other_numbers_of_data_centres_start_from_the_anchor(tmp_path: Path) -> None:
    """Saved between rounds by two data centres; three go on, and one without local steps."""
    exact = ("--outer-compression", "none", "--num-layers", "1")
    flags = (*SAVING, *exact)
    pretrain_in_data_centres(*flags, "--save", str(tmp_path))
    for number in range(2):
        go_back_to(3, tmp_path / f"data_centre_{number}")
    three = pretrain_in_data_centres(*flags, "--load", str(tmp_path), data_centres=3)
    for run in three.runs:
        assert "of 2 data centres, this run has 3: it starts from the anchor" in run.output
    assert three.parameters[0] != three.parameters[1], "two local steps since the last round"

    alone = pretrain(
        *tiny_flags(*OPTIMIZER[:2], *exact[2:], train_iters="6"),
        *("--load", str(tmp_path / "data_centre_1")),
        ranks=1,
    )
    assert "of 2 data centres, this run is one: it starts from the anchor" in alone.output


def test_evaluation_reads_the_anchor() -> None:
    """Between two rounds the data centres have other weights, and the same validation loss."""
    flags = ("--local-steps", "3", "--eval-interval", "2", "--eval-iters", "1")
    centres = pretrain_in_data_centres(*flags)
    first, second = centres.runs
    assert first.ranks[0].validation == second.ranks[0].validation
    assert first.parameters != second.parameters
    without = pretrain_in_data_centres("--local-steps", "3")
    assert without.parameters == centres.parameters, "evaluation leaves the local weights alone"


def test_a_job_over_two_data_centres_is_refused() -> None:
    """Rank 1 was started with another number."""
    run = pretrain(
        *tiny_flags(*OPTIMIZER, "--data-centres", "2", "--outer-address", "127.0.0.1:1"),
        ranks=2,
        through="tests/distributed/numbered_by_rank.py",
        check=False,
    )
    assert "of the same job: every step would cross between data centres" in run.errors[0]


def test_other_settings_and_weights_are_refused() -> None:
    other_steps = pretrain_in_data_centres(
        own_flags={0: ["--local-steps", "2"], 1: ["--local-steps", "3"]}, check=False
    )
    assert "--local-steps 2 here, 3 in data centre 1" in other_steps.runs[0].output
    other_weights = pretrain_in_data_centres(own_flags={1: ["--seed", "7"]}, check=False)
    assert "starts from other weights" in other_weights.runs[0].output


WATCHED = "tests/distributed/watched_link.py"


def watched(output: str) -> tuple[list[int], int, list[float]]:
    """Return the iterations that met another data centre, the size of the largest process group,
    and the seconds of each step without its round."""
    match = re.search(r"exchanged after \[(.*)\], largest group (\d+), .* steps (.*)", output)
    iterations = [int(number) for number in match[1].split(", ")]
    return iterations, int(match[2]), [float(seconds) for seconds in match[3].split()]


def test_no_step_meets_the_other_data_centre_between_rounds() -> None:
    """Two data centres of two ranks, H = 3, one of them slow within a round: the other's steps are
    not slower, and no process group holds ranks of both."""
    centres = pretrain_in_data_centres(
        *("--local-steps", "3", "--train-iters", "7"),
        ranks=2,
        through=WATCHED,
        env={"SLOW_ITERATION": "2"},
    )
    for run in centres.runs:
        iterations, largest, _ = watched(run.output)
        # The comparison of weights at the start, and the rounds.
        assert iterations == [0, 3, 6]
        assert largest == 2
    _, _, seconds_of_fast = watched(centres.runs[0].output)
    _, _, seconds_of_slow = watched(centres.runs[1].output)
    assert seconds_of_slow[1] > 3
    assert seconds_of_fast[1] < 3, "iteration 2 does not wait for the other"


@pytest.mark.thorough
def test_a_slowed_data_centre_changes_no_bit() -> None:
    """Data centre 1 takes a fifth longer in every iteration, and exchanges are under way meanwhile:
    rounds count iterations, so both data centres have the bits of a run in which neither is slow."""
    flags = ("--local-steps", "3", "--outer-delay", "1", "--train-iters", "7")
    even = pretrain_in_data_centres(*flags)
    slowed = pretrain_in_data_centres(*flags, through=WATCHED, env={"SLOWDOWN": "0.2"})
    for before, after in zip(even.runs, slowed.runs, strict=True):
        assert after.losses == before.losses
        assert after.parameters == before.parameters
        assert watched(after.output)[0] == [0, 3, 6]


def test_a_lost_data_centre_is_named_and_ends_the_run() -> None:
    """Data centre 1 dies in iteration 5; the other one ends in the round after iteration 6."""
    centres = pretrain_in_data_centres(
        *("--local-steps", "3", "--train-iters", "7"),
        through=WATCHED,
        env={"STOP_ITERATION": "5"},
        check=False,
    )
    survivor = centres.runs[0]
    assert 6 in survivor.log("lm loss") or 5 in survivor.log("lm loss")
    assert survivor.errors == [
        "error: data centre 1 closed the connection, whose newest exchange was after its iteration 3; "
        "this one is at iteration 6. Its own log says why. Restart all data centres from their last "
        "common checkpoint"
    ]


def test_a_late_data_centre_is_waited_for_within_a_limit() -> None:
    """Data centre 1 is later than the limit of a second."""
    centres = pretrain_in_data_centres(
        *("--local-steps", "2", "--train-iters", "3"),
        through=WATCHED,
        env={"SLOW_ITERATION": "2", "LIMIT_SECONDS": "1"},
        check=False,
    )
    (line,) = centres.runs[0].errors
    assert line.startswith(
        "error: data centre 1 has not answered for 1 s, whose newest exchange was after its "
        "iteration 0"
    )
    assert "raise --outer-timeout-minutes" in line


def test_a_data_centre_that_does_not_start_is_waited_for_within_a_limit() -> None:
    """Nobody listens at the address, and nobody else comes."""
    flags = (*OPTIMIZER, "--data-centres", "2", "--outer-timeout-minutes", "0.02")
    one = pretrain(
        *tiny_flags(*flags, "--data-centre-rank", "1", "--outer-address", "127.0.0.1:9"),
        ranks=1,
        check=False,
    )
    assert (
        "data centre 0 does not answer at --outer-address 127.0.0.1:9 within 1 s" in one.errors[0]
    )
    port = free_port()
    zero = pretrain(
        *tiny_flags(*flags, "--data-centre-rank", "0", "--outer-address", f"127.0.0.1:{port}"),
        ranks=1,
        check=False,
    )
    assert "data centre 1 has not started within 1 s" in zero.errors[0]
