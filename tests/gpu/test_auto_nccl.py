"""--compression auto over NCCL: every candidate can be timed, and a run decides in time and checks itself."""

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_auto import timing_worker
from tests.gpu.devices import needs
from tests.gpu.training import train

pytestmark = [pytest.mark.multigpu, needs(2)]


def test_every_candidate_can_be_timed() -> None:
    """With kernels and streams, as on CPUs."""
    first, second = spawn(timing_worker, 2, backend="nccl", timeout=240)
    assert first == second and min(first) >= 0


@pytest.mark.parametrize(
    ("layout", "dimensions"),
    [
        ("--tensor-model-parallel-size 2", ["tensor_parallel"]),
        ("--pipeline-model-parallel-size 2", ["pipeline_parallel"]),
        ("", ["data_parallel"]),
        (
            "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
            "--moe-token-dispatcher-type alltoall --dp-compression none",
            ["data_parallel", "expert_parallel"],
        ),
        (
            "--context-parallel-size 2 --transformer-impl local --dp-compression none",
            ["data_parallel", "context_parallel"],
        ),
    ],
)
def test_a_run_decides_and_goes_on(tmp_path, layout: str, dimensions: list[str]) -> None:
    """Through host memory; what was chosen has been checked after 20 iterations."""
    words = (
        *layout.split(),
        *(
            "--hidden-size",
            "2048",
            "--seq-length",
            "1024",
            "--max-position-embeddings",
            "1024",
            "--bf16",
        ),
        *("--use-distributed-optimizer", "--train-iters", "24"),
        *("--compression", "auto"),
    )
    found = train(*words, processes=2, report=tmp_path / "report", NCCL_P2P_DISABLE="1")
    auto = found["settings"]["auto"]
    print("\n".join(auto["table"]))
    assert auto["checked"] or not any(one["chosen"] for one in auto["dimensions"])
    assert [one["dimension"] for one in auto["dimensions"]] == dimensions
