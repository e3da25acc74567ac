"""--compression auto in CUDA graphs: what is timed and compared, when graphs are recommended."""

import contextlib
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.compression.auto import check, schedules, stopwatch
from megatron.compression.auto.automatic import Automatic
from megatron.compression.auto.check import Trial, trials_of
from megatron.compression.auto.measurement import Candidates, Measurement, decided_config
from megatron.compression.auto.messages import MessageKind, Workload
from megatron.compression.auto.schedules import Schedules
from megatron.compression.auto.stopwatch import Stopwatch
from megatron.compression.config import CompressionConfig
from megatron.compression.flags import resolve
from megatron.compression.session import Session
from tests.unit.megatron_args import parsed
from tests.unit.test_auto import one_plan

LAUNCHED = 300e-6
"""Seconds of a call that the host launches."""
REPLAYED = 80e-6
"""Seconds of a call in the replay of a graph."""


class Gpu:
    """In place of torch's streams and CUDA graphs, on a clock that calls and replays move on.

    As torch does, a capture that fails leaves its stream the current one.

    Args:
        failure: why this rank cannot capture; None: it can.
        other_rank: the same of the other of two ranks.
    """

    def __init__(self, failure: str | None, other_rank: str | None) -> None:
        self.clock = 0.0
        self.stream = "training's"
        self._failure = failure
        self._other_rank = other_rank
        self._captured_calls: int | None = None
        """Calls so far of the capture that is under way."""

    def call(self) -> None:
        """Stand for the sending of a message."""
        if self._captured_calls is None:
            self.clock += LAUNCHED
        else:
            self._captured_calls += 1

    def new_graph(self) -> Namespace:
        graph = Namespace(calls=0)

        def replay() -> None:
            self.clock += graph.calls * REPLAYED

        graph.replay = replay
        return graph

    @contextlib.contextmanager
    def capture(self, graph, capture_error_mode):
        self._captured_calls = 0
        self.stream = "capture's"
        if self._failure:
            raise RuntimeError(self._failure)
        yield
        graph.calls = self._captured_calls
        self._captured_calls = None
        self.stream = "training's"

    @contextlib.contextmanager
    def on_stream(self, stream):
        try:
            yield
        finally:
            self.stream = stream

    def gather_reasons(self, into, local, group=None) -> None:
        """Gather both ranks' reasons, in place of ``all_gather_object``."""
        self._captured_calls = None  # a capture that failed has ended
        into[:] = local, self._other_rank

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stopwatch, "time", Namespace(perf_counter=lambda: self.clock))
        monkeypatch.setattr(stopwatch, "largest", lambda *values: list(values))
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_gather_object", self.gather_reasons)


def test_replays_are_timed_where_all_ranks_can_capture(monkeypatch) -> None:
    gpu = Gpu(None, None)
    gpu.install(monkeypatch)
    watch = Stopwatch()
    assert watch.seconds(gpu.call, in_graph=True) == pytest.approx(REPLAYED)
    assert not watch.not_captured
    assert watch.seconds(gpu.call) == pytest.approx(LAUNCHED)
    assert gpu.stream == "training's"


@pytest.mark.parametrize(
    ("failure", "other_rank"), [("refused\nmore", None), (None, "refused")], ids=["here", "there"]
)
def test_calls_are_timed_eager_where_a_rank_cannot_capture(
    monkeypatch, failure, other_rank
) -> None:
    """All ranks keep the first line of its reason, and training's stream is current again."""
    gpu = Gpu(failure, other_rank)
    gpu.install(monkeypatch)
    watch = Stopwatch()
    assert watch.seconds(gpu.call, in_graph=True) == pytest.approx(LAUNCHED)
    assert watch.not_captured == {"refused"}
    assert watch.seconds(gpu.call) == pytest.approx(LAUNCHED)
    assert gpu.stream == "training's"


