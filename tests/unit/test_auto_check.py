"""--compression auto: a run compares iterations with and without each dimension that was chosen."""

import pytest
import torch.distributed as dist

from megatron.compression.auto import plan

TURN = plan.BLOCK
BOTH = ("tensor_parallel", "data_parallel")


@pytest.fixture
def run(monkeypatch):
    """Runs iterations of given lengths and returns what was left out in each, and the gains."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    def run(seconds, dimensions=BOTH, first=0, iterations=60, skipped=(), capturing=0):
        now, clock, gains, history = [0], [0.0], [], []
        monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])
        check = plan.Check(dimensions, first, lambda: now[0], gains.append, capturing)
        for now[0] in range(iterations):
            left_out = {one for one in ("tp.forward", "dp.weight", "pp.forward") if check.left_out(one)}
            history.append(left_out)
            clock[0] += seconds(left_out)
            if now[0] not in skipped:
                check.on_training_log(now[0] + 1)
        return history, gains, check.off

    return run


def test_each_dimension_is_left_out_in_turn(run):
    """Tensor parallelism saves a fifth, data parallelism costs time: it is off from then on."""
    history, (gains,), off = run(lambda out: 1.0 + 0.25 * ("tp.forward" in out) - 0.1 * ("dp.weight" in out))
    blocks = [set()] * TURN + [{"tp.forward"}] * TURN + [{"dp.weight"}] * TURN
    begin = 1 + plan.WARM_UP
    assert history[: begin + 2 * len(blocks)] == [set()] * begin + blocks * plan.ROUNDS
    assert all(left_out == {"dp.weight"} for left_out in history[begin + 2 * len(blocks) :])
    assert off == {"data_parallel"} and gains["tensor_parallel"] == pytest.approx(0.2)


def test_in_a_cuda_graph_only_replays_are_timed(run):
    """Each kind of block once. Where it begins, eager iterations and a capture take long."""
    before, slow = [None], [0]

    def seconds(out):
        slow[0] = slow[0] - 1 if out == before[0] else 3  # two eager iterations and a capture
        before[0] = out
        return 9.0 if slow[0] > 0 else 1.0 + 0.25 * ("tp.forward" in out)

    history, (gains,), off = run(seconds, ("tensor_parallel",), capturing=3)
    begin, length = 1 + plan.WARM_UP, TURN + 3
    assert history[begin : begin + 2 * length] == [set()] * length + [{"tp.forward"}] * length
    assert not any(history[begin + 2 * length :]) and not off
    assert gains == {"tensor_parallel": pytest.approx(0.2)}


def test_a_gain_under_two_percent_is_none(run):
    _, (gains,), off = run(lambda out: 1.0 + 0.015 * bool(out), ("tensor_parallel",))
    assert off == {"tensor_parallel"} and 0.01 < gains["tensor_parallel"] < 0.02


def test_it_waits_for_the_first_compressed_iteration(run):
    history, gains, _ = run(lambda out: 1.0 + bool(out), ("tensor_parallel",), first=20)
    begin = 20 + plan.WARM_UP + TURN
    assert not any(history[:begin]) and history[begin] == {"tp.forward"} and gains


def test_skipped_iterations_are_not_timed(run):
    """--iterations-to-skip: neither they nor the next one; a dimension without any stays as decided."""
    begin = 1 + plan.WARM_UP
    slow = lambda out: 1.0 + 0.25 * ("tp.forward" in out) + ("dp.weight" in out)  # noqa: E731
    _, (gains,), _ = run(slow, skipped=(begin + 2 * TURN - 1,))
    assert gains == {"tensor_parallel": pytest.approx(0.2), "data_parallel": pytest.approx(0.5)}
    blocks = [range(begin + number * TURN, begin + (number + 1) * TURN) for number in (2, 5)]
    _, (gains,), off = run(slow, skipped=[one for block in blocks for one in block])
    assert gains == {"tensor_parallel": pytest.approx(0.2)} and not off


def test_without_enough_iterations_or_dimensions_nothing_is_decided(run):
    _, gains, _ = run(lambda out: 1.0, iterations=10)
    assert not gains
    history, gains, _ = run(lambda out: 1.0, ())
    assert not any(history) and not gains
