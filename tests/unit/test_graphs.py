"""Compression in CUDA graphs, with a stand-in for torch's graph, whose replay runs nothing."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import full_cuda_graph
from megatron.core.transformer.enums import CudaGraphModule

from megatron.compression import graphs
from megatron.compression.codecs import parse_codec
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger, release_graphs
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.site import Run
from megatron.compression.data_parallel.hooks import CompressedBucketGroup
from megatron.compression.errors import CompressionConfigError
from megatron.compression.flags import resolve
from megatron.compression.patches import loop, running
from tests.unit.megatron_args import experts, parsed

SENT = ("tp.forward", "compressed", "all_to_all")


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def capture_begin(self) -> None: ...

    capture_end = replay = reset = capture_begin


@pytest.fixture(autouse=True)
def graph(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    cls = type("CUDAGraph", (Graph,), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    return cls


def counting() -> Ledger:
    """A ledger that counts replays."""
    ledger = Ledger()
    ledger.count_replays()
    return ledger


def sent(ledger: Ledger, phase: str = "train") -> tuple[int, int, int]:
    """Return calls, bytes sent and uncompressed bytes of a phase, which has one row."""
    (row,) = [row for row in ledger.rows() if row["phase"] == phase]
    return row["calls"], row["sent_bytes"], row["plain_bytes"]


class TestLedger:
    @pytest.fixture
    def ledger(self) -> Ledger:
        """A ledger with one message outside of graphs: 5 bytes in place of 7."""
        ledger = counting()
        ledger.record(*SENT, sent=5, uncompressed=7)
        return ledger

    @staticmethod
    def captured(ledger: Ledger, graph: Graph, size: int) -> Graph:
        """Return a graph with three messages of a size, uncompressed twice as large."""
        graph.capture_begin()
        for _ in range(3):
            ledger.record(*SENT, sent=size, uncompressed=2 * size)
        graph.capture_end()
        return graph

    def test_a_capture_sends_nothing(self, ledger, graph) -> None:
        self.captured(ledger, graph(), 10)
        assert sent(ledger) == (1, 5, 7)

    def test_each_replay_counts_what_its_graph_holds(self, ledger, graph) -> None:
        small = self.captured(ledger, graph(), 10)
        large = self.captured(ledger, graph(), 100)
        small.replay()
        large.replay()
        large.replay()
        assert sent(ledger) == (1 + 3 + 6, 5 + 30 + 600, 7 + 60 + 1200)

    def test_a_replay_counts_in_the_phase_that_it_runs_in(self, ledger, graph) -> None:
        captured = self.captured(ledger, graph(), 10)
        ledger.phase = "eval"
        captured.replay()
        assert sent(ledger, "eval") == (3, 30, 60)
        assert sent(ledger) == (1, 5, 7)


class TestAudit:
    @pytest.fixture
    def audit(self):
        audit = BackendAudit(counting(), dict)
        audit.start()
        yield audit
        audit.stop()

    @pytest.fixture
    def captured(self, audit, graph) -> Graph:
        """A graph that sends 10 bytes."""
        captured = graph()
        captured.capture_begin()
        audit._count("group", "all_to_all", True, 10)
        captured.capture_end()
        return captured

    def test_a_capture_sends_nothing(self, audit, captured) -> None:
        assert not audit.given

    def test_a_replay_is_counted(self, audit, captured) -> None:
        captured.replay()
        assert audit.given == {("group", "all_to_all", True): 10}

    def test_after_the_audit_replays_count_for_nothing(self, audit, captured) -> None:
        captured.replay()
        audit.stop()
        captured.replay()
        assert audit.given == {("group", "all_to_all", True): 10}


class TestMeter:
    @pytest.fixture
    def run(self) -> SimpleNamespace:
        """A run in its last iteration before a log, where the meter measures."""
        return SimpleNamespace(iteration=9)

    @pytest.fixture
    def policy(self, run) -> Policy:
        policy = Policy({}, counting(), lambda: run.iteration, meter=ErrorMeter(interval=10))
        policy.meter.also_first = True
        return policy

    def test_it_is_off_in_a_capture(self, policy, graph) -> None:
        captured = graph()
        captured.capture_begin()
        assert not policy.measures("fc1", "tp.forward")
        captured.capture_end()

    def test_with_graphs_it_measures_the_first_message_too(self, run, policy) -> None:
        """The last iteration of an interval may be a replay, in which nothing is measured."""
        measured = []
        for iteration in (0, 0, 1, 9, 9):
            run.iteration = iteration
            measured.append(policy.measures("fc1", "tp.forward"))
        assert measured == [True, False, False, True, False]


class Wrapper:
    """In place of megatron-core's ``FullCudaGraphWrapper``, whose graphs belong to the class."""

    def __init__(self, warm_up: int) -> None:
        self.cuda_graph_warmup_steps = warm_up
        self.curr_iteration = dict.fromkeys(("training", "validation"), 0)
        self.cuda_graph = dict.fromkeys(("training", "validation"))

    def reset_cuda_graph(self) -> None:
        for stage in self.cuda_graph:
            self.cuda_graph[stage] = None
            self.curr_iteration[stage] = 0

    def __call__(
        self, forward_only: bool, num_microbatches: int, force_all_reduce: bool = False
    ) -> str:
        stage = "validation" if forward_only else "training"
        done = "eager"
        if self.curr_iteration[stage] == self.cuda_graph_warmup_steps:
            assert self.cuda_graph[stage] is None
            self.cuda_graph[stage] = "graph"
            done = "capture"
        elif self.cuda_graph[stage]:
            done = "replay"
        self.curr_iteration[stage] += 1
        return done


