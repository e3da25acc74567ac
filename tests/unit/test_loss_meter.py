"""The loss meter's sums, its intervals, what it refuses, and what ``auto`` makes of its figures."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.compression import (
    CompressionConfig,
    CompressionConfigError,
    TensorParallelConfig,
    flags,
    loss_settings,
)
from megatron.compression.auto.plan import DimensionPlan, RunPlan
from megatron.compression.auto.safety import Safety, without_replaced_flags
from megatron.compression.communication import Ledger, Policy, Run
from megatron.compression.extra_passes import RandomStates, RecordedStep
from megatron.compression.loss_meter import (
    LEAST_PAIRS,
    MOST_PAIRS,
    TOGETHER,
    LossCost,
    LossMeter,
    PairSums,
    codecs_in_force,
)
from megatron.compression.session import Session
from tests.unit.megatron_args import parsed


def sums_of(compressed: list[float], uncompressed: list[float]) -> PairSums:
    """Return the sums over pairs, which are added in two parts."""
    sums = PairSums(torch.zeros(7, dtype=torch.float64))
    for part in (slice(0, 2), slice(2, None)):
        pairs = [torch.tensor(x[part], dtype=torch.float64) for x in (compressed, uncompressed)]
        sums.add(*pairs)
    return sums


class TestPairSums:
    def test_the_cost_is_the_ratio_of_sums(self) -> None:
        cost = sums_of([11.0, 21.0, 31.0], [10.0, 20.0, 30.0]).cost()
        assert cost.percent == pytest.approx(100 * 3 / 60)
        assert cost.pairs == 3

    def test_the_error_is_that_of_the_ratio(self) -> None:
        """As written out: residuals of a line through the origin."""
        generator = torch.Generator().manual_seed(1)
        base = 5 + torch.rand(40, dtype=torch.float64, generator=generator)
        noise = 0.1 * torch.randn(40, dtype=torch.float64, generator=generator)
        cost = sums_of((base + noise).tolist(), base.tolist()).cost()
        ratio = noise.sum() / base.sum()
        residuals = noise - ratio * base
        error = 100 * (40 / 39 * residuals.square().sum()).sqrt() / base.sum()
        assert cost.standard_error == pytest.approx(float(error), rel=1e-9)

    def test_the_error_covers_the_truth_as_often_as_it_says(self) -> None:
        """Two standard errors hold the true cost of 1 % in 95 of 100 runs of 32 pairs."""
        generator = torch.Generator().manual_seed(2)
        inside = 0
        for _ in range(400):
            base = 5 + torch.randn(32, dtype=torch.float64, generator=generator)
            noise = 0.2 * torch.randn(32, dtype=torch.float64, generator=generator)
            cost = sums_of((1.01 * base + noise).tolist(), base.tolist()).cost()
            inside += abs(cost.percent - 1) < 2 * cost.standard_error
        assert 0.92 < inside / 400 < 0.98

    def test_equal_losses_cost_exactly_nothing(self) -> None:
        cost = sums_of([3.3, 4.7, 5.1], [3.3, 4.7, 5.1]).cost()
        assert (cost.percent, cost.standard_error, cost.pairs) == (0.0, 0.0, 3)

    def test_zeros_and_nan_without_codecs_are_no_pairs(self) -> None:
        cost = sums_of([0.0, math.nan, 3.0, 3.0], [0.0, math.nan, 2.0, 2.0]).cost()
        assert (cost.pairs, cost.broken) == (2, 0)
        assert cost.percent == pytest.approx(50)

    def test_nan_with_codecs_alone_is_told_apart(self) -> None:
        cost = sums_of([math.nan, math.inf, 3.0, 3.0], [2.0, 2.0, 3.0, 3.0]).cost()
        assert (cost.pairs, cost.broken) == (2, 2)
        assert cost.is_above(1e9)
        assert "2 more pairs are NaN or infinite with the codecs alone" in str(cost)

    def test_one_pair_has_no_error(self) -> None:
        assert math.isnan(sums_of([3.0], [2.0]).cost().standard_error)

    def test_the_beginning_of_a_long_run_fades(self) -> None:
        """All sums are halved: the cost is the same, by half as many pairs."""
        base = [float(1 + i % 7) for i in range(MOST_PAIRS)]
        noisy = [value + (0.1 if i % 3 else -0.1) for i, value in enumerate(base)]
        shorter = sums_of(noisy[: MOST_PAIRS - 1], base[: MOST_PAIRS - 1]).cost()
        cost = sums_of(noisy, base).cost()
        assert cost.pairs == MOST_PAIRS / 2
        assert cost.percent == pytest.approx(shorter.percent, rel=1e-2)
        assert cost.standard_error == pytest.approx(math.sqrt(2) * shorter.standard_error, rel=1e-2)


def test_the_text_of_a_cost() -> None:
    assert str(LossCost(0.0123, 0.03, 32)) == "+0.012 +- 0.030 % of loss (32 pairs)"


@pytest.mark.parametrize(
    ("cost", "above"),
    [
        (LossCost(0.3, 0.09, LEAST_PAIRS), True),
        (LossCost(0.3, 0.11, LEAST_PAIRS), False),
        (LossCost(0.3, 0.09, LEAST_PAIRS - 1), False),
        (LossCost(math.nan, math.nan, 0), False),
    ],
)
def test_above_the_budget_is_beyond_two_standard_errors(cost: LossCost, above: bool) -> None:
    assert cost.is_above(0.1) == above


def run_of(spec: str = "int8", start: int = 0) -> Run:
    """Return a run that compresses tensor-parallel messages from an iteration on."""
    ledger = Ledger()
    rules = TensorParallelConfig(compression=spec).rules(start)
    return Run(Policy(rules, ledger, lambda: run_of.iteration), ledger)


run_of.iteration = 0


@pytest.fixture(autouse=True)
def _first_iteration():
    run_of.iteration = 0
    yield


class TestDue:
    @pytest.mark.parametrize(
        ("interval", "share", "due"),
        [(3, 1.0, [2, 5, 8]), ("auto", 0.04, [3, 7]), ("auto", 0.001, list(range(9)))],
    )
    def test_every_interval_ends_with_a_measurement(self, interval, share, due) -> None:
        meter = LossMeter(interval, run_of())
        assert [i for i in range(9) if meter.due(i, share)] == due

    def test_nothing_is_measured_before_anything_is_compressed(self) -> None:
        meter = LossMeter(1, run_of(start=5))
        measured = []
        for iteration in range(8):
            run_of.iteration = iteration
            if meter.due(iteration, 1.0):
                measured.append(iteration)
        assert measured == [5, 6, 7]

    @pytest.mark.parametrize(
        ("stages", "virtual", "passed", "expected"),
        [(1, None, 1, 2 / 24), (4, None, 1, 2 * 4 / (3 * 11)), (4, 2, 4, 2 * 5.5 / (3 * 9.5))],
    )
    def test_a_measurement_takes_its_share_of_an_iteration(
        self, stages, virtual, passed, expected
    ) -> None:
        args = parsed(
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
        )
        assert loss_settings.share_of_time(args, 8, passed) == pytest.approx(expected)


class TestPolicy:
    def test_a_pass_without_codecs_has_none(self) -> None:
        policy = run_of().policy
        with policy.only(()):
            assert policy.decide("tp.forward").codec is None
        assert policy.decide("tp.forward").codec is not None

    def test_a_pass_with_codecs_leaves_out_what_auto_leaves_out(self) -> None:
        policy = run_of().policy
        policy.left_out = lambda traffic: traffic == "tp.forward"
        with policy.only(("tp.",)):
            assert policy.decide("tp.forward").codec is None
            assert policy.decide("tp.backward").codec is not None
        assert policy.left_out("tp.forward")

    def test_errors_of_layers_are_measured_in_training_alone(self) -> None:
        run = run_of()
        run.policy.meter.interval = 1
        run.ledger.phase = "meter"
        assert not run.policy.measures("a", "tp.forward")
        run.ledger.phase = "train"
        assert run.policy.measures("a", "tp.forward")

    def test_codecs_in_force_follow_rules_and_layers_past_the_bound(self) -> None:
        run = run_of()
        before = codecs_in_force(run)
        run.policy.meter.tripped["a", "tp.forward"] = 1.0
        guarded = codecs_in_force(run)
        run.policy.replace_rules(TensorParallelConfig(compression="int6").rules(0))
        assert len({before, guarded, codecs_in_force(run)}) == 3

    def test_other_rules_are_other_circumstances(self) -> None:
        """Graphs of whole iterations are captured anew."""
        policy = run_of().policy
        before = policy.circumstances()
        policy.replace_rules(dict(policy.rules))
        assert policy.circumstances() != before


class TestRecordedStep:
    """Two micro-batches of three numbers each; ``reads`` numbers of a micro-batch."""

    @pytest.fixture(autouse=True)
    def _two_micro_batches(self, monkeypatch) -> None:
        name = "megatron.compression.extra_passes.get_num_microbatches"
        monkeypatch.setattr(name, lambda: 2)

    @staticmethod
    def schedule(*, forward_step_func, data_iterator, num_microbatches, **_) -> list[dict]:
        """Stand in for megatron-core's."""
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        return [
            {"lm loss": forward_step_func(iterator)}
            for iterator in iterators
            for _ in range(num_microbatches)
        ]

    def step(self, data, passed: int = 1, reads: int = 1) -> RecordedStep:
        arguments = {
            "data_iterator": data,
            "forward_step_func": lambda iterator: [next(iterator) for _ in range(reads)],
            "forward_backward_func": self.schedule,
            "model": [],
        }
        return RecordedStep(arguments, passed, {})

    @staticmethod
    def iterator(first: int) -> SimpleNamespace:
        """Stand in for Megatron's iterator, which holds the loader's."""
        return SimpleNamespace(iterable=iter(range(first, first + 100)))

    @pytest.mark.parametrize(("reads", "expected"), [(1, [1]), (3, [3, 4, 5])])
    def test_the_last_micro_batch_passes_again(self, reads: int, expected: list[int]) -> None:
        data = self.iterator(0)
        with self.step(data, reads=reads) as step:
            for _ in range(2 * reads):
                next(data.iterable)
            assert step.forward() == [expected]
            assert step.forward() == [expected]
        assert next(data.iterable) == 2 * reads

    def test_every_virtual_stage_has_its_own(self) -> None:
        data = [self.iterator(0), self.iterator(50)]
        with self.step(data, passed=2) as step:
            for iterator in data * 2:
                next(iterator.iterable)
            assert step.forward() == [[0], [1], [50], [51]]

    def test_a_captured_schedule_runs_without_its_graph(self) -> None:
        data = self.iterator(0)
        with self.step(data) as step:
            step._arguments["forward_backward_func"] = SimpleNamespace(
                forward_backward_func=self.schedule
            )
            next(data.iterable)
            next(data.iterable)
            assert step.forward() == [[1]]


