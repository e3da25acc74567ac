"""--compression auto in CUDA graphs: what is timed, what is compared, when graphs are recommended."""

import contextlib
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.auto import plan, stopwatch
from megatron.compression.auto.automatic import LOOKED_AT, Automatic
from megatron.compression.auto.measurement import Measurement
from megatron.compression.auto.messages import MessageKind, Workload
from megatron.compression.auto.stopwatch import Stopwatch
from megatron.compression.config import CompressionConfig
from megatron.compression.flags import resolve
from megatron.compression.session import Session
from tests.unit.megatron_args import parsed
from tests.unit.test_auto import one_plan

LAUNCHED, REPLAYED = 300e-6, 80e-6
"""Seconds of a call."""


@pytest.mark.parametrize(
    ("failure", "other"), [(None, None), ("refused\nmore", None), (None, "refused")]
)
def test_replays_are_timed_if_all_ranks_can_capture(monkeypatch, failure, other) -> None:
    """Else eager calls, on all ranks, with a rank's reason. As torch does, a capture that fails leaves its
    stream the current one."""
    now, calls, current = [0.0], [], ["training's"]

    @contextlib.contextmanager
    def capture(graph, capture_error_mode):
        calls.append(0)
        current[0] = "capture's"
        if failure:
            raise RuntimeError(failure)
        yield
        graph.calls, current[0] = calls.pop(), "training's"

    def call() -> None:
        if calls:
            calls[0] += 1
        else:
            now[0] += LAUNCHED

    @contextlib.contextmanager
    def stream(own):
        try:
            yield
        finally:
            current[0] = own

    def new_graph() -> Namespace:
        graph = Namespace()
        graph.replay = lambda: now.__setitem__(0, now[0] + graph.calls * REPLAYED)
        return graph

    def gather(into, own, group=None) -> None:
        calls.clear()
        into[:] = own, other

    monkeypatch.setattr(stopwatch, "time", Namespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(stopwatch, "largest", lambda *values: list(values))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    watch = Stopwatch()
    reasons = {"refused"} if failure or other else set()
    assert watch.seconds(call, in_graph=True) == pytest.approx(LAUNCHED if reasons else REPLAYED)
    assert watch.not_captured == reasons
    assert watch.seconds(call) == pytest.approx(LAUNCHED) and current == ["training's"]


@pytest.mark.parametrize(("graphs", "captured"), [("none", 0), ("local", 1), ("full_iteration", 3)])
def test_messages_that_a_graph_holds(graphs, captured) -> None:
    """Graphs of layers do not hold gradients, nor without ``moe`` among their modules experts' tokens."""
    args = Namespace(cuda_graph_impl=graphs, cuda_graph_modules=["attn"])
    sender = Namespace(sends=lambda message, rule: message.dimension)
    in_graphs = []

    def seconds(dimension: str, in_graph: bool) -> float:
        if in_graph:
            in_graphs.append(dimension)
        return 1.0

    watch = Namespace(seconds=seconds)
    run = Measurement(args, CompressionConfig(), Workload(1.0, ()), sender, watch, {})
    dimensions = ["tensor_parallel", "data_parallel", "expert_parallel"]
    for dimension in dimensions:
        run._seconds(MessageKind(dimension, "", "all_reduce", (4,), torch.float32, 1.0))
    assert in_graphs == dimensions[:captured]


def test_lossless_is_no_choice_in_graphs() -> None:
    """It is off there, so that a plan would promise what nobody compresses."""
    args = parsed("--compression", "auto")
    run = Measurement(args, resolve(args), Workload(1.0, ()), Namespace(), Namespace(), {})
    candidates = run._possible("tensor_parallel", 0.0)
    assert [recipe.name for recipe in candidates.rules] == ["lossless"]
    args.cuda_graph_impl = "full_iteration"
    candidates = run._possible("tensor_parallel", 0.0)
    assert not candidates.rules
    reason = "not possible: --cuda-graph-impl full_iteration switches lossless off"
    assert candidates.reason == reason


@pytest.fixture
def begun(monkeypatch):
    """Makes a run with such graphs, which has decided; and the lines that it says."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)

    def begin(graphs: str, *flags: str, **megatron) -> tuple[Automatic, list[str]]:
        args, said = parsed("--compression", "auto", *flags, save=None, **megatron), []
        session = Session(resolve(args))
        session.host.arguments = args
        args.cuda_graph_impl, args.cuda_graph_warmup_steps = graphs, 2
        session.host.log = said.append
        run = Automatic(session, lambda: 1.0)
        run._begin(one_plan())
        return run, said

    return begin


@pytest.mark.parametrize(
    ("graphs", "length"),
    [("none", 4 * plan.BLOCK), ("full_iteration", 2 * (plan.BLOCK + 3)), ("local", None)],
)
def test_iterations_that_are_compared(begun, graphs, length) -> None:
    """None where layers are captured once, which is said."""
    run, said = begun(graphs)
    assert (None if run._check.done else run._check.iterations) == length
    line = "compression auto: --cuda-graph-impl local captures once: iterations without are not compared"
    assert (line in said) == (length is None)


def test_nothing_is_measured_while_iterations_are_compared(begun) -> None:
    """It would be timed, and in graphs of whole iterations run without one."""
    run, _ = begun("full_iteration", "--compression-error-bound", "0.1")
    run.session.host.log_interval = 10
    run.session.iteration_ends(1, {})
    assert run.session.run.policy.meter.interval == 0


@pytest.mark.parametrize(
    ("idle", "layers", "flags"),
    [
        (True, "local", "do; --cuda-graph-impl full_iteration"),
        (
            True,
            "transformer_engine",
            "do; --transformer-impl local --cuda-graph-impl full_iteration",
        ),
        (False, "local", ""),
    ],
)
def test_graphs_are_recommended_where_the_gpu_waits_for_the_host(
    begun, monkeypatch, idle, layers, flags
) -> None:
    """In one line after a few iterations, the first left out; then nobody looks any more."""
    run, said = begun("none", transformer_impl=layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Namespace(query=lambda: idle))
    monkeypatch.setattr(run.session, "attach_dimensions", lambda chunks: chunks)
    layer = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(layer)
    run.attach_model([torch.nn.ModuleList([layer])])
    for iteration in range(1 + LOOKED_AT):
        for hook in layer._forward_pre_hooks.values():
            hook(layer, ())
        run.on_training_log(iteration + 1)
    lines = [one for one in said if "the host is the bottleneck" in one]
    assert len(lines) == idle and not layer._forward_pre_hooks
    assert all("at 3 of 3 layers the GPU" in one and flags in one for one in lines)
