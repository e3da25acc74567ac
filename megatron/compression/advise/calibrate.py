"""Measures the cost model's constants: message curves of a link here, the rest by device_costs.py.

    python -m megatron.compression.advise --measure here.json                  # all links of one host
    torchrun ... -m megatron.compression.advise.calibrate here.json roce       # one between nodes

On GPUs of one host three kinds of link are measured, by NCCL's switches: nvlink (as it is), pcie
(NCCL_P2P_DISABLE=1) and ethernet (NCCL_SHM_DISABLE=1 as well). --measure
writes a file anew, the module alone adds a link.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.advise.cluster import OPERATIONS, Constants
from megatron.compression.advise.device_costs import Clock, codecs, compute, host
from megatron.compression.communication.host_transport import HostTransport
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.transports import Transports, over_tcp
from megatron.compression.errors import InputError, require_folder

LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "pcie": {"NCCL_P2P_DISABLE": "1"},
    "ethernet": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
MIB = (0.0625, 1.0, 8.0, 32.0, 64.0, 128.0)


def measure(path: Path) -> int:
    """Start the ranks, one link after the other; the exit status of the first that fails, else 0.

    Raises: InputError: one GPU, which has no links, or nowhere to write.
    """
    require_folder(path, "--measure")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 1:
        raise InputError("--measure needs two GPUs or more: one has no links; take the constants of an H200")
    path.unlink(missing_ok=True)
    shared = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    for name, environment in LINKS.items() if gpus else [("gloo", {})]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={gpus or 2}",
        ]
        command += ["-m", "megatron.compression.advise.calibrate", str(path), name]
        status = subprocess.run(command, env=shared | environment).returncode
        if status:
            return status
    return 0


def collective(
    operation: str, nbytes: int, groups: list[dist.ProcessGroup], device: torch.device
) -> Callable:
    """A call of one collective whose whole buffer has ``nbytes``, a share of it on each communicator."""
    ranks, rank = groups[0].size(), dist.get_rank()
    size = max(nbytes // 2 // len(groups) // ranks, 1) * ranks
    buffers = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in groups]
    parts = [torch.zeros(size // ranks, dtype=torch.bfloat16, device=device) for _ in groups]
    bytes_, others = [one.view(torch.uint8) for one in buffers], [torch.zeros_like(one) for one in buffers]
    peer = rank ^ 1 if rank ^ 1 < ranks else None

    def start(i: int) -> list:
        group = groups[i]
        if operation == "all_reduce":
            return [dist.all_reduce(buffers[i], group=group, async_op=True)]
        if operation == "all_gather":
            return [dist.all_gather_into_tensor(buffers[i], parts[i], group=group, async_op=True)]
        if operation == "reduce_scatter":
            return [dist.reduce_scatter_tensor(parts[i], buffers[i], group=group, async_op=True)]
        if operation == "all_to_all":
            out = others[i].view(torch.uint8)
            return [dist.all_to_all_single(out, bytes_[i], group=group, async_op=True)]
        if peer is None:
            return []
        pairs = (dist.isend, buffers[i]), (dist.irecv, others[i])
        return dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, group) for kind, tensor in pairs])

    def call() -> None:
        for work in [work for i in range(len(groups)) for work in start(i)]:
            work.wait()

    return call


def copies(operation: str, nbytes: int, transport: HostTransport, device: torch.device) -> Callable:
    """The same of a payload's exchange by copy engines."""
    payload = torch.zeros(
        transport.world_size, nbytes // transport.world_size, dtype=torch.uint8, device=device
    )
    if operation == "all_gather":
        return lambda: transport.all_gather(payload[0])[1].wait()
    return lambda: transport.all_to_all(payload)[1].wait()


def curve(clock: Clock, operation: str, ranks: int, make: Callable[[int], Callable]) -> list[list[float]]:
    """(bytes that a rank sends, microseconds) of the calls that ``make`` makes for some sizes."""
    points = []
    for mib in MIB if clock.cuda else MIB[:2]:
        nbytes = int(mib * 2**20)
        points.append([bytes_sent(operation, nbytes, ranks), round(clock.us(make(nbytes)), 1)])
    return points


