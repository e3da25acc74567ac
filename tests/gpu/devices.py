"""Numbers of ranks that the tests over NCCL may start: the devices, or with SHARE_GPUS=1 four.

    SHARE_GPUS=1 python -m pytest -m multigpu tests/gpu     # one GPU will do

Start NVIDIA's multi-process service (MPS) before, or the ranks take turns.
"""

import importlib.util
import os

import pytest
import torch

PRESENT = torch.cuda.device_count() if torch.cuda.is_available() else 0
"""Devices of this machine."""


def shared_devices() -> int:
    """Ranks that may run, several of them on one device if SHARE_GPUS=1."""
    if PRESENT and os.environ.get("SHARE_GPUS") == "1":
        return max(4, PRESENT)
    return PRESENT


DEVICES = shared_devices()


def needs(devices: int, shared: bool = True) -> pytest.MarkDecorator:
    """Skip where there are fewer devices; ``shared``: ranks may share a device."""
    if shared:
        return pytest.mark.skipif(DEVICES < devices, reason=f"needs {devices} CUDA devices")
    reason = f"needs {devices} CUDA devices, none of them shared"
    return pytest.mark.skipif(PRESENT < devices, reason=reason)


WORLD_SIZES = [pytest.param(n, marks=needs(n)) for n in (2, 4)]
"""Numbers of ranks, as parameters of a test."""
UNSHARED = [pytest.param(n, marks=needs(n, shared=False)) for n in (2, 4)]
"""The same for tests whose ranks cannot share a device."""
needs_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs Transformer Engine: scripts/setup.sh --with-transformer-engine",
)