NEVER = 99
"""An iteration after the last one."""


def train(
    warm_up: int,
    iterations: int,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: tuple[int, ...] = (),
    bound: float | None = None,
    grows: int = NEVER,
    saves: int = NEVER,
    measures_from: int = 0,
    **rule,
) -> list[str]:
    """Return what each iteration was: e(ager), c(apture) or r(eplay), an evaluation's in capitals.

    Args:
        warm_up: eager iterations before the capture.
        iterations: how many there are.
        monkeypatch: puts the stand-ins in place.
        evaluate: iterations after which the model is evaluated.
        bound: the error bound; its meter measures every fourth iteration and is over it in 7.
        grows: from this iteration on there are more micro-batches.
        saves: in this iteration Megatron saves gradients, for which it reduces all of them.
        measures_from: the iteration in which the meter begins.
        rule: of tensor parallelism's forward messages, besides its codec.
    """
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = SimpleNamespace(iteration=0)
    ledger = Ledger()
    meter = ErrorMeter(bound, interval=4)
    rules = {"tp.forward": Rule(parse_codec("int6"), **rule)}
    policy = Policy(rules, ledger, lambda: clock.iteration, meter=meter)
    # The patch replaces ``__call__`` of the class, so each test has a class of its own.
    wrapper = type("Patched", (Wrapper,), {"__call__": Wrapper.__call__})
    monkeypatch.setattr(full_cuda_graph, "FullCudaGraphWrapper", wrapper)
    run = Run(policy, ledger)
    follower = graphs.WholeIterations(run, lambda line: None)
    run.session = SimpleNamespace(run=run, whole_iterations=follower)
    running.open_run(run)
    loop.around_whole_iterations()
    passes = wrapper(warm_up)
    history = []
    for iteration in range(iterations):
        clock.iteration = iteration
        meter.interval = 4 if iteration >= measures_from else 0
        done = passes(
            forward_only=False,
            num_microbatches=8 if iteration >= grows else 4,
            force_all_reduce=iteration == saves,
        )[0]
        if iteration in evaluate:
            done += passes(forward_only=True, num_microbatches=4)[0].upper()
        if bound is not None and iteration == 7:
            meter.tripped["fc1", "tp.forward"] = 0.5
        history.append(done)
    running.close_run(run)
    return history


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(warm_up=2), "e e c r r r r r r r"),
        # Compression begins: never in a capture, so the graph without it is captured later.
        # One pass without a graph before it, and the warm-up steps of the beginning in any case.
        (dict(warm_up=2, start_iteration=5), "e e c r r e c r r r"),
        (dict(warm_up=2, start_iteration=2), "e e e c r r r r r r"),
        (dict(warm_up=4, start_iteration=1), "e e e e c r r r r r"),
        (dict(warm_up=4, start_iteration=3), "e e e e c r r r r r"),
        (dict(warm_up=4, start_iteration=4), "e e e e e c r r r r"),
        (dict(warm_up=0, start_iteration=5), "e c r r r e c r r r"),
        (dict(warm_up=1, start_iteration=5, evaluate=(1, 2, 3, 6, 7)), "e cE rC rR r e cE rC r r"),
        # Other micro-batches, and gradients that are reduced in full for a file.
        (dict(warm_up=2, grows=5), "e e c r r e c r r r"),
        (dict(warm_up=1, saves=4), "e c r r e e c r r r"),
        # The meter begins, as after the comparison of --compression auto.
        (dict(warm_up=1, measures_from=4), "e c r r e c r r r r"),
        # Under a bound iterations 3 and 7 measure without a graph; 7 switches compression off.
        (dict(warm_up=1, bound=0.1), "e c r e c r r e e c"),
        (dict(warm_up=3, bound=0.1), "e e e e c r r e e c"),
        # A measuring iteration needs both graphs' memory; evaluation's is captured without warm-up.
        (dict(warm_up=1, bound=0.1, evaluate=(0, 1, 2, 4, 5)), "eE cC rR e cC rR r e e c"),
    ],
    ids=str,
)
def test_graphs_of_iterations_are_captured_again_where_a_decision_changes(
    settings, expected, monkeypatch
) -> None:
    assert train(iterations=10, monkeypatch=monkeypatch, **settings) == expected.split()


