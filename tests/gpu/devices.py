"""How many ranks the tests over NCCL may start: the devices, or with SHARE_GPUS=1 four on what there is.

    SHARE_GPUS=1 python -m pytest -m multigpu tests/gpu     # one GPU will do

Start NVIDIA's multi-process service (MPS) before, or the ranks take turns.
"""

import importlib.util
import os

import pytest
import torch

FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICES = max(4, FOUND) if FOUND and os.environ.get("SHARE_GPUS") == "1" else FOUND


def needs(devices: int, shared: bool = True) -> pytest.MarkDecorator:
    """Skip where there are fewer devices; ``shared``: ranks may share one."""
    reason = f"needs {devices} CUDA devices" + ("" if shared else ", none of them shared")
    return pytest.mark.skipif((DEVICES if shared else FOUND) < devices, reason=reason)


WORLD_SIZES = [pytest.param(n, marks=needs(n)) for n in (2, 4)]
UNSHARED = [pytest.param(n, marks=needs(n, shared=False)) for n in (2, 4)]
needs_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs Transformer Engine: scripts/setup.sh --with-transformer-engine",
)
