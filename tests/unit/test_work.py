"""The one handle: exchanges taken one by one, what follows them, several as one."""

import pytest

from megatron.compression.communication import Work, join


class Pending:
    """An exchange in flight that writes down when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def wait(self) -> None:
        self.log.append(f"{self.name} waited")


def work_of(log: list[str], name: str, exchanges: int) -> Work:
    """Return work of some exchanges, each noted when it starts and when it is waited for.

    Args:
        log: takes the notes: "a1 started", "a1 waited", "a2 started" ...
        name: of the work; its result, too.
        exchanges: how many there are, from 1.
    """

    def start(number: int) -> Work:
        log.append(f"{name}{number} started")

        def finish() -> object:
            return name if number == exchanges else start(number + 1)

        return Work(Pending(log, f"{name}{number}"), finish, exchanges - number + 1)

    return start(1)


@pytest.fixture
def log() -> list[str]:
    return []


def test_the_first_exchange_starts_at_once(log) -> None:
    work = work_of(log, "a", 2)
    assert log == ["a1 started"]
    assert not work.done


@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_each_advance_takes_one_exchange(log, exchanges: int) -> None:
    work = work_of(log, "a", exchanges)
    for remaining in range(exchanges, 0, -1):
        assert work.exchanges == remaining
        assert not work.done
        work.advance()
    assert work.done
    assert work.exchanges == 0


@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_work_that_is_done_has_its_result_and_sends_nothing_more(log, exchanges: int) -> None:
    work = work_of(log, "a", exchanges)
    for _ in range(exchanges):
        work.advance()
    assert work.wait() == "a"
    assert work.wait() == "a"
    work.advance()
    assert log.count("a1 waited") == 1
    assert len(log) == 2 * exchanges


class TestCompleted:
    def test_it_has_its_result(self) -> None:
        work = Work.completed("x")
        assert work.done
        assert work.exchanges == 0
        assert work.wait() == "x"

    def test_what_follows_it_has_one_too(self) -> None:
        assert Work.completed("x").then(lambda result: result + "y").wait() == "xy"

    def test_its_result_may_be_none(self) -> None:
        assert Work.completed().wait() is None

    def test_work_that_starts_completed_work_is_done(self) -> None:
        """A finish may see that nothing remains to be sent."""
        work = Work(None, lambda: Work.completed("x"), exchanges=2)
        work.advance()
        assert work.done
        assert work.wait() == "x"


def followed(log: list[str], work: Work) -> Work:
    """Return work that notes "follow" after its last exchange; its result is twice the work's."""

    def follow(result: str) -> str:
        log.append("follow")
        return 2 * result

    return work.then(follow)


class TestThen:
    def test_it_runs_behind_the_last_exchange(self, log) -> None:
        work = followed(log, work_of(log, "a", 2))
        assert work.exchanges == 2
        work.advance()
        assert work.exchanges == 1
        assert not work.done
        assert "follow" not in log
        work.advance()
        assert work.done
        assert log[-1] == "follow"

    def test_it_runs_once(self, log) -> None:
        work = followed(log, work_of(log, "a", 2))
        assert work.wait() == "aa"
        assert work.wait() == "aa"
        assert log.count("follow") == 1

    def test_several_run_in_order(self, log) -> None:
        work = work_of(log, "b", 1).then(lambda result: result + "1")
        assert work.then(lambda result: result + "2").wait() == "b12"


class TestContinuation:
    """Work whose finish returns other work goes on as that."""

    def test_what_then_made_keeps_its_order(self, log) -> None:
        inner = followed(log, work_of(log, "b", 2))
        work = Work(Pending(log, "a"), lambda: inner, exchanges=3)
        work.advance()
        assert work.exchanges == 2
        assert not work.done
        work.advance()
        assert not work.done
        assert work.wait() == "bb"
        assert work.done
        assert log[-1] == "follow"

    def test_it_may_be_what_join_made(self, log) -> None:
        work = Work(None, lambda: join([work_of(log, "c", 1), work_of(log, "d", 2)], "both"))
        assert work.wait() == "both"


class TestJoin:
    """Kernels of one work run behind the exchanges of the others."""

    @pytest.fixture
    def works(self, log) -> list[Work]:
        return [work_of(log, "a", 2), work_of(log, "b", 2), work_of(log, "c", 1)]

    def test_it_has_as_many_exchanges_as_the_longest(self, works) -> None:
        joined = join(works, "all")
        assert joined.exchanges == 2
        assert not joined.done

    def test_an_advance_takes_one_exchange_of_each_in_order(self, log, works) -> None:
        joined = join(works, "all")
        log.clear()
        joined.advance()
        assert log == ["a1 waited", "a2 started", "b1 waited", "b2 started", "c1 waited"]
        assert joined.exchanges == 1
        assert not joined.done

    def test_it_is_done_when_all_are(self, log, works) -> None:
        joined = join(works, "all")
        assert joined.wait() == "all"
        assert joined.done
        assert all(work.done for work in works)
        assert log[-2:] == ["a2 waited", "b2 waited"]
