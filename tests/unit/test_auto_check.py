"""A run of --compression auto compares ways to train: in which order, and what it keeps."""

from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from megatron.compression.auto import check as checks
from megatron.compression.auto.check import Check, Trial, Verdict, trials_of

TURN = checks.BLOCK
"""Iterations of one block of the check, which leaves one dimension or none uncompressed."""
FIRST_BLOCK = 1 + checks.WARM_UP
"""The iteration with which the check begins."""
BOTH = ("tensor_parallel", "data_parallel")
WITHOUT_TP = {"tp.forward"}
WITHOUT_DP = {"dp.weight"}
Seconds = Callable[[set[str]], float]


class CheckedRun:
    """Iterations of a run whose plan is being checked, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.iteration = 0
        self.clock = 0.0
        self.verdicts: list[Verdict] = []
        """One, when the check has ended."""
        self.trial = Trial()
        """How the run trains now."""
        self.trials: list[Trial] = []
        """How it trained in each iteration."""
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
        monkeypatch.setattr(checks.time, "perf_counter", lambda: self.clock)

    def take(self, trial: Trial) -> None:
        self.trial = trial

    @property
    def history(self) -> list[set[str]]:
        """The traffic that was left uncompressed in each iteration."""
        return [left_out(trial) for trial in self.trials]

    @property
    def gains(self) -> list[dict[str, float]]:
        """The gain of each dimension, once: when the check has ended."""
        return [verdict.gains for verdict in self.verdicts]

    @property
    def off(self) -> set[str]:
        """Dimensions that the check has switched off."""
        return set(self.trial.off)

    def train(
        self,
        seconds: Seconds,
        dimensions: Sequence[str] = BOTH,
        first: int = 0,
        iterations: int = 60,
        skipped: Sequence[int] = (),
        **graphs: int,
    ) -> "CheckedRun":
        """Run iterations under a check of what dimensions gain.

        Args:
            seconds: what an iteration takes, by the traffic that is left uncompressed in it.
            dimensions: those that are checked.
            first: the first compressed iteration.
            iterations: how many there are.
            skipped: iterations that Megatron skips.
            graphs: arguments of ``Check`` that CUDA graphs have.
        """
        trials = trials_of(dimensions)
        check = Check(trials, dimensions, first, self.take, self.verdicts.append, **graphs)
        return self.follow(check, lambda trial: seconds(left_out(trial)), iterations, skipped)

    def follow(
        self,
        check: Check,
        seconds: Callable[[Trial], float],
        iterations: int,
        skipped: Sequence[int] = (),
    ) -> "CheckedRun":
        """Run iterations under a check.

        Args:
            check: it takes ways by ``take``.
            seconds: what an iteration takes, by the way to train.
            iterations: how many there are.
            skipped: iterations that Megatron skips.
        """
        for iteration in range(iterations):
            self.iteration = iteration
            self.trials.append(self.trial)
            self.clock += seconds(self.trial)
            if iteration not in skipped:
                check.on_training_log(iteration + 1)
        return self


def left_out(trial: Trial) -> set[str]:
    """Return the traffic that a way to train leaves uncompressed."""
    traffic = {"tensor_parallel": "tp.forward", "data_parallel": "dp.weight"}
    return {traffic[dimension] for dimension in trial.off}


@pytest.fixture
def run(monkeypatch) -> CheckedRun:
    return CheckedRun(monkeypatch)


def tp_saves_a_fifth(left_out: set[str]) -> float:
    """Return 1 s for an iteration, 1.25 s without compression of tensor parallelism."""
    return 1.25 if "tp.forward" in left_out else 1.0


def tp_saves_a_fifth_dp_costs(left_out: set[str]) -> float:
    """Return seconds where compression of data parallelism makes an iteration slower."""
    seconds = tp_saves_a_fifth(left_out)
    if "dp.weight" in left_out:
        seconds -= 0.1
    return seconds


def tp_saves_a_fifth_dp_a_half(left_out: set[str]) -> float:
    """Return seconds where both dimensions gain."""
    seconds = tp_saves_a_fifth(left_out)
    if "dp.weight" in left_out:
        seconds += 1.0
    return seconds


def test_each_dimension_is_left_out_in_turn(run):
    run.train(tp_saves_a_fifth_dp_costs)
    blocks = [set()] * TURN + [WITHOUT_TP] * TURN + [WITHOUT_DP] * TURN
    checked = len(blocks) * checks.ROUNDS
    before = [set()] * FIRST_BLOCK
    assert run.history[: FIRST_BLOCK + checked] == before + blocks * checks.ROUNDS


def test_a_dimension_that_costs_time_is_off_from_then_on(run):
    run.train(tp_saves_a_fifth_dp_costs)
    (gains,) = run.gains
    assert run.off == {"data_parallel"}
    assert gains["tensor_parallel"] == pytest.approx(0.2)
    end = FIRST_BLOCK + 3 * TURN * checks.ROUNDS
    assert run.history[end:]
    for left_out in run.history[end:]:
        assert left_out == WITHOUT_DP


class Capturing:
    """Seconds of iterations in CUDA graphs: after a change one runs eager and one is captured.

    Args:
        warm_up: iterations that run eager in the beginning.
    """

    def __init__(self, warm_up: int) -> None:
        self.previous: set[str] = set()
        self.slow = warm_up + 2

    def seconds(self, left_out: set[str]) -> float:
        self.slow -= 1
        if left_out != self.previous:
            self.slow = 2
        self.previous = left_out
        return 9.0 if self.slow > 0 else tp_saves_a_fifth(left_out)


@pytest.mark.parametrize("warm_up", [3, 7])
def test_in_a_cuda_graph_only_replays_are_timed(run, warm_up: int):
    """There is one block with and one without compression, each longer by what a capture takes."""
    settings = dict(graph_warm_up=warm_up, capturing=checks.CAPTURING)
    run.train(Capturing(warm_up).seconds, ("tensor_parallel",), **settings)
    first = 1 + warm_up
    length = TURN + checks.CAPTURING
    blocks = [set()] * length + [WITHOUT_TP] * length
    assert run.history[first : first + 2 * length] == blocks
    assert not any(run.history[first + 2 * length :])
    assert not run.off
    assert run.gains == [{"tensor_parallel": pytest.approx(0.2)}]


def test_a_gain_under_two_percent_is_none(run):
    run.train(lambda left_out: 1.015 if left_out else 1.0, ("tensor_parallel",))
    (gains,) = run.gains
    assert run.off == {"tensor_parallel"}
    assert 0.01 < gains["tensor_parallel"] < 0.02


def test_the_check_waits_for_the_first_compressed_iteration(run):
    run.train(lambda left_out: 2.0 if left_out else 1.0, ("tensor_parallel",), first=20)
    begin = 20 + checks.WARM_UP + TURN
    assert not any(run.history[:begin])
    assert run.history[begin] == WITHOUT_TP
    assert run.gains


def test_a_skipped_iteration_and_the_next_are_not_timed(run):
    """The last iteration of the first block without tensor parallelism's codec is skipped."""
    run.train(tp_saves_a_fifth_dp_a_half, skipped=(FIRST_BLOCK + 2 * TURN - 1,))
    (gains,) = run.gains
    assert gains == {"tensor_parallel": pytest.approx(0.2), "data_parallel": pytest.approx(0.5)}


