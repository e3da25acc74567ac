"""Several ranks on one GPU: the losses and bytes of a run of four ranks where there are one or two GPUs."""

import os
import socket
from argparse import Namespace
from pathlib import Path

import torch

from megatron.compression.errors import InputError

HELP = (
    "Let several ranks of a host share a GPU where it has fewer GPUs than ranks. Losses and bytes are those "
    "of as many GPUs; times mean nothing: NCCL goes over TCP sockets between ranks of one GPU. Start "
    "NVIDIA's multi-process service (MPS) before, or the ranks take turns on the GPU."
)


def share_gpus(local_rank: int, local_ranks: int, devices: int) -> int:
    """Choose the device of a rank, and make NCCL take ranks of one device for ranks of several hosts.

    NCCL refuses two ranks of one host on one device. It tells hosts apart by NCCL_HOSTID, which is set here,
    so this must be called before the first process group is made. Ranks i, i + devices, ... share device i.

    Returns: the device's index.
    """
    if local_ranks > devices:
        boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may have one name
        host = boot.read_text().strip() if boot.exists() else socket.gethostname()
        os.environ["NCCL_HOSTID"] = f"{host}-{local_rank // devices}"
    return local_rank % devices


def share_gpus_if_asked(args: Namespace) -> list[str]:
    """``--share-gpus``: change Megatron's ``args.local_rank``, the device that it takes.

    Returns: a line for the log, or none where nothing changes.
    Raises: InputError where it is asked for and nobody says how many ranks the host has.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not args.share_gpus or not devices:
        return []
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise InputError(
            "--share-gpus needs LOCAL_WORLD_SIZE, the ranks of this host: start with torchrun, or set it"
        )
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_ranks <= devices:
        return []
    args.local_rank = share_gpus(args.local_rank, local_ranks, devices)
    return [f"--share-gpus: {local_ranks} ranks on {devices} GPUs; times mean nothing"]