def test_random_states_come_back() -> None:
    import random

    import numpy as np
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 5)

    def draw() -> list[float]:
        with tracker.fork():
            forked = torch.rand(()).item()
        return [random.random(), np.random.rand(), torch.rand(()).item(), forked]

    states = RandomStates()
    first = draw()
    states.restore()
    assert draw() == first
    tracker.reset()


TP = ("--tp-compression", "int8")


class TestRefused:
    @pytest.mark.parametrize(
        ("megatron", "message"),
        [
            ({"cuda_graph_impl": "local"}, "past the graphs of --cuda-graph-impl local"),
            ({"cuda_graph_impl": "transformer_engine"}, "use full_iteration or drop"),
            ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed remembers"),
            ({"qk_clip": True}, "--qk-clip keeps the largest logits"),
            ({"use_megatron_fsdp": True}, "--use-megatron-fsdp gathers weights"),
            ({"cpu_offloading_num_layers": 2}, "--cpu-offloading-num-layers moves activations"),
        ],
    )
    def test_what_passes_would_change(self, megatron: dict, message: str) -> None:
        args = parsed(*TP, "--compression-loss-interval", **megatron)
        with pytest.raises(CompressionConfigError, match=message) as error:
            flags.resolve(args)
        assert "drop" in str(error.value)

    @pytest.mark.parametrize("value", ["0", "-3"])
    def test_no_number_of_iterations(self, value: str) -> None:
        args = parsed(*TP, f"--compression-loss-interval={value}")
        with pytest.raises(CompressionConfigError, match=f"interval {value} must be a number"):
            flags.resolve(args)

    def test_gradients_alone_are_not_seen(self) -> None:
        args = parsed("--dp-compression", "int8", "--compression-loss-interval", "5")
        with pytest.raises(CompressionConfigError, match="but nothing uses it"):
            flags.resolve(args)

    def test_a_loop_that_asks_without_an_interval(self) -> None:
        session = Session(CompressionConfig())
        with pytest.raises(CompressionConfigError, match="loss_interval"):
            session.measure_loss(lambda: None)


