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
    """Work of some exchanges, each noted when it starts and when it is waited for."""

    def start(number: int) -> Work:
        log.append(f"{name}{number} started")

        def finish() -> object:
            return name if number == exchanges else start(number + 1)

        return Work(Pending(log, f"{name}{number}"), finish, exchanges - number + 1)

    return start(1)


@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_exchanges_are_taken_one_by_one(exchanges: int) -> None:
    log: list[str] = []
    work = work_of(log, "a", exchanges)
    assert log == ["a1 started"] and not work.done
    for left in range(exchanges, 0, -1):
        assert work.exchanges == left and not work.done
        work.advance()
    assert work.done and work.exchanges == 0
    assert work.wait() == work.wait() == "a"
    work.advance()
    assert log.count("a1 waited") == 1 and len(log) == 2 * exchanges


def test_completed_work_has_its_result() -> None:
    work = Work.completed("x")
    assert work.done and work.exchanges == 0 and work.wait() == "x"
    assert work.then(lambda result: result + "y").wait() == "xy"
    assert Work.completed().wait() is None


def test_work_that_starts_completed_work_is_done() -> None:
    """A finish may find that nothing is left to send."""
    work = Work(None, lambda: Work.completed("x"), exchanges=2)
    work.advance()
    assert work.done and work.wait() == "x"


def test_then_runs_once_behind_the_last_exchange() -> None:
    log: list[str] = []
    work = work_of(log, "a", 2).then(lambda result: log.append("follow") or result * 2)
    assert work.exchanges == 2
    work.advance()
    assert "follow" not in log and work.exchanges == 1 and not work.done
    work.advance()
    assert work.done and log[-1] == "follow"
    assert work.wait() == work.wait() == "aa" and log.count("follow") == 1
    chained = (
        work_of(log, "b", 1).then(lambda result: result + "1").then(lambda result: result + "2")
    )
    assert chained.wait() == "b12"


def test_work_may_go_on_as_other_work() -> None:
    """What ``then`` or ``join`` made can be the next exchange of a work, and keeps its own order."""
    log: list[str] = []
    inner = work_of(log, "b", 2).then(lambda result: log.append("follow") or result)
    work = Work(Pending(log, "a"), lambda: inner, exchanges=3)
    work.advance()
    assert not work.done and work.exchanges == 2
    work.advance()
    assert not work.done
    assert work.wait() == "b" and work.done and log[-1] == "follow"
    joined = Work(None, lambda: join([work_of(log, "c", 1), work_of(log, "d", 2)], "both"))
    assert joined.wait() == "both"


def test_joined_works_move_on_together() -> None:
    """One's kernels run behind the others' exchanges: each advance takes one exchange of each, in order."""
    log: list[str] = []
    works = [work_of(log, "a", 2), work_of(log, "b", 2), work_of(log, "c", 1)]
    joined = join(works, "all")
    assert joined.exchanges == 2 and not joined.done
    log.clear()
    joined.advance()
    assert log == ["a1 waited", "a2 started", "b1 waited", "b2 started", "c1 waited"]
    assert joined.exchanges == 1 and not joined.done
    assert joined.wait() == "all" and joined.done and all(work.done for work in works)
    assert log[-2:] == ["a2 waited", "b2 waited"]
