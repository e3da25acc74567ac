"""The link between data centres: what is late, stopped, killed or slow; two processes, one rank each."""

import os
import signal
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from megatron.compression.errors import InputError
from megatron.compression.local_steps import link
from megatron.compression.local_steps.link import DataCentreLink, DataCentreLostError
from tests.distributed.launch import free_port
from tests.distributed.spawn import spawn

SETTINGS = {"--local-steps": 3}
LIMIT = 3.0
"""Seconds that a data centre waits for the other one."""


class Other:
    """Data centre 0, with the store, in a process of its own.

    Args:
        address: where the data centres meet.
        act: what it does once the data centres have met.
        settings: what it says of itself.
    """

    def __init__(
        self, address: str, act: Callable[[DataCentreLink], None], settings: dict = SETTINGS
    ) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        try:
            here = DataCentreLink(address, 2, 0, 30.0, lambda line: None)
            here.agree(settings)
            act(here)
        finally:
            os._exit(0)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)


def exchange_one(here: DataCentreLink) -> None:
    """Take part in the exchange after iteration 3, and stay."""
    here.wait(here.start(torch.zeros(8, dtype=torch.uint8), 3))
    time.sleep(60)


def meet(address: str, lines: list[str] | None = None) -> DataCentreLink:
    """Return the link of data centre 1, which has met data centre 0."""
    here = DataCentreLink(address, 2, 1, 30.0, (lines if lines is not None else []).append)
    here.agree(SETTINGS)
    here.seconds = LIMIT
    return here


def error_of_second_exchange(other_does: Callable[[Other], None]) -> tuple[str, float]:
    """Return the error of the exchange after iteration 6, which the other does not take part in, and
    how many seconds it took."""
    address = f"127.0.0.1:{free_port()}"
    other = Other(address, exchange_one)
    try:
        here = meet(address)
        payload = torch.ones(8, dtype=torch.uint8)
        received = here.wait(here.start(payload, 3))
        assert received.tolist() == [[0] * 8, [1] * 8]
        other_does(other)
        begin = time.monotonic()
        with pytest.raises(DataCentreLostError) as error:
            here.wait(here.start(payload, 6))
        return str(error.value), time.monotonic() - begin
    finally:
        other.end()


def stopped_worker(rank: int, ranks: int) -> tuple[str, float]:
    return error_of_second_exchange(lambda other: other.signal(signal.SIGSTOP))


def test_a_store_that_does_not_answer_delays_no_error() -> None:
    """Data centre 0, which keeps the store, is stopped: connections stay, and nobody answers. The
    error comes within the limit and what the store is given to answer."""
    ((line, seconds),) = spawn(stopped_worker, 1)
    assert line.startswith(
        "data centre 0 has not answered for 3 s, whose newest exchange was after its iteration 3:"
    )
    assert seconds < LIMIT + link._NEWS_SECONDS + 10, "ten for a busy host"


def killed_worker(rank: int, ranks: int) -> tuple[str, float]:
    return error_of_second_exchange(lambda other: other.signal(signal.SIGKILL))


def test_data_centre_0_is_named_when_it_has_died() -> None:
    """The store has died with it: what this side knows of it is in the line."""
    ((line, _),) = spawn(killed_worker, 1)
    assert line.startswith(
        "data centre 0 closed the connection, whose newest exchange was after its iteration 3; this "
        "one is at iteration 6"
    )


def late_in_its_delay(here: DataCentreLink) -> None:
    time.sleep(2 * LIMIT)
    exchange_one(here)


def delayed_worker(rank: int, ranks: int) -> tuple[list, bool]:
    # Connecting needs a limit above the exchange's; nothing else is longer than it.
    link._GRACE_SECONDS = 0.0
    address = f"127.0.0.1:{free_port()}"
    other = Other(address, late_in_its_delay)
    try:
        here = DataCentreLink(address, 2, 1, LIMIT, lambda line: None)
        here.agree(SETTINGS)
        payload = torch.ones(8, dtype=torch.uint8)
        kept = weakref.ref(payload)
        exchange = here.start(payload, 3)
        # Iterations that go on meanwhile.
        exchange.done.wait(30)
        received = here.wait(exchange).tolist()
        del payload, exchange
        time.sleep(0.2)
        return received, kept() is None
    finally:
        other.end()


def test_an_exchange_may_take_longer_than_the_limit_while_it_is_not_due() -> None:
    """The other side begins after twice the limit, while this one trains on; the limit is that of
    waiting. Once it is over the thread holds no payload."""
    ((received, is_free),) = spawn(delayed_worker, 1)
    assert received == [[0] * 8, [1] * 8]
    assert is_free


def slow_link(here: DataCentreLink) -> None:
    """Say that the exchange has begun, and send nothing."""
    here._publish(3)
    time.sleep(60)


def slow_worker(rank: int, ranks: int) -> str:
    address = f"127.0.0.1:{free_port()}"
    other = Other(address, slow_link)
    try:
        here = meet(address)
        with pytest.raises(DataCentreLostError) as error:
            here.wait(here.start(torch.ones(8, dtype=torch.uint8), 3))
        return str(error.value)
    finally:
        other.end()


def test_a_slow_link_is_told_from_a_late_data_centre() -> None:
    """The other side has begun the exchange as well, so it is not the one that is late."""
    (line,) = spawn(slow_worker, 1)
    assert "which has begun this exchange too, so the link is slow or lost" in line


def lost_at_the_start_worker(rank: int, ranks: int) -> tuple[str, list[str]]:
    address = f"127.0.0.1:{free_port()}"
    pid = os.fork()
    if not pid:
        # Keeps the store, and ends before it has said its settings.
        store = DataCentreLink(address, 2, 0, 30.0, lambda line: None)
        time.sleep(60)
        del store
        os._exit(0)
    lines: list[str] = []
    here = DataCentreLink(address, 2, 1, 30.0, lines.append)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(DataCentreLostError) as error:
        here.agree(SETTINGS)
    return str(error.value), lines


def test_a_store_that_ends_before_the_start_is_an_error_at_once() -> None:
    """Neither a traceback nor a line again and again until the limit."""
    ((line, lines),) = spawn(lost_at_the_start_worker, 1)
    assert line.startswith("data centre 0 closed the connection at --outer-address 127.0.0.1:")
    assert len(lines) == 1, "it connects"


def other_iteration_worker(rank: int, ranks: int) -> str:
    address = f"127.0.0.1:{free_port()}"
    other = Other(address, exchange_one, {link.ITERATION: 4})
    try:
        here = DataCentreLink(address, 2, 1, 30.0, lambda line: None)
        with pytest.raises(InputError) as error:
            here.agree({link.ITERATION: 8})
        return str(error.value)
    finally:
        other.end()


def test_another_iteration_names_the_flag_that_chooses_one() -> None:
    assert spawn(other_iteration_worker, 1) == [
        "the iteration 8 here, 4 in data centre 0: give all data centres --ckpt-step of a checkpoint "
        "that all of them have"
    ]
