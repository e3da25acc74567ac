"""--compression auto: a run checks what was decided in turns, and tries schedules."""

import pytest
import torch
import torch.distributed as dist

from megatron.compression.auto import check, schedules


@pytest.fixture
def run(monkeypatch):
    """Runs iterations of given lengths and returns what was left out in each, and the verdict."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    def run(
        seconds,
        dimensions=("tensor_parallel", "data_parallel"),
        first=0,
        iterations=60,
        schedules=(),
        skipped=(),
        room=True,
    ):
        now, clock, verdict, history, taken = [0], [0.0], [], [], [None]
        monkeypatch.setattr(check.time, "perf_counter", lambda: clock[0])
        found = check.Check(
            dimensions,
            schedules,
            first,
            lambda: now[0],
            taken.append,
            lambda: room,
            lambda given: verdict.append(given),
        )
        for now[0] in range(iterations):
            left_out = {one for one in ("tp.forward", "dp.weight", "pp.forward") if found.left_out(one)}
            left_out |= {taken[-1]} - {None}
            history.append(left_out)
            clock[0] += seconds(left_out)
            if now[0] not in skipped:
                found.on_training_log(now[0] + 1)
        return history, verdict

    return run


def test_each_dimension_takes_its_turns(run):
    """Tensor parallelism saves a fifth, data parallelism costs time: it is off from then on."""
    history, verdict = run(lambda out: 1.0 + 0.25 * ("tp.forward" in out) - 0.1 * ("dp.weight" in out))
    turn = [set()] * check.TURN + [{"tp.forward"}] * check.TURN + [{"dp.weight"}] * check.TURN
    begin = 1 + check.WARM_UP
    assert history[: begin + 2 * len(turn)] == [set()] * begin + turn * check.ROUNDS
    assert all(left_out == {"dp.weight"} for left_out in history[begin + 2 * len(turn) :])
    (found,) = verdict
    assert found.off == {"data_parallel"} and found.gains["tensor_parallel"] == pytest.approx(0.2)
    assert found.schedule is None


def test_a_gain_under_two_percent_is_none(run):
    _, (found,) = run(lambda out: 1.0 + 0.015 * bool(out), ("tensor_parallel",))
    assert found.off == {"tensor_parallel"} and 0.01 < found.gains["tensor_parallel"] < 0.02


def test_each_schedule_takes_its_turns(run):
    """The fastest one stays, and what tensor parallelism gains is counted with it."""
    took = {"thirds": 0.95, "halves": 0.9, "tp.forward": 1.01}
    history, (found,) = run(
        lambda out: took[min(out)] if out else 1.0, ("tensor_parallel",), schedules=("thirds", "halves")
    )
    turns = [set(), {"tp.forward"}, {"thirds"}, {"halves"}] * check.ROUNDS
    begin, length = 1 + check.WARM_UP, len(turns) * check.TURN
    assert history[begin : begin + length] == [turn for turn in turns for _ in range(check.TURN)]
    assert all(turn == {"halves"} for turn in history[begin + length :])
    assert found.schedule == "halves" and not found.off, "1 % without halves, 11 with them"
    assert found.gains == {
        "thirds": pytest.approx(0.05),
        "halves": pytest.approx(0.1),
        "tensor_parallel": pytest.approx(1 - 0.9 / 1.01),
    }


@pytest.mark.parametrize(("halves", "without"), [(0.99, 1.5), (0.9, 0.91)])
def test_a_schedule_that_gains_little_is_not_taken(run, halves, without):
    """Nor one of what goes uncompressed in the end."""
    took = {"halves": halves, "tp.forward": without}
    history, (found,) = run(
        lambda out: took[min(out)] if out else 1.0, ("tensor_parallel",), schedules=("halves",)
    )
    assert found.schedule is None and "halves" not in history[-1]
    assert found.off == ({"tensor_parallel"} if without < 1 else set())


def test_it_waits_for_the_first_compressed_iteration(run):
    history, verdict = run(lambda out: 1.0 + bool(out), ("tensor_parallel",), first=20)
    begin = 20 + check.WARM_UP + check.TURN
    assert not any(history[:begin]) and history[begin] == {"tp.forward"} and verdict


def test_skipped_iterations_are_not_timed(run):
    """--iterations-to-skip: neither they nor the next one; a turn without any is left as it was."""
    begin, length = 1 + check.WARM_UP, check.TURN
    slow = lambda out: 1.0 + ("halves" in out) + 0.25 * ("tp.forward" in out)  # noqa: E731
    schedules = {"dimensions": ("tensor_parallel",), "schedules": ("halves",)}
    _, (found,) = run(slow, skipped=(begin + 2 * length - 1,), **schedules)
    assert found.gains == {"halves": pytest.approx(-1.0), "tensor_parallel": pytest.approx(0.2)}
    turns = [range(begin + first * length, begin + (first + 1) * length) for first in (2, 5)]
    _, (found,) = run(slow, skipped=[one for turn in turns for one in turn], **schedules)
    assert found.gains == {"tensor_parallel": pytest.approx(0.2)} and found.schedule is None


def test_without_room_no_schedule_takes_a_turn(run):
    history, (found,) = run(
        lambda out: 1.0 + bool(out), ("tensor_parallel",), schedules=("thirds", "halves"), room=False
    )
    assert not any({"thirds", "halves"} & out for out in history)
    assert found.gains == {"tensor_parallel": pytest.approx(0.5)} and found.schedule is None


def test_room_is_what_the_largest_iteration_leaves(monkeypatch):
    """Free memory and what the allocator holds in reserve, less the peak, on the rank that has least."""
    monkeypatch.setattr(schedules, "of_any_rank", lambda reason: reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 95)
    for peak, left in (
        (90, None),
        (94, "leave 3.0 % of a device's memory, under 5 %"),
        (99, "leave 0.0 %"),
    ):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda peak=peak: peak)
        found = schedules.shortage()
        assert (found is None) if left is None else (left in found)


def test_a_run_that_ends_early_decides_nothing(run):
    _, verdict = run(lambda out: 1.0, iterations=10)
    assert not verdict


def test_nothing_to_check(run):
    history, verdict = run(lambda out: 1.0, ())
    assert not any(history) and not verdict
