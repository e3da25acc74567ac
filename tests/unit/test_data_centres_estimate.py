"""The prediction of rounds between data centres."""

import math

import pytest

from megatron.compression import LocalStepsConfig
from megatron.compression.auto.data_centres import OuterLink, outer_link, predict, rows
from megatron.compression.auto.estimate import main
from megatron.compression.errors import InputError

VALUES = 8_000_000_000
LINK = OuterLink(bandwidth=10e9, latency=0.03)


def config(**settings) -> LocalStepsConfig:
    """Settings of a run in two data centres."""
    return LocalStepsConfig(data_centres=2, data_centre=0, address="host:1", **settings)


def test_two_data_centres_of_8_billion_parameters() -> None:
    """4.125 bits a value: 33 Gbit over 10 Gbit/s, and 30 ms."""
    predicted = predict(config(), VALUES, 5.0, 2, LINK)
    assert predicted.sent == VALUES * 4.125 / 8
    assert predicted.seconds == pytest.approx(3.33)
    assert predicted.waits == pytest.approx(3.33), "without a delay all of it is waited for"
    # 99 iterations of 5 s, less the latency.
    assert predicted.least_bandwidth == pytest.approx(33e9 / (495 - 0.03), rel=1e-3)


def test_more_data_centres_send_pieces_and_sums() -> None:
    """Each sends three quarters of its difference, and its quarter of the sum to three others."""
    two, four = (predict(config(), VALUES, 5.0, number, LINK) for number in (2, 4))
    assert four.sent == 1.5 * two.sent
    assert four.seconds == pytest.approx(1.5 * 3.3 + 4 * 0.03)


def test_a_delay_hides_what_fits_into_its_iterations() -> None:
    assert predict(config(delay=1), VALUES, 5.0, 2, LINK).waits == 0
    assert predict(config(delay=1), VALUES, 2.0, 2, LINK).waits == pytest.approx(1.33)
    # 64 data centres: 8 s of sending in rounds of 5 s.
    late = predict(config(delay=99), VALUES, 0.05, 64, LINK)
    assert late.waits == pytest.approx(late.seconds - 4.95)


def test_at_the_least_bandwidth_no_step_waits() -> None:
    for settings in (config(delay=5), config(delay=5, fragments=4), config(delay=99)):
        for number in (2, 8, 64):
            least = predict(settings, VALUES, 5.0, number, LINK).least_bandwidth
            enough = OuterLink(1.001 * least, LINK.latency)
            assert predict(settings, VALUES, 5.0, number, enough).waits == 0
            slower = OuterLink(0.98 * least, LINK.latency)
            assert predict(settings, VALUES, 5.0, number, slower).waits > 0


def test_latency_alone_may_be_too_long() -> None:
    assert predict(config(delay=1), VALUES, 0.02, 2, LINK).least_bandwidth == math.inf


@pytest.mark.parametrize("text", ["", "fast", "0", "1:-2", "1:x"])
def test_a_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="such as 1:30"):
        outer_link(text)


def test_the_table_has_2_to_64_data_centres(capsys) -> None:
    flags = """--gpus 8 --outer 1:30 -- --num-layers 24 --hidden-size 1024 --num-attention-heads 16
        --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8 --vocab-size 50257
        --global-batch-size 64 --bf16 --transformer-impl local --use-distributed-optimizer"""
    assert main(flags.split()) == 0
    output = capsys.readouterr().out
    assert "100 local steps a round, 4.125 bits a value" in output
    table = rows(config(), VALUES, 5.0, LINK)
    assert [row[0] for row in table[1:]] == ["2", "4", "8", "16", "32", "64"]
    assert output.count("\n| 64 ") == 1
