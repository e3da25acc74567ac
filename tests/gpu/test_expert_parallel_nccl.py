"""Mixtures of experts on two CUDA devices over NCCL: Triton kernels, real streams, whole runs."""

from pathlib import Path

import pytest

from tests.distributed.spawn import spawned
from tests.distributed.test_expert_layers import (
    CODECS,
    GATHERED,
    PADDED,
    SHARED,
    check_counts,
    layers_worker,
)
from tests.distributed.transport_audit import total_of
from tests.gpu.devices import needs, needs_transformer_engine
from tests.gpu.training import losses, train

LAYOUTS = {
    "expert 2": ((1, 1, 2), SHARED),
    "expert 2, padded, shared beside": (
        (1, 1, 2),
        dict(SHARED, **PADDED, moe_shared_expert_overlap=True),
    ),
    "expert 2, gathered": ((1, 1, 2), GATHERED),
    "tensor 2, whole experts": ((2, 1, 2), SHARED),
    "tensor 2, shared experts": ((2, 2, 1), dict(SHARED, moe_shared_expert_overlap=True)),
    "expert 2, some without a token": (
        (1, 1, 2),
        dict(moe_router_topk=1, moe_router_pre_softmax=True),
    ),
}
TRAINED = """--hidden-size 256 --num-experts 8 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 128 --disable-bias-linear --swiglu
    --normalization RMSNorm --bf16 --expert-model-parallel-size 2 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --train-iters 20 --lr-decay-iters 20"""
OVERLAP = "--overlap-moe-expert-parallel-comm --global-batch-size 12"

pytestmark = [pytest.mark.multigpu, needs(2)]


ranks = spawned(layers_worker, 2, LAYOUTS, backend="nccl", timeout=400)
"""Results of each of two ranks, as on CPUs."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_bytes(ranks: list[dict], layout: str) -> None:
    """Identity computes what megatron-core does, but for a last bit that atomics may change.

    The ledger counts every byte.
    """
    for rank in ranks:
        assert rank[layout]["identity"] < 1e-6
        assert 0 < rank[layout]["int8:group=64"] < 0.05
        check_counts(rank[layout]["counted"])
        assert all(total_of(rows) for _, rows in rank[layout]["counted"].values())
        assert set(rank[layout]["counted"]) == set(CODECS)


@pytest.mark.parametrize(
    "layers",
    [
        "--transformer-impl local",
        f"--transformer-impl local {OVERLAP}",
        *(
            pytest.param(
                f"--transformer-impl transformer_engine --moe-grouped-gemm {more}",
                marks=needs_transformer_engine,
            )
            for more in ("", f"{OVERLAP} --delay-wgrad-compute")
        ),
    ],
)
def test_whole_runs(tmp_path: Path, layers: str) -> None:
    """Tokens, gradients and weights are compressed for 20 iterations; losses stay near.

    On CPUs they were within 0.5 %: the router's choices turn small differences into larger ones.
    """
    plain = _losses(tmp_path / "plain", *layers.split())
    codecs = ("--ep-compression", "int8", "--dp-compression", "sdp4bit")
    assert _losses(tmp_path / "int8", *layers.split(), *codecs) == pytest.approx(plain, rel=0.01)
    int6 = _losses(tmp_path / "int6", *layers.split(), "--ep-compression", "int6")
    assert int6 == pytest.approx(plain, rel=0.01)


def _losses(report: Path, *flags: str) -> dict[int, float]:
    streams = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # one queue would serialise them
    return losses(train(*TRAINED.split(), *flags, processes=2, report=report, **streams))
