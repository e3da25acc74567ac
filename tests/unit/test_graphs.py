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


def _sent(ledger: Ledger, phase: str = "train") -> list[tuple[int, int, int]]:
    return [
        (row["calls"], row["sent_bytes"], row["plain_bytes"])
        for row in ledger.rows()
        if row["phase"] == phase
    ]


def test_a_capture_is_counted_at_each_replay_in_its_phase(graph) -> None:
    ledger, one, other = counting(), graph(), graph()
    ledger.record(*SENT, sent=5, uncompressed=7)
    for captured, size in ((one, 10), (other, 100)):
        captured.capture_begin()
        for _ in range(3):
            ledger.record(*SENT, sent=size, uncompressed=2 * size)
        captured.capture_end()
    assert _sent(ledger) == [(1, 5, 7)], "a capture sends nothing"
    one.replay()
    other.replay()
    other.replay()
    assert _sent(ledger) == [(10, 5 + 30 + 600, 7 + 60 + 1200)]
    ledger.evaluating = True
    one.replay()
    assert _sent(ledger, "eval") == [(3, 30, 60)] and _sent(ledger)[0][0] == 10


def test_the_audit_follows_replays(graph) -> None:
    """While it runs; afterwards replays count for nothing."""
    audit, replayed = BackendAudit(counting(), dict), graph()
    audit.start()
    replayed.capture_begin()
    audit._count("group", "all_to_all", True, 10)
    replayed.capture_end()
    assert not audit.given
    replayed.replay()
    audit.stop()
    replayed.replay()
    assert audit.given == {("group", "all_to_all", True): 10}


def test_the_meter_is_off_in_a_capture(graph) -> None:
    """With graphs it measures the first message too, since the last of an interval may be in a replay."""
    now, captured = SimpleNamespace(iteration=9), graph()
    policy = Policy({}, counting(), lambda: now.iteration, meter=ErrorMeter(interval=10))
    policy.meter.also_first = True
    captured.capture_begin()
    assert not policy.measures("fc1", "tp.forward")
    captured.capture_end()
    measured = []
    for now.iteration in (0, 0, 1, 9, 9):
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
            self.cuda_graph[stage], self.curr_iteration[stage] = None, 0

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