START = "--compression-start-iteration"
BOUND = ["--compression-error-bound", "0.1"]
TP = ["--tp-compression", "int6"]
CP = ["--cp-compression", "int6"]
EP = ["--ep-compression", "int8"]
PP = ["--pp-compression", "tah-quant"]
DP = ["--dp-compression", "sdp4bit"]
MOE = vars(experts()) | dict(cuda_graph_impl="local", tensor_model_parallel_size=1)
FULL = dict(cuda_graph_impl="full_iteration")
TE = dict(cuda_graph_impl="transformer_engine")
STAGES = dict(pipeline_model_parallel_size=2)
SHARDED = dict(data_parallel_size=2, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    ("flags", "megatron"),
    [
        (TP, {}),
        ([*TP, "--tp-compression-overlap", "halves"], FULL),
        (["--caat-net-sync-fraction", "0.5"], FULL),
        ([*TP, START, "1"], FULL),
        ([*TP, START, "2"], TE),
        ([*DP, START, "9"], SHARDED),
        ([*TP, *BOUND], FULL),
        ([*TP, "--validate-uncompressed"], TE),
        (["--compression", "auto"], {}),
        (["--compression", "auto", START, "9"], SHARDED | dict(tensor_model_parallel_size=1)),
        (CP, dict(context_parallel_size=2)),
        (EP, MOE | dict(cuda_graph_modules=[CudaGraphModule.attn, CudaGraphModule.moe_router])),
        (EP, MOE | FULL | dict(moe_pad_expert_input_to_capacity=True)),
        (PP, STAGES),
        (PP, STAGES | FULL | dict(overlap_p2p_comm=True)),
        (DP, SHARDED | FULL),
    ],
    ids=str,
)
def test_what_graphs_can_hold_is_accepted(flags, megatron) -> None:
    resolve(parsed(*flags, **{"cuda_graph_impl": "local", **megatron}))


REFUSED = [
    (["--tp-compression-overlap", "halves"], {}, "halves calls the modules of two layers in turn"),
    (["--caat-net-sync-fraction", "0.5"], {}, "computes weight gradients in"),
    ([*TP, START, "1"], {}, "-start-iteration 1 begins after the capture"),
    ([*TP, START, "3"], TE, "begins after"),
    ([*TP, *BOUND], {}, "--compression-error-bound decides after the capture"),
    ([*TP, *BOUND], FULL | dict(log_interval=1), "--log-interval 1 measures in every iteration"),
    ([*TP, "--validate-uncompressed"], {}, "evaluation, which replays training's graphs"),
    (EP, MOE, "captures the exchange of experts' tokens"),
    (EP, MOE | dict(cuda_graph_modules=[CudaGraphModule.moe]), "cuda-graph-modules without moe"),
    (EP, MOE | FULL, "give --moe-pad-expert-input-to-capacity, or drop"),
    (PP, STAGES | FULL, "--num-virtual-stages-per-pipeline-rank 2"),
    (
        DP,
        SHARDED | FULL | dict(overlap_param_gather=True),
        "drop --overlap-param-gather, or the weights",
    ),
    (["--dp-compression", "tagc"], SHARDED | FULL, "tagc may keep a state"),
]
"""Flags, arguments of Megatron (graphs of layers if they do not say) and a part of the error."""


