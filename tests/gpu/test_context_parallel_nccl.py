"""Compressed keys and values between CUDA devices: over NCCL, and over symmetric memory if there is any."""

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.test_context_parallel import attention_worker, check_ranks
from tests.gpu.devices import DEVICES

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(DEVICES < 2, reason="needs 2 CUDA devices"),
]


def test_two_devices_compute_what_one_does() -> None:
    """As on the CPU; and every transport gives the same bits."""
    found = {}
    for transport in ("collective", "auto"):
        found[transport] = spawn(attention_worker, 2, transport, backend="nccl")
        check_ranks(found[transport])
    for one, other in zip(*found.values(), strict=True):
        for spec in ("lossless", "int8"):
            assert all(map(torch.equal, one["bits"][spec][0], other["bits"][spec][0])), spec