@pytest.mark.parametrize(("words", "value"), [((), "auto"), (("auto",), "auto"), (("7",), 7)])
def test_the_flags_value(words: tuple[str, ...], value: int | str) -> None:
    args = parsed(*TP, "--compression-loss-interval", *words)
    assert flags.resolve(args).loss_interval == value


def test_a_single_rank_is_told_that_nothing_is_measured() -> None:
    args = parsed(*TP, "--compression-loss-interval", tensor_model_parallel_size=1)
    lines = flags.resolve(args).describe(args)
    assert any("--compression-loss-interval has no effect here" in line for line in lines)


class Meter:
    """A loss meter that has measured what a test says."""

    def __init__(self) -> None:
        self.apart: tuple[str, ...] = ()
        self.costs: dict[str, LossCost] = {}

    def measure_apart(self, dimensions: tuple[str, ...]) -> None:
        self.apart = dimensions

    def cost(self, name: str) -> LossCost:
        return self.costs.get(name, LossCost(math.nan, math.nan, 0))


class AutoRun:
    """A run of ``--compression auto`` whose session takes what ``Safety`` gives it."""

    def __init__(self, **specs: str | tuple[str, str]) -> None:
        self.args = parsed(pipeline_model_parallel_size=2)
        self.config = CompressionConfig(auto=("data_parallel",))
        for name, spec in specs.items():
            first, second = (spec, None) if isinstance(spec, str) else spec
            changed = dataclasses.replace(
                getattr(self.config, name), compression=first, backward=second, min_mb=0
            )
            self.config = dataclasses.replace(self.config, **{name: changed})
        ledger = Ledger()
        self.run = Run(Policy(self.config.rules(), ledger), ledger)
        self.loss_meter = Meter()
        self.plan = RunPlan((), 0.1, 1.0, 1.0, 1.0)
        self.lines: list[str] = []
        self.safety = Safety(self, self.args, 0.1, self._changed)

    def change(self, name: str, settings) -> None:
        self.config = dataclasses.replace(self.config, **{name: settings})
        self.run.policy.replace_rules({**self.run.policy.rules, **settings.rules(0)})

    def _changed(self, plan: RunPlan, line: str) -> None:
        self.plan = plan
        self.lines.append(line)

    def look(self, percent: float, pairs: int, error: float = 0.01) -> None:
        """Look at a cost of all codecs together."""
        cost = LossCost(percent, error, pairs)
        self.loss_meter.costs[TOGETHER] = cost
        self.safety.look(self.plan, cost)

    @property
    def specs(self) -> tuple[str, str]:
        return self.config.tensor_parallel.compression, self.config.pipeline_parallel.compression


