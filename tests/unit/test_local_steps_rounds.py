"""Rounds of local steps in one process: what is sent when, and how it meets the steps since."""

from dataclasses import dataclass

import pytest
import torch

from megatron.compression import LocalStepsConfig
from megatron.compression.communication import Ledger
from megatron.compression.local_steps.outer_optimizer import OuterOptimizer
from megatron.compression.local_steps.rounds import LocalSteps
from megatron.compression.local_steps.schedule import fragment_bounds

VALUES = 64


class Vector:
    """Stands in for ``MasterShard``: masters of one rank without copies elsewhere."""

    device = torch.device("cpu")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.clone()
        self.numel = self.sent = len(values)
        self.published = 0

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.values[begin:end].clone()

    def mix(self, anchor: torch.Tensor, begin: int, end: int, local_share: float) -> None:
        local = self.values[begin:end]
        self.values[begin:end] = local_share * local + (1 - local_share) * anchor

    def align(self, *_: object) -> None:
        """Nothing has a copy."""

    def publish(self) -> None:
        self.published += 1

    def gather(self) -> None:
        """Every rank's shard is this one's."""

    def weights(self) -> torch.Tensor:
        return self.values.clone()

    def set_weights(self, stored: torch.Tensor) -> None:
        self.values.copy_(stored)

    set_weights_to = set_weights


@dataclass
class Sent:
    """Stands in for ``Exchange``."""

    iteration: int
    payload: torch.Tensor
    seconds: float = 0.0


class Mirror:
    """Stands in for the link: the other data centres send what this one sends."""

    def __init__(self, data_centres: int) -> None:
        self.data_centres = data_centres
        self.started: list[int] = []
        self.awaited: list[int] = []

    def start(self, payload: torch.Tensor, iteration: int, is_scatter: bool = False) -> Sent:
        self.started.append(iteration)
        return Sent(iteration, payload)

    def wait(self, exchange: Sent) -> torch.Tensor:
        self.awaited.append(exchange.iteration)
        if exchange.payload.dim() == 2:  # pieces: this one gets its own of each, the first
            return exchange.payload[:1].expand_as(exchange.payload)
        return exchange.payload.expand(self.data_centres, -1)


def local_steps(data_centres: int = 2, **settings) -> LocalSteps:
    """One data centre of some that have made the same steps; the outer optimizer averages."""
    config = LocalStepsConfig(
        data_centres=data_centres,
        data_centre=0,
        address="host:1",
        compression="none",
        learning_rate=1.0,
        momentum=0.0,
        **settings,
    )
    rounds = LocalSteps(config, Ledger(), lambda line: None)
    initial = torch.arange(VALUES, dtype=torch.float32)
    rounds.shard = Vector(initial)
    rounds.outer = OuterOptimizer(
        initial, None, config.learning_rate, config.momentum, data_centres
    )
    rounds.bounds = fragment_bounds(VALUES, config.fragments)
    rounds.link = Mirror(data_centres)
    return rounds


def train(rounds: LocalSteps, iterations: int) -> None:
    """Take steps of +1 in each value."""
    for iteration in range(1, iterations + 1):
        rounds.shard.values += 1
        rounds.iteration_ended(iteration)


def test_without_a_delay_masters_are_the_anchor_after_each_round() -> None:
    rounds = local_steps(steps=3)
    train(rounds, 7)
    assert rounds.link.started == rounds.link.awaited == [3, 6]
    initial = torch.arange(VALUES, dtype=torch.float32)
    assert torch.equal(rounds.outer.anchor, initial + 6)
    assert torch.equal(rounds.shard.values, initial + 7), "one local step since"
    assert rounds.shard.published == 2