def test_a_block_has_as_many_iterations_where_some_are_skipped(run):
    """All ranks count those that they have logged, so they switch together."""
    skipped = range(FIRST_BLOCK, FIRST_BLOCK + 7)
    run.train(tp_saves_a_fifth, ("tensor_parallel",), skipped=skipped)
    assert run.history.index(WITHOUT_TP) == FIRST_BLOCK + 7 + TURN
    assert run.gains == [{"tensor_parallel": pytest.approx(0.2)}]


def test_a_dimension_that_could_not_be_timed_stays_as_decided(run):
    """Of every two iterations one is skipped: none follows another."""
    run.train(tp_saves_a_fifth_dp_a_half, skipped=range(1, 200, 2), iterations=200)
    assert run.gains == [{}]
    assert not run.off


def test_without_enough_iterations_nothing_is_decided(run):
    run.train(lambda left_out: 1.0, iterations=10)
    assert not run.gains


def test_without_dimensions_nothing_is_left_out(run):
    run.train(lambda left_out: 1.0, dimensions=())
    assert not any(run.history)
    assert not run.gains


# Halves of a micro-batch
# ------------------------------------------------------------------------------------------

TENSOR = ("tensor_parallel",)
SAFER = "int8"


def milliseconds(
    none: float, codec: float, halves: float, both: float, safer: float, safer_whole: float = 1e9
) -> Callable[[Trial], float]:
    """Return what an iteration takes by the way to train.

    Args:
        none: uncompressed as usual.
        codec: through the codec that was decided.
        halves: uncompressed in halves.
        both: through the codec in halves.
        safer: through the codec that costs less loss, in halves.
        safer_whole: through that codec as usual.
    """

    def seconds(trial: Trial) -> float:
        if trial.off:
            return halves if trial.halves else none
        if not trial.halves:
            return safer_whole if trial.recipe else codec
        return safer if trial.recipe else both

    return seconds


