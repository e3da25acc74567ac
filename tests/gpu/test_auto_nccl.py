"""--compression auto over NCCL: candidates can be timed; a run decides and checks itself."""

import pytest

from tests.distributed import test_auto
from tests.distributed.spawn import spawned
from tests.gpu.devices import needs
from tests.gpu.training import train

pytestmark = [pytest.mark.multigpu, needs(2)]


timings = spawned(test_auto.timing_worker, 2, backend="nccl", timeout=240)
"""Results by rank, as on CPUs."""


def test_every_candidate_can_be_timed(timings: list[dict]) -> None:
    test_auto.test_every_candidate_can_be_timed(timings)


def test_largest_value_is_that_of_all_ranks(timings: list[dict]) -> None:
    test_auto.test_largest_value_is_that_of_all_ranks(timings)


def test_unequal_tokens_arrive(timings: list[dict]) -> None:
    test_auto.test_unequal_tokens_arrive_uncompressed_exactly_and_nearly_through_codecs(timings)


def test_links_are_described(timings: list[dict]) -> None:
    test_auto.test_links_are_described_by_their_speed(timings)
    test_auto.test_messages_between_optimizer_instances_are_described_by_size(timings)


def test_timings_leave_the_random_state(timings: list[dict]) -> None:
    test_auto.test_timings_leave_the_random_state(timings)


MODEL = """--hidden-size 2048 --seq-length 1024 --max-position-embeddings 1024 --bf16
    --use-distributed-optimizer --train-iters 32"""
EXPERTS = """--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2
    --disable-bias-linear --moe-token-dispatcher-type alltoall --dp-compression none"""
CONTEXT = "--context-parallel-size 2 --transformer-impl local --dp-compression none"


@pytest.mark.parametrize(
    ("layout", "dimensions"),
    [
        ("--tensor-model-parallel-size 2 --micro-batch-size 1", ["tensor_parallel"]),
        ("--pipeline-model-parallel-size 2", ["pipeline_parallel"]),
        ("", ["data_parallel"]),
        (EXPERTS, ["data_parallel", "expert_parallel"]),
        (CONTEXT, ["data_parallel", "context_parallel"]),
    ],
)
def test_a_run_decides_and_goes_on(tmp_path, layout: str, dimensions: list[str]) -> None:
    """Messages go through host memory; the choice has been checked after 28 iterations at most."""
    flags = (*layout.split(), *MODEL.split(), "--compression", "auto")
    report = train(*flags, processes=2, report=tmp_path / "report", NCCL_P2P_DISABLE="1")
    auto = report["settings"]["auto"]
    print("\n".join(auto["table"]))
    choices = auto["dimensions"]
    assert auto["checked"] or not any(choice["chosen"] for choice in choices)
    assert [choice["dimension"] for choice in choices] == dimensions


IN_HALVES = """--tensor-model-parallel-size 2 --transformer-impl local --attention-dropout 0
    --micro-batch-size 2 --global-batch-size 4"""
GRAPH = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"


@pytest.mark.parametrize(
    ("graph", "iterations"), [(GRAPH, 4 + 6 * 8), ("", 4 + 2 * 6 * 4)], ids=["graph", "eager"]
)
def test_halves_are_compared_with_the_usual_schedule(tmp_path, graph: str, iterations: int) -> None:
    """Over host memory, with a capture for each schedule in the graph; losses stay finite."""
    flags = [*MODEL.split(), *IN_HALVES.split(), *graph.split(), "--compression", "auto"]
    flags += ["--dp-compression", "none", "--train-iters", str(iterations + 2)]
    report = train(*flags, processes=2, report=tmp_path / "report", NCCL_P2P_DISABLE="1")
    auto = report["settings"]["auto"]
    print("\n".join(auto["table"]), auto["cost_iterations"])
    assert auto["checked"]
    assert auto["cost_iterations"] > 0
    overlap = report["settings"]["compression"]["tensor_parallel"]["overlap"]
    assert (overlap == "halves") == auto["halves"]
