"""--compression auto: what the host and the GPU take for a layer, and when graphs are
recommended."""

from argparse import Namespace

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.auto import automatic
from megatron.compression.auto.automatic import Automatic
from megatron.compression.auto.check import Check, trials_of
from megatron.compression.auto.host import ITERATIONS, HostWatch, LayerTimes
from megatron.compression.auto.recommendation import recommendation
from megatron.compression.flags import resolve
from megatron.compression.session import Session
from tests.unit.megatron_args import parsed


class Machine:
    """A host that launches layers and a GPU that runs them in order, each on its own clock.

    Args:
        host: seconds that the host takes to launch a layer in one direction.
        gpu: seconds that the GPU takes to run it.
    """

    def __init__(self, host: float, gpu: float) -> None:
        self.host_seconds = host
        self.gpu_seconds = gpu
        self.now = 0.0
        """The host's clock."""
        self.free_at = 0.0
        """When the GPU has done all that was launched."""

    def launch(self) -> None:
        """Launch a layer: the GPU runs it once it is launched and the GPU is free."""
        self.now += self.host_seconds
        self.free_at = max(self.free_at, self.now) + self.gpu_seconds

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def event(self) -> Namespace:
        moment = max(self.free_at, self.now)
        return Namespace(moment=moment, elapsed_time=lambda other: 1e3 * (other.moment - moment))

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)


class LaunchedTwice(torch.autograd.Function):
    """A layer's work: launched once forward and once backward."""

    @staticmethod
    def forward(ctx, x, machine):
        ctx.machine = machine
        machine.launch()
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.machine.launch()
        return gradient, None


class Layer(TransformerLayer):
    """A layer without modules."""

    def __init__(self, machine: Machine) -> None:
        torch.nn.Module.__init__(self)
        self.machine = machine
        self.config = Namespace(cuda_graph_impl="none", fp8=None, fp4=None)

    def forward(self, hidden_states):
        return LaunchedTwice.apply(hidden_states, self.machine)


def watched(machine: Machine, layers: int = 6, micro_batches: int = 2) -> HostWatch:
    """Return a watch that has seen its iterations of a model."""
    model = torch.nn.ModuleList(Layer(machine) for _ in range(layers))
    watch = HostWatch([model], machine, machine.clock)
    for iteration in range(1 + ITERATIONS):
        for _ in range(micro_batches):
            hidden = torch.ones(2, requires_grad=True)
            for layer in model:
                hidden = layer(hidden_states=hidden)
            hidden.sum().backward()
        machine.synchronize()
        assert watch.iteration_ended() == (iteration == ITERATIONS)
    assert not any(layer._forward_pre_hooks for layer in model), "a layer is still watched"
    return watch


def test_a_gpu_that_waits_for_the_host_is_found_out() -> None:
    """Launching takes three times as long as running; in 24 launches the GPU waits for each."""
    machine = Machine(host=3e-3, gpu=1e-3)
    watch = watched(machine)
    assert watch.times == LayerTimes(*[pytest.approx(value) for value in (3e-3, 1e-3) * 2])
    assert watch.times.waited == pytest.approx(4e-3)
    assert watch.iteration_seconds == pytest.approx(24 * 3e-3 + 1e-3)


def test_a_gpu_that_is_busy_is_not_said_to_wait() -> None:
    watch = watched(Machine(host=1e-3, gpu=4e-3))
    assert watch.times.gpu == pytest.approx(8e-3)
    assert watch.times.host == pytest.approx(2e-3)
    assert watch.times.waited == 0


def test_one_layer_tells_nothing() -> None:
    assert watched(Machine(3e-3, 1e-3), layers=1).times is None


def test_layers_whose_modules_are_called_alone_tell_nothing() -> None:
    """So halves of a micro-batch have it: the layers' hooks do not run."""
    model = torch.nn.ModuleList(Layer(Machine(1, 1)) for _ in range(4))
    machine = Machine(1, 1)
    watch = HostWatch([model], machine, machine.clock)
    for _ in range(1 + ITERATIONS):
        watch.iteration_ended()
    assert watch.times is None