def loss_of(trial: Trial) -> float:
    """Return the loss of a way: six bits were decided, and eight are safer."""
    if trial.off:
        return 0.0
    return 0.006 if trial.recipe else 0.067


def tried(run: CheckedRun, seconds: Callable[[Trial], float], **settings) -> CheckedRun:
    """Run the whole check of a codec of tensor parallelism and of halves."""
    trials = trials_of(TENSOR, halves=True, safer=SAFER)
    check = Check(trials, TENSOR, 0, run.take, run.verdicts.append, loss_of, **settings)
    return run.follow(check, seconds, FIRST_BLOCK + check.iterations + 3)


WHOLE = Trial()
NOTHING = Trial(frozenset(TENSOR))
ONLY_HALVES = Trial(frozenset(TENSOR), halves=True)
IN_HALVES = Trial(halves=True)
SAFE = Trial(recipe=SAFER)
SAFE_IN_HALVES = Trial(halves=True, recipe=SAFER)


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        # GPT-350M in a graph over PCIe: halves hide the link, so eight bits are as fast as six.
        ((720, 414, 551, 351, 354), SAFE_IN_HALVES),
        # Six bits are worth it where they gain two percent.
        ((740, 427, 558, 390, 410), IN_HALVES),
        # The codec gains nothing beside halves, by themselves or together.
        ((600, 598, 450, 447, 449), ONLY_HALVES),
        # GPT-350M in a graph over NVLink: halves lose, with a codec and without.
        ((322, 299, 337, 320, 325), WHOLE),
        # Eager over PCIe: the host launches twice as many kernels.
        ((727, 708, 961, 1228, 1133), WHOLE),
        # Eager, and the host launches eight bits as fast as six: no halves, and less loss.
        ((727, 610, 961, 1228, 1133, 605), SAFE),
        ((727, 610, 961, 1228, 1133, 660), WHOLE),
        # Nothing gains two percent.
        ((100, 99, 99, 98.5, 98.2), NOTHING),
        ((100, 120, 130, 140, 150), NOTHING),
    ],
)
def test_the_fastest_schedule_is_taken_and_never_one_that_loses(run, times, taken):
    tried(run, milliseconds(*times))
    assert run.trial == taken
    fastest = min(times)
    reached = milliseconds(*times)(taken)
    assert reached <= fastest * 1.03
    assert reached <= times[0]


def test_each_way_has_its_blocks_in_both_rounds(run):
    tried(run, milliseconds(720, 414, 551, 351, 354))
    round_ = [WHOLE] * TURN + [NOTHING] * TURN + [SAFE] * TURN + [ONLY_HALVES] * TURN
    round_ += [IN_HALVES] * TURN + [SAFE_IN_HALVES] * TURN
    end = FIRST_BLOCK + 2 * len(round_)
    assert run.trials[FIRST_BLOCK:end] == round_ * 2
    assert run.trials[end:] == [SAFE_IN_HALVES] * 3