class TestSafety:
    def test_a_cost_within_the_budget_changes_nothing(self) -> None:
        run = AutoRun(tensor_parallel="int4")
        run.look(0.11, 40)
        assert run.specs == ("int4", "none")
        assert not run.lines

    def test_few_pairs_change_nothing(self) -> None:
        run = AutoRun(tensor_parallel="int4")
        run.look(5.0, LEAST_PAIRS - 1)
        assert not run.lines

    def test_a_recipe_steps_down_to_the_next_one_and_at_last_to_none(self) -> None:
        run = AutoRun(tensor_parallel="tensor-6bit")
        decided = DimensionPlan(
            "tensor_parallel", "a link", True, "int6:outliers=on", 0.1, 0.07, ""
        )
        run.plan = dataclasses.replace(run.plan, dimensions=(decided,))
        run.look(0.5, 20)
        assert run.specs[0] == "int8:outliers=on"
        run.look(0.5, 20)
        assert run.specs[0] == "none"
        run.look(0.5, 20)
        assert len(run.lines) == 2
        (decided,) = run.plan.dimensions
        assert (decided.link, decided.chosen, decided.name) == ("a link", False, "none")

    def test_two_codecs_of_one_recipe_step_down_together(self) -> None:
        """Between them lies the recipe of 6 bits in both directions."""
        run = AutoRun(tensor_parallel=("int6:outliers=on", "int5:outliers=on"))
        run.look(0.5, 20)
        settings = run.config.tensor_parallel
        assert (settings.compression, settings.backward) == ("int6:outliers=on", None)

    def test_a_setting_of_the_users_own_steps_down_to_the_safest(self) -> None:
        run = AutoRun(tensor_parallel=("int4", "int6"))
        run.look(0.5, 20)
        settings = run.config.tensor_parallel
        assert (settings.compression, settings.backward) == ("int8:outliers=on", None)

    def test_a_codec_that_breaks_the_loss_goes_at_once(self) -> None:
        run = AutoRun(tensor_parallel="int4")
        run.safety.look(run.plan, LossCost(math.nan, math.nan, 0, broken=1))
        assert len(run.lines) == 1

    def test_two_dimensions_are_measured_apart_first(self) -> None:
        run = AutoRun(tensor_parallel="int4", pipeline_parallel="int4:group=32")
        run.look(0.5, 20)
        assert run.loss_meter.apart == ("tensor_parallel", "pipeline_parallel")
        assert not run.lines
        costs = {"tensor_parallel": 0.1, "pipeline_parallel": 0.4}
        for name, percent in costs.items():
            run.loss_meter.costs[name] = LossCost(percent, 0.01, LEAST_PAIRS)
        run.look(0.5, 40)
        assert run.specs[0] == "int4"
        assert run.specs[1] != "int4:group=32"
        assert run.lines[0].startswith("pipeline parallel: int4:group=32 cost +0.400")
        assert run.loss_meter.apart == ()

    def test_a_cost_that_falls_back_is_not_followed_up(self) -> None:
        run = AutoRun(tensor_parallel="int4", pipeline_parallel="int4:group=32")
        run.look(0.5, 20)
        run.look(0.1, 40)
        assert run.loss_meter.apart == ()
        assert not run.lines

    def test_looks_lie_apart(self) -> None:
        run = AutoRun(tensor_parallel="int4")
        run.look(0.1, 20)
        run.look(0.5, 21)
        assert not run.lines
        run.look(0.5, 20 + LEAST_PAIRS)
        assert len(run.lines) == 1

    def test_a_resume_drops_the_flag_that_was_replaced(self) -> None:
        run = AutoRun(tensor_parallel="int4")
        config = run.config
        assert without_replaced_flags(config, run.plan) == config
        run.look(0.5, 20)
        replaced = without_replaced_flags(config, run.plan)
        assert not replaced.tensor_parallel.enabled