def link(clock: Clock, transport: TorchTransport) -> dict:
    """The curves of the default group's link, by operation; with two communicators as well over TCP, and by
    copy engines where payloads take them."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    result = {"ranks": ranks, "curves": {}}
    if over_tcp(world):
        result["tcp"] = True
    more = dist.new_group(list(range(ranks))) if "tcp" in result else None
    for operation in OPERATIONS:
        for suffix, groups in (("", [world]), (" x2", [world, more])):
            if suffix and (more is None or operation == "send"):
                continue
            make = partial(collective, operation, groups=groups, device=clock.device)
            result["curves"][operation + suffix] = curve(clock, operation, ranks, make)
    if isinstance(transport, HostTransport):
        result["copied"] = True
        for operation in ("all_to_all", "all_gather"):
            make = partial(copies, operation, transport=transport, device=clock.device)
            result["curves"][f"{operation} copied"] = curve(clock, operation, ranks, make)
        payload = torch.zeros(ranks, 2**25 // ranks, dtype=torch.uint8, device=clock.device)
        result["copied_loss"] = round(overlap_loss(clock, lambda: transport.all_to_all(payload)[1]), 3)
    buffer = torch.zeros(2**25 if clock.cuda else 2**16, dtype=torch.bfloat16, device=clock.device)
    result["overlap_loss"] = round(overlap_loss(clock, lambda: dist.all_reduce(buffer, async_op=True)), 3)
    return result


def overlap_loss(clock: Clock, start: Callable[[], Any]) -> float:
    """How much of the shorter one comes back where what ``start`` starts and GEMMs run at once."""
    size = 4096 if clock.cuda else 128
    x = torch.randn(size, size, dtype=torch.bfloat16, device=clock.device)
    alone = clock.us(lambda: start().wait())
    count = max(1, round(alone / clock.us(lambda: x @ x)))

    def gemms() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        work = start()
        gemms()
        work.wait()

    computed = clock.us(gemms)
    more = (clock.us(both) - max(alone, computed)) / min(alone, computed)
    return min(max(more, 0.0), 1.0)


def fused_us(clock: Clock, curves: dict, transport: TorchTransport) -> float | None:
    """A fused all-reduce's codec for 2^20 values: what is left of its time after latency and link.

    None: symmetric memory cannot be had.
    """
    from megatron.compression.advise.cluster import _link
    from megatron.compression.codecs import parse_codec
    from megatron.compression.communication.all_reduce import all_reduce

    codec = parse_codec("int8")
    if not transport.fuses(codec):
        return None
    values = 2**25
    x, ranks, known = (
        torch.randn(values, device=clock.device).bfloat16(),
        dist.get_world_size(),
        _link(curves),
    )
    us = clock.us(lambda: all_reduce(x, codec, transport).wait())
    sent = 2 * bytes_sent("all_gather", codec.payload_bytes((values,)), ranks)
    left = us - 0.6 * known.curve("all_reduce")[0][1] - sent / known.bandwidth * 1e3
    return max(left / (values / 2**20), 0.1)


def worker(path: Path, name: str) -> None:
    """One rank of the default group: the link, and everything else where the file is not there yet."""
    from megatron.host import install

    cuda = torch.cuda.is_available()
    if not cuda:
        install()
    clock = Clock()
    data = json.loads(path.read_text()) if path.exists() else None
    dist.barrier()
    transports = Transports()
    transports.prepare([dist.group.WORLD])
    transport = transports.transport(dist.group.WORLD)
    found = link(clock, transport)
    if data is None:
        defaults = Constants.load()
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        costs, launch = codecs(clock)
        data = {"origin": f"measured {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"}
        data["device"] = torch.cuda.get_device_name() if cuda else "CPU"
        data |= compute(clock) | host(clock, transport)
        data |= {"codecs": costs, "launch_us": launch, "iteration_ms": defaults.iteration_ms}
        data |= {"fused_us": defaults.fused_us, "links": {}}
    fused = fused_us(clock, found, transport) if cuda and "tcp" not in found else None
    if fused is not None:
        data["fused_us"], found["fused"] = round(fused, 3), True
    data["links"][name] = found
    if dist.get_rank() == 0:
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"{name}: {found['ranks']} ranks, {path}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) != 3 or "RANK" not in os.environ:
        sys.exit("error: usage: torchrun ... -m megatron.compression.advise.calibrate FILE LINK")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    worker(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