@pytest.mark.parametrize(("mixing", "share"), [(None, 0.5), (0.25, 0.25), (0.0, 0.0)])
def test_a_late_anchor_is_mixed_with_the_steps_since(mixing, share: float) -> None:
    """Sent after iteration 4, applied after 6: the masters are two steps ahead of the anchor."""
    rounds = local_steps(steps=4, delay=2, mixing=mixing)
    train(rounds, 5)
    assert rounds.link.started == [4] and rounds.link.awaited == []
    assert len(rounds.flights) == 1
    train_on = rounds.shard.values + 1
    rounds.shard.values += 1
    rounds.iteration_ended(6)
    initial = torch.arange(VALUES, dtype=torch.float32)
    assert torch.equal(rounds.outer.anchor, initial + 4)
    torch.testing.assert_close(rounds.shard.values, share * train_on + (1 - share) * (initial + 4))
    assert rounds.flights == []


@pytest.mark.parametrize(
    ("delay", "second", "applied"), [(0, 5, 5), (1, 6, 6), (2, 6, 7), (3, 7, 8)]
)
def test_more_data_centres_send_sums_half_way(delay: int, second: int, applied: int) -> None:
    """Pieces after iteration 5, their sums at an iteration that all data centres know."""
    rounds = local_steps(data_centres=4, steps=5, delay=delay)
    train(rounds, applied)
    assert rounds.link.started == [5, second]
    assert rounds.shard.published == 1 and rounds.flights == []
    # The mean of equal pieces is the piece: five steps of +1.
    assert torch.equal(rounds.outer.anchor, torch.arange(VALUES, dtype=torch.float32) + 5)


def test_fragments_take_turns() -> None:
    rounds = local_steps(steps=4, fragments=2)
    train(rounds, 2)
    initial = torch.arange(VALUES, dtype=torch.float32)
    half = VALUES // 2
    assert torch.equal(rounds.outer.anchor[:half], initial[:half] + 2)
    assert torch.equal(rounds.outer.anchor[half:], initial[half:]), "its turn is two steps later"
    train(rounds, 4)
    assert rounds.link.started == [2, 2, 4]


def test_the_ledger_counts_what_crosses() -> None:
    """fp32 is sent as it is; int4 has an eighth and its scales."""
    rounds = local_steps(steps=2)
    train(rounds, 4)
    [sent] = [row for row in rounds.ledger.rows() if row["sent_bytes"]]
    assert (sent["traffic"], sent["link"]) == ("dp.outer", "inter")
    assert sent["sent_bytes"] == 2 * 4 * VALUES


def test_an_error_in_an_evaluation_is_not_followed_by_a_collective() -> None:
    """Without one the weights are the local ones again; with one nothing is gathered, since other
    ranks may not have raised."""
    rounds = local_steps(steps=2)
    train(rounds, 3)
    local = rounds.shard.values.clone()
    with rounds.anchor_in_weights():
        assert torch.equal(rounds.shard.values, rounds.outer.anchor)
    assert torch.equal(rounds.shard.values, local)
    with pytest.raises(OSError, match="disk"), rounds.anchor_in_weights():
        rounds.shard.set_weights = None
        raise OSError("disk is full")


@pytest.mark.parametrize(
    ("flights", "settings", "fits"),
    [
        ([[0, 8, True]], {"steps": 4, "delay": 2}, True),
        ([[0, 8, True]], {"steps": 4, "delay": 1}, False),
        ([[0, 8, True]], {"steps": 5, "delay": 2}, False),
        ([], {"steps": 5, "delay": 1}, True),
    ],
)
def test_what_is_in_flight_is_dropped_at_another_schedule(flights, settings, fits: bool) -> None:
    """It would be applied beside the next difference, which holds it as well. Without anything in
    flight a schedule may change."""
    saved = {"messages": ["none", 1], "flights": flights, "schedule": [4, 2]}
    rounds = local_steps(**settings)
    payload = rounds._payload_bytes(0)
    rounds._restore_flights(saved, {"flight.0": torch.zeros(2, payload, dtype=torch.uint8)})
    assert rounds._fits_messages(saved) == fits
    assert len(rounds.flights) == (len(flights) if fits else 0)
