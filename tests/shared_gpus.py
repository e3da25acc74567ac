"""Several ranks on one GPU: losses and bytes of a run of four ranks on one or two GPUs.

torchrun --nproc-per-node 4 tests/shared_gpus.py pretrain_gpt.py <its flags>

Times mean nothing: NCCL goes over TCP sockets between ranks of one GPU. Start NVIDIA's
multi-process service (MPS) before, or the ranks alternate on the GPU.
"""

import os
import runpy
import socket
import sys
from pathlib import Path

import torch


def share_gpus(local_rank: int, local_ranks: int, devices: int) -> int:
    """Return the device of a rank; NCCL then takes ranks of one device for several hosts.

    NCCL refuses two ranks of one host on one device. It tells hosts apart by NCCL_HOSTID, which is
    set here, so this must be called before the first process group is made.

    Args:
        local_rank: rank in this host.
        local_ranks: how many ranks this host has.
        devices: how many GPUs it has; ranks i, i + devices, ... share device i.
    """
    if local_ranks > devices:
        boot = Path("/proc/sys/kernel/random/boot_id")  # unlike names, unique a host
        host = boot.read_text().strip() if boot.exists() else socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{host}-{local_rank // devices}"
    return local_rank % devices


if __name__ == "__main__":
    if devices := torch.cuda.device_count():
        local_rank = int(os.environ["LOCAL_RANK"])
        local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ["LOCAL_RANK"] = str(share_gpus(local_rank, local_ranks, devices))
    # The script runs as if it had been started itself: its own flags, the repository importable.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_path(sys.argv[0], run_name="__main__")