@pytest.mark.parametrize(
    ("graphs", "in_graphs"),
    [
        ("none", []),
        ("local", ["tensor_parallel"]),
        ("full_iteration", ["tensor_parallel", "data_parallel", "expert_parallel"]),
    ],
)
def test_messages_are_timed_in_the_graph_that_holds_them(graphs, in_graphs) -> None:
    """Graphs of layers hold no gradients, and no tokens of experts unless ``moe`` is a module."""
    args = Namespace(cuda_graph_impl=graphs, cuda_graph_modules=["attn"])
    sender = Namespace(sends=lambda message, rule: message.dimension)
    timed_in_graphs = []

    def seconds(dimension: str, in_graph: bool) -> float:
        if in_graph:
            timed_in_graphs.append(dimension)
        return 1.0

    watch = Namespace(seconds=seconds)
    run = Measurement(args, CompressionConfig(), Workload(1.0, ()), sender, watch, {})
    for dimension in ("tensor_parallel", "data_parallel", "expert_parallel"):
        run._seconds(MessageKind(dimension, "", "all_reduce", (4,), torch.float32, 1.0))
    assert timed_in_graphs == in_graphs


def lossless_candidates(graphs: str) -> Candidates:
    """Return tensor parallelism's candidates for a budget of zero, which only lossless meets."""
    args = parsed("--compression", "auto")
    config = resolve(args)
    args.cuda_graph_impl = graphs
    run = Measurement(args, config, Workload(1.0, ()), Namespace(), Namespace(), {})
    return run._possible("tensor_parallel", 0.0)


def test_lossless_is_a_choice_without_graphs() -> None:
    assert [recipe.name for recipe in lossless_candidates("none").rules] == ["lossless"]


def test_lossless_is_no_choice_in_graphs() -> None:
    """It is off there: a plan with it would promise a compression that does not happen."""
    candidates = lossless_candidates("full_iteration")
    assert not candidates.rules
    reason = "not possible: --cuda-graph-impl full_iteration switches lossless off"
    assert candidates.reason == reason