def _training(
    warm_up: int,
    iterations: int,
    monkeypatch,
    evaluate=(),
    bound=None,
    grows=99,
    saves=99,
    begins=0,
    **rule,
) -> list[str]:
    """First letters of what each iteration did, an evaluation's after it in capitals. From ``grows`` on there
    are more micro-batches; in ``saves`` Megatron saves gradients, which are reduced in full for it. Errors
    are measured when that ``begins``."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    now, ledger = SimpleNamespace(iteration=0), Ledger()
    meter = ErrorMeter(bound, interval=4)
    rules = {"tp.forward": Rule(parse_codec("int6"), **rule)}
    policy = Policy(rules, ledger, lambda: now.iteration, meter=meter)
    wrapper = type(
        "Patched", (Wrapper,), {"__call__": Wrapper.__call__}
    )  # each test patches its own
    monkeypatch.setattr(full_cuda_graph, "FullCudaGraphWrapper", wrapper)
    run = Run(policy, ledger)
    follower = graphs.WholeIterations(run, lambda line: None)
    run.session = SimpleNamespace(run=run, whole_iterations=follower)
    running.open_run(run)
    loop.around_whole_iterations()
    passes = wrapper(warm_up)
    done = []
    for now.iteration in range(iterations):
        meter.interval = 4 if now.iteration >= begins else 0
        given = dict(num_microbatches=8 if now.iteration >= grows else 4)
        did = passes(forward_only=False, **given, force_all_reduce=now.iteration == saves)[0]
        if now.iteration in evaluate:
            did += passes(forward_only=True, num_microbatches=4)[0].upper()
        if bound is not None and now.iteration == 7:
            meter.tripped["fc1", "tp.forward"] = 0.5
        done.append(did)
    return done


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(warm_up=2), "e e c r r r r r r r"),
        (dict(warm_up=2, start_iteration=5), "e e c r r e e c r r"),
        (dict(warm_up=2, start_iteration=2), "e e e e c r r r r r"),  # never in a capture first
        (dict(warm_up=0, start_iteration=5), "e c r r r e c r r r"),
        (dict(warm_up=2, grows=5), "e e c r r e e c r r"),
        (dict(warm_up=1, saves=4), "e c r r e e c r r r"),
        (
            dict(warm_up=1, begins=4),
            "e c r r e c r r r r",
        ),  # as after the comparison of --compression auto
        (dict(warm_up=1, start_iteration=5, evaluate=(1, 2, 3, 6, 7)), "e cE rC rR r e cE rC r r"),
        (dict(warm_up=1, bound=0.1), "e c r e c r r e e c"),  # measures, measures and decides
        (dict(warm_up=3, bound=0.1), "e e e e c r r e e e"),
        # A measuring iteration needs the memory of both graphs; evaluation's is captured without warm-up.
        (dict(warm_up=1, bound=0.1, evaluate=(0, 1, 2, 4, 5)), "eE cC rR e cC rR r e e c"),
    ],
    ids=str,
)
def test_graphs_of_iterations_are_captured_again(settings, expected, monkeypatch) -> None:
    """Where a decision changes, in training and in evaluation; what the bound measures runs without one."""
    assert _training(iterations=10, monkeypatch=monkeypatch, **settings) == expected.split()


START, BOUND = "--compression-start-iteration", ["--compression-error-bound", "0.1"]
TP, CP, EP = (
    ["--tp-compression", "int6"],
    ["--cp-compression", "int6"],
    ["--ep-compression", "int8"],
)
PP, DP = ["--pp-compression", "tah-quant"], ["--dp-compression", "sdp4bit"]
MOE = vars(experts()) | dict(cuda_graph_impl="local", tensor_model_parallel_size=1)
FULL, TE = (dict(cuda_graph_impl=kind) for kind in ("full_iteration", "transformer_engine"))
STAGES = dict(pipeline_model_parallel_size=2)
SHARDED = dict(data_parallel_size=2, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    ("flags", "megatron", "reason"),
    [
        (TP, {}, None),
        ([*TP, "--tp-compression-overlap", "halves"], FULL, None),
        (
            ["--tp-compression-overlap", "halves"],
            {},
            "halves calls the modules of two layers in turn",
        ),
        (["--caat-net-sync-fraction", "0.5"], FULL, None),
        (["--caat-net-sync-fraction", "0.5"], {}, "computes weight gradients in"),
        ([*TP, START, "1"], FULL, None),
        ([*TP, START, "1"], {}, "-start-iteration 1 begins after the capture"),
        ([*TP, START, "2"], TE, None),
        ([*TP, START, "3"], TE, "begins after"),
        ([*DP, START, "9"], SHARDED, None),
        ([*TP, *BOUND], {}, "--compression-error-bound decides after the capture"),
        ([*TP, *BOUND], FULL, None),
        ([*TP, "--validate-uncompressed"], {}, "evaluation, which replays training's graphs"),
        ([*TP, "--validate-uncompressed"], TE, None),
        (["--compression", "auto"], {}, None),
        (["--compression", "auto", START, "9"], SHARDED | dict(tensor_model_parallel_size=1), None),
        (
            [*TP, *BOUND],
            FULL | dict(log_interval=1),
            "--log-interval 1 measures in every iteration",
        ),
        (CP, dict(context_parallel_size=2), None),
        (EP, MOE, "captures the exchange of experts' tokens"),
        (
            EP,
            MOE | dict(cuda_graph_modules=[CudaGraphModule.moe]),
            "cuda-graph-modules without moe",
        ),
        (
            EP,
            MOE | dict(cuda_graph_modules=[CudaGraphModule.attn, CudaGraphModule.moe_router]),
            None,
        ),
        (EP, MOE | FULL, "give --moe-pad-expert-input-to-capacity, or drop"),
        (EP, MOE | FULL | dict(moe_pad_expert_input_to_capacity=True), None),
        (PP, STAGES, None),
        (PP, STAGES | FULL, "--num-virtual-stages-per-pipeline-rank 2"),
        (PP, STAGES | FULL | dict(overlap_p2p_comm=True), None),
        (DP, SHARDED | FULL, None),
        (
            DP,
            SHARDED | FULL | dict(overlap_param_gather=True),
            "drop --overlap-param-gather, or the weights",
        ),
        (["--dp-compression", "tagc"], SHARDED | FULL, "tagc may keep a state"),
    ],
    ids=str,
)
def test_what_graphs_hold(flags, megatron, reason) -> None:
    """Refused by kind of graph and module, in one line; without graphs the same flags pass."""
    megatron = {"cuda_graph_impl": "local", **megatron}
    resolve(parsed(*flags, **megatron | dict(cuda_graph_impl="none")))
    if reason is None:
        resolve(parsed(*flags, **megatron))
        return
    with pytest.raises(CompressionConfigError) as error:
        resolve(parsed(*flags, **megatron))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_what_is_measured_is_said() -> None:
    for flags, megatron, line in (
        (BOUND, FULL, "the last iteration of each log interval runs without"),
        (["--compression-report", "folder"], FULL, "measured in its first iteration alone"),
        (["--compression-report", "folder"], {}, "tensor parallelism: int6"),
    ):
        args = parsed(*TP, *flags, **megatron)
        assert any(line in one for one in resolve(args).describe(args))


def test_a_second_run_with_graphs_of_iterations_is_refused() -> None:
    """megatron-core keeps them on its class; the first may be closed, and then the second may have some."""
    sessions = []
    for _ in range(2):
        run = Run(Policy({}, Ledger()), Ledger())
        host = SimpleNamespace(arguments=SimpleNamespace(**FULL), log=print)
        sessions.append(SimpleNamespace(run=run, host=host, whole_iterations=None))
        run.session = sessions[-1]
    first, second = sessions
    running.open_run(first.run)
    first.whole_iterations = graphs.follow(first)
    assert first.whole_iterations is not None
    with pytest.raises(CompressionConfigError, match=r"--cuda-graph-impl full_iteration .*local"):
        graphs.follow(second)
    running.close_run(first.run)
    assert graphs.follow(second) is not None


def test_gradients_that_a_replay_adds_are_waited_for(monkeypatch) -> None:
    """Those of graphs of layers, once an event, before a bucket is reduced compressed."""
    waited = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append)
    )
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter._cudagraph_wgrad_ready_event = "replayed"
    bucket = SimpleNamespace(params_list=parameters, params_with_extra_main_grads=[])
    checks = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False)
    CompressedBucketGroup._prepare_gradients(SimpleNamespace(buckets=[bucket], ddp_config=checks))
    assert waited == ["replayed"]


def test_graphs_are_freed_before_process_groups(graph, monkeypatch) -> None:
    """Whoever destroys them and however the run ends; those of one group alone end no run."""
    done = []
    monkeypatch.setattr(graph, "reset", lambda self: done.append("reset"))
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group=None: done.append(group)
    )
    counted = counting()
    kept = [graph() for _ in range(2)]
    for captured in kept:
        captured.capture_begin()
        captured.capture_end()
    torch.distributed.destroy_process_group("gloo's")
    torch.distributed.destroy_process_group()
    release_graphs()
    assert not counted.captures.contents and done == ["gloo's", "reset", "reset", None]


def test_lossless_is_off_in_a_capture(graph) -> None:
    """Also in a loop of one's own, where nobody could read there whether values fit."""
    policy, captured = Policy({"tp.forward": Rule(parse_codec("lossless"))}, counting()), graph()
    captured.capture_begin()
    inside = policy.decide("tp.forward")
    captured.capture_end()
    assert (inside.codec, inside.reason) == (None, "overflow") and policy.decide("tp.forward").codec