@pytest.mark.parametrize(("flags", "megatron", "reason"), REFUSED, ids=str)
def test_what_graphs_cannot_hold_is_refused_in_one_line(flags, megatron, reason) -> None:
    with pytest.raises(CompressionConfigError) as error:
        resolve(parsed(*flags, **{"cuda_graph_impl": "local", **megatron}))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("flags", "megatron", "reason"), REFUSED, ids=str)
def test_without_graphs_the_same_flags_are_accepted(flags, megatron, reason) -> None:
    resolve(parsed(*flags, **megatron | dict(cuda_graph_impl="none")))


@pytest.mark.parametrize(
    ("flags", "megatron", "line"),
    [
        (BOUND, FULL, "the last iteration of each log interval runs without"),
        (["--compression-report", "folder"], FULL, "measured in its first iteration alone"),
        (["--compression-report", "folder"], {}, "tensor parallelism: int6"),
    ],
)
def test_the_log_says_in_which_iterations_errors_are_measured(flags, megatron, line) -> None:
    args = parsed(*TP, *flags, **megatron)
    assert line in "\n".join(resolve(args).describe(args))


@pytest.fixture
def two_sessions():
    """Two runs with graphs of whole iterations; the first is open and has them."""
    sessions = []
    for _ in range(2):
        run = Run(Policy({}, Ledger()), Ledger())
        host = SimpleNamespace(arguments=SimpleNamespace(**FULL), log=print)
        run.session = SimpleNamespace(run=run, host=host, whole_iterations=None)
        sessions.append(run.session)
    running.open_run(sessions[0].run)
    sessions[0].whole_iterations = graphs.follow(sessions[0])
    yield sessions
    running.close_run(sessions[0].run)


def test_a_second_run_with_graphs_of_iterations_is_refused(two_sessions) -> None:
    """megatron-core keeps them on its class, which both runs would share."""
    first, second = two_sessions
    assert first.whole_iterations is not None
    with pytest.raises(CompressionConfigError, match=r"--cuda-graph-impl full_iteration .*local"):
        graphs.follow(second)


def test_a_run_may_have_graphs_of_iterations_after_another_is_closed(two_sessions) -> None:
    first, second = two_sessions
    running.close_run(first.run)
    assert graphs.follow(second) is not None


def test_a_bucket_waits_once_for_gradients_that_a_replay_adds(monkeypatch) -> None:
    """Graphs of layers leave an event on parameters; two of these three have the same one."""
    waited = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter._cudagraph_wgrad_ready_event = "replayed"
    bucket = SimpleNamespace(params_list=parameters, params_with_extra_main_grads=[])
    checks = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False)
    CompressedBucketGroup._prepare_gradients(SimpleNamespace(buckets=[bucket], ddp_config=checks))
    assert waited == ["replayed"]


def test_graphs_are_freed_before_process_groups(graph, monkeypatch) -> None:
    """A group that is destroyed by itself does not end the run; all of them together do."""
    events = []
    monkeypatch.setattr(graph, "reset", lambda self: events.append("reset"))
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group=None: events.append(group)
    )
    ledger = counting()
    captures = [graph(), graph()]
    for captured in captures:
        captured.capture_begin()
        captured.capture_end()
    torch.distributed.destroy_process_group("gloo's")
    torch.distributed.destroy_process_group()
    release_graphs()
    assert events == ["gloo's", "reset", "reset", None]
    assert not ledger.captures.contents


def test_lossless_is_off_in_a_capture(graph) -> None:
    """Nobody could read there whether values fit; so it is in an own loop, too."""
    policy = Policy({"tp.forward": Rule(parse_codec("lossless"))}, counting())
    captured = graph()
    captured.capture_begin()
    decision = policy.decide("tp.forward")
    captured.capture_end()
    assert decision.codec is None
    assert decision.reason == "overflow"
    assert policy.decide("tp.forward").codec