@pytest.fixture
def begin(monkeypatch):
    """A function that begins a run which has decided, and returns it with the lines of its log."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(schedules, "first_reason", lambda reason: reason)

    def begin(graphs: str, *flags: str, **megatron) -> tuple[Automatic, list[str]]:
        log = []
        args = parsed("--compression", "auto", *flags, save=None, **megatron)
        session = Session(resolve(args))
        args.cuda_graph_impl = graphs
        args.cuda_graph_warmup_steps = 2
        session.host.arguments = args
        session.host.log = log.append
        run = Automatic(session, lambda: 1.0)
        run._begin(one_plan(exposed=0.0))
        return run, log

    return begin


CAPTURED_ONCE = (
    "compression auto: --cuda-graph-impl local captures once: iterations without are not compared"
)


# Without graphs there are two blocks with the codec, two without, and two with the safer one. With
# graphs of iterations there is one of each, longer by an iteration without a graph and a capture.
@pytest.mark.parametrize(
    ("graphs", "iterations"),
    [("none", 6 * check.BLOCK), ("full_iteration", 3 * (check.BLOCK + check.CAPTURING))],
)
def test_iterations_with_and_without_compression_are_compared(begin, graphs, iterations) -> None:
    run, log = begin(graphs)
    assert not run._check.done
    assert run._check.iterations == iterations
    assert CAPTURED_ONCE not in log


def test_graphs_of_layers_are_captured_once_and_not_compared(begin) -> None:
    run, log = begin("local")
    assert run._check.done
    assert CAPTURED_ONCE in log


@pytest.mark.parametrize("halves", [False, True])
def test_the_flags_of_the_log_give_the_decided_settings(begin, halves: bool) -> None:
    run, _ = begin("none")
    decided = replace(one_plan(), halves=halves)
    line = run._to_type(decided)
    flags = line.removeprefix("the same without timings: ")
    flags = flags.removesuffix(" in place of --compression auto")
    typed = resolve(parsed(*flags.split()))
    expected = run._decided(decided)
    assert typed.rules(0) == expected.rules(0)
    assert typed.tensor_parallel.overlap == expected.tensor_parallel.overlap
    assert typed.enabled and typed.tensor_parallel.halves == halves


@pytest.mark.parametrize(
    ("gain", "decision"),
    [
        (0.015, "1.5 % less: switched off, under 2 % or what timings scatter by"),
        (-0.1, "10.0 % more: switched off"),
    ],
)
def test_the_log_says_why_a_dimension_is_switched_off(begin, gain: float, decision: str) -> None:
    run, log = begin("none")
    off = Trial(frozenset({check.TENSOR}))
    run._checked(check.Verdict(off, {check.TENSOR: gain}, {}, 0.0))
    assert f"compression auto: tensor parallel: iterations with it take {decision}" in log
    assert log[-1].endswith("the same without timings: drop --compression auto")


def test_where_nothing_was_decided_nothing_has_to_be_typed(begin) -> None:
    run, _ = begin("none")
    line = run._to_type(one_plan(chosen=False, name="none"))
    assert line == "the same without timings: drop --compression auto"


def test_nothing_is_measured_while_iterations_are_compared(begin) -> None:
    """The error meter would lengthen iterations; graphs of iterations would not run in them."""
    run, _ = begin("full_iteration", "--compression-error-bound", "0.1")
    run.session.host.log_interval = 10
    run.session.iteration_ends(1, {})
    assert run.session.run.policy.meter.interval == 0


TENSOR = frozenset({"tensor_parallel"})
COMPARED = [
    Trial(),
    Trial(TENSOR),
    Trial(TENSOR, halves=True),
    Trial(halves=True),
    Trial(halves=True, recipe="int8:outliers=on"),
]


def prepared(run: Automatic) -> Schedules:
    """Return the schedules of a run whose plan is int6: int8 is safer."""
    schedules = Schedules(run.session, run.config, run.args, print)
    trials = schedules.prepare(one_plan(exposed=0.0), [])
    assert trials == [COMPARED[0], COMPARED[1], Trial(recipe="int8:outliers=on")]
    return schedules


def test_each_way_to_train_is_a_graph_of_its_own(begin) -> None:
    """A graph is captured again where the policy's circumstances differ."""
    run, _ = begin("full_iteration")
    policy = run.session.run.policy
    of_the_warm_up = policy.circumstances()
    schedules = prepared(run)
    captured_for = []
    for trial in COMPARED:
        schedules.take(trial)
        captured_for.append(policy.circumstances())
    assert len(set(captured_for)) == len(COMPARED)
    assert captured_for[0] == of_the_warm_up, "the first block goes on with the warm-up's graph"


@pytest.mark.parametrize(
    ("trial", "codec"),
    [
        (COMPARED[0], "int6:outliers=on"),
        (COMPARED[1], None),
        (COMPARED[2], None),
        (COMPARED[4], "int8:outliers=on"),
    ],
)
def test_messages_go_by_the_way_that_is_tried(begin, trial: Trial, codec: str | None) -> None:
    run, _ = begin("full_iteration")
    policy = run.session.run.policy
    # What ``decided_config`` gives a run of this plan.
    run.session.adopt(decided_config(run.config, one_plan(), run.args))
    prepared(run).take(trial)
    decision = policy.decide("tp.forward", 2**20)
    if codec is None:
        assert (decision.codec, decision.reason) == (None, "auto")
    else:
        assert decision.codec.name == codec


@pytest.mark.parametrize(("gigabytes_left", "tried"), [(3, False), (5, True)])
def test_halves_are_not_tried_where_memory_is_short(
    begin, monkeypatch, gigabytes_left: int, tried: bool
) -> None:
    """Of 80 GB: torch holds all but 1, and has not needed some of what it holds."""
    run, log = begin("full_iteration")
    ways = trials_of(("tensor_parallel",), halves=True)
    run._check = check.Check(ways, ("tensor_parallel",), 0, lambda trial: None, print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 79e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 80e9 - 1e9 * gigabytes_left)
    for iteration in range(1 + check.WARM_UP):
        run.on_training_log(iteration + 1)
    assert any(trial.halves for trial in run._check._trials) == tried
    refused = [line for line in log if "of a device's memory, under 5 %" in line]
    assert bool(refused) != tried
