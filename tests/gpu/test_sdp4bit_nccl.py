"""SDP4Bit's training tests again, on CUDA devices over NCCL: the Triton kernels and real streams."""

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import identity_worker
from tests.distributed.test_data_parallel_nodes import four_ranks_worker
from tests.distributed.test_sdp4bit import check_bytes, replica_worker
from tests.gpu.devices import DEVICES

pytestmark = pytest.mark.multigpu


def _needs(devices: int):
    return pytest.mark.skipif(devices > DEVICES, reason=f"needs {devices} CUDA devices")


@_needs(2)
def test_an_exact_codec_changes_nothing() -> None:
    """The hooks alone leave two ranks' weights as they are, to the bit."""
    for results in spawn(identity_worker, 2, backend="nccl"):
        for name, (plain, hooked, _) in results.items():
            assert plain == hooked, name


@_needs(4)
def test_replicas_stay_identical() -> None:
    """Four ranks, 50 iterations with overlap, and plain DDP."""
    for (first, last), (plain_first, plain_last) in spawn(replica_worker, 4, backend="nccl"):
        assert last < first - 1.0 and plain_last < plain_first - 0.3


@_needs(4)
def test_two_nodes() -> None:
    """Two nodes of two ranks: training, bytes, state."""
    for results in spawn(four_ranks_worker, 4, backend="nccl"):
        check_bytes(results)
