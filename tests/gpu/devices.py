"""How many ranks the tests over NCCL may start: the devices, or with SHARE_GPUS=1 four on what there is.

    SHARE_GPUS=1 python -m pytest -m multigpu tests/gpu     # one GPU will do

Start NVIDIA's multi-process service (MPS) before, or the ranks take turns.
"""

import os

import torch

_FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICES = max(4, _FOUND) if _FOUND and os.environ.get("SHARE_GPUS") == "1" else _FOUND