def test_halves_alone_are_tried_where_no_codec_was_decided(run):
    """Nothing is compressed, so there are two ways, and the run may still gain."""
    trials = trials_of((), halves=True)
    assert trials == [Trial(), Trial(halves=True)]
    check = Check(trials, (), 0, run.take, run.verdicts.append)
    run.follow(check, lambda trial: 0.75 if trial.halves else 1.0, 40)
    assert run.trial == Trial(halves=True)
    assert run.gains == [{}]


def test_a_codec_is_not_tried_in_halves_where_its_sums_fill_the_gpu():
    assert trials_of(TENSOR, halves=True, overlaps=False) == [WHOLE, NOTHING, ONLY_HALVES]


def test_other_dimensions_are_decided_beside_halves(run):
    """Data parallelism's codec costs time; tensor parallelism gains in halves."""
    trials = trials_of(BOTH, halves=True, safer=SAFER)

    def seconds(trial: Trial) -> float:
        total = 0.5 if trial.halves else 1.0
        if "data_parallel" not in trial.off:
            total += 0.1
        return total + (0.2 if "tensor_parallel" in trial.off else 0.0)

    check = Check(trials, BOTH, 0, run.take, run.verdicts.append, loss_of)
    run.follow(check, seconds, FIRST_BLOCK + check.iterations + 1)
    assert run.trial == Trial(frozenset({"data_parallel"}), halves=True, recipe=SAFER)


def test_halves_can_be_left_out_before_the_first_block(run):
    trials = trials_of(TENSOR, halves=True, safer=SAFER)
    check = Check(trials, TENSOR, 0, run.take, run.verdicts.append, loss_of)
    assert check.tries_halves
    check.leave_out_halves()
    assert not check.tries_halves
    run.follow(check, milliseconds(720, 414, 551, 351, 354), FIRST_BLOCK + check.iterations + 1)
    assert not any(trial.halves for trial in run.trials)
    assert run.trial == WHOLE


def test_what_is_within_the_noise_is_not_taken(run):
    """Iterations of 0.9 and 1.1 s around a median: three percent less tells nothing."""
    noise = [0.9, 1.1, 1.0]

    def seconds(trial: Trial) -> float:
        factor = noise[run.iteration % 3]
        return factor * milliseconds(1.0, 0.97, 0.97, 0.97, 0.97)(trial)

    tried(run, seconds)
    assert run.trial == NOTHING


def test_what_the_check_costs_is_counted(run):
    """Each round has five blocks of other ways than the one that is taken, at 1 s instead of
    0.5."""
    tried(run, lambda trial: 0.5 if trial == IN_HALVES else 1.0)
    (verdict,) = run.verdicts
    # The last block was another way: its first iteration is lost once more.
    lost = 2 * 5 * TURN * 0.5
    assert verdict.extra_seconds == pytest.approx(lost, abs=0.51)


def test_in_graphs_a_capture_that_comes_again_is_counted(run):
    """Iterations that warm up and capture take 9 s; replays 1 s, in halves a half."""
    state = {"trial": None, "slow": 0}

    def seconds(trial: Trial) -> float:
        state["slow"] = 3 if trial != state["trial"] else state["slow"] - 1
        state["trial"] = trial
        if state["slow"] > 0:
            return 9.0
        return 0.5 if trial == ONLY_HALVES else 1.0

    tried(run, seconds, capturing=3)
    (verdict,) = run.verdicts
    assert run.trial == ONLY_HALVES
    # The first block goes on as the warm-up did; the five others begin with a capture.
    others = 4 * (3 * 9.0 + TURN * 1.0)
    taken = 3 * 9.0 + TURN * 0.5
    spent = (TURN + 3) * 1.0 + others + taken
    # The last block was another way, so what was taken is captured once more.
    again = 3 * 9.0 - 3 * 0.5
    assert verdict.extra_seconds == pytest.approx(spent - 6 * (TURN + 3) * 0.5 + again)


def test_the_most_iterations_of_a_check():
    """A benchmark runs as many before it measures."""
    trials = trials_of(("tensor_parallel", "data_parallel"), halves=True, safer=SAFER)
    check = Check(trials, BOTH, 0, lambda trial: None, lambda verdict: None, capturing=2)
    assert checks.most_iterations(2, capturing=2) == FIRST_BLOCK + check.iterations