@pytest.fixture
def begin():
    """A function that returns a run of two micro-batches and the lines of its log."""

    def begin(*flags: str, **megatron) -> tuple[Automatic, list[str]]:
        log = []
        args = parsed(
            "--compression", "auto", *flags, save=None, cuda_graph_impl="none", **megatron
        )
        args.micro_batch_size = 1
        args.data_parallel_size = 1
        args.global_batch_size = 2
        session = Session(resolve(args))
        session.host.arguments = args
        session.host.log = log.append
        return Automatic(session, lambda: 1.0), log

    return begin


@pytest.fixture
def recommend(begin):
    """A function that returns the log's lines on graphs of a run with a host and a GPU."""

    def recommend(machine: Machine, *flags: str, **megatron) -> list[str]:
        run, _ = begin(*flags, **megatron)
        line = recommendation(watched(machine), run.args, run.config)
        return [] if line is None else [line]

    return recommend


FLAGS = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"


@pytest.mark.parametrize(
    ("megatron", "flags"),
    [
        ({}, f"add {FLAGS}, which"),
        ({"check_for_nan_in_loss_and_grad": False}, "add --cuda-graph-impl full_iteration, which"),
        (
            {"transformer_impl": "transformer_engine"},
            f"add --transformer-impl local {FLAGS}, which",
        ),
    ],
)
def test_graphs_are_recommended_by_the_flags_that_are_missing(recommend, megatron, flags) -> None:
    """Of 73 ms the GPU waits for 48: 2.9 times as fast."""
    (line,) = recommend(Machine(3e-3, 1e-3), **megatron)
    assert "the GPU waits for the host: a layer takes 6 ms to launch and 2 ms to run" in line
    assert flags in line
    assert "about 2.9 times as fast" in line


def test_graphs_are_not_recommended_where_the_gpu_is_busy(recommend) -> None:
    assert recommend(Machine(1e-3, 4e-3)) == []


def test_where_a_run_cannot_have_graphs_the_reason_is_named(recommend) -> None:
    """The bound measures in each iteration, past a graph."""
    (line,) = recommend(Machine(3e-3, 1e-3), "--compression-error-bound", "0.1", log_interval=1)
    assert "are not possible: --compression-error-bound with --log-interval 1" in line


@pytest.mark.parametrize(
    ("machine", "tried"),
    [
        (Machine(3e-3, 1e-3), False),  # launching is the whole iteration, so twice of it is more
        (Machine(1e-3, 4e-3), True),
    ],
    ids=["slow host", "slow GPU"],
)
def test_halves_are_not_tried_where_the_host_launches_too_slowly(
    begin, monkeypatch, machine, tried
) -> None:
    monkeypatch.setattr(automatic, "largest", lambda *values: list(values))
    run, log = begin()
    trials = trials_of(("tensor_parallel",), halves=True)
    run._check = Check(trials, ("tensor_parallel",), 0, lambda trial: None, lambda verdict: None)
    run._refuse_slow_halves(watched(machine))
    assert run._check.tries_halves == tried
    reason = "halves are not tried: the host would launch twice as many kernels, in 2.0 times"
    assert any(reason in line for line in log) != tried


def test_without_halves_there_may_be_nothing_to_compare(begin, monkeypatch) -> None:
    """The error meter, which was off to compare, goes on."""
    monkeypatch.setattr(automatic, "largest", lambda *values: list(values))
    run, _ = begin()
    run._check = Check(trials_of((), halves=True), (), 0, lambda trial: None, lambda verdict: None)
    run._meter_interval = 5
    run._refuse_slow_halves(watched(Machine(3e-3, 1e-3)))
    assert not run.compares
    assert run.session.run.policy.meter.interval == 5
