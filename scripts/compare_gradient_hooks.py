"""SDP4Bit's gradient sum beside torch's DDP hooks and torchft's, on the same gradients: error, bytes, time.

    torchrun --nproc-per-node 4 scripts/compare_gradient_hooks.py
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --nproc-per-node 4 scripts/compare_gradient_hooks.py

Gradients are those of a small GPT on its own tokens, different on each rank, taken after a few steps of
training; --copies repeats them up to the size of a real bucket for the timing. Every method averages the same
bucket over all ranks: the error is relative to the fp64 average, of one call. PowerSGD and error feedback
make up for theirs over calls: the second error is of the mean of ten calls on the same gradients. Bytes are
what one rank sends, as c10d was given it (PowerSGD: as it counts itself). Our sums are whole all-reduces
here, as under plain DDP; the distributed optimizer needs their first half only. torchft's quantised
all-reduce (fp8, a scale a row, here of 1024 values) is in the table where torchft is installed and on GPUs.
"""

import argparse
import datetime
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

try:
    from torchft.collectives import allreduce_quantized
except ImportError:
    allreduce_quantized = None

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from megatron.compression.communication.ledger import Ledger, bytes_sent  # noqa: E402
from megatron.compression.data_parallel.bucket import GradientBucket, ParameterSpan  # noqa: E402
from megatron.compression.data_parallel.codecs import data_parallel_codecs  # noqa: E402
from megatron.compression.data_parallel.config import DataParallelCompression  # noqa: E402
from megatron.compression.data_parallel.topology import find_topology  # noqa: E402

ON = {"dp_compression": "sdp4bit", "quantized_gradients": True}
OURS = {
    "sdp4bit, one node": ON,
    "sdp4bit, nodes of 1": {**ON, "dp_intra_node_size": 1},
    "sdp4bit, nodes of 2": {**ON, "dp_intra_node_size": 2},
    "sdp4bit, nodes of 1, fp32 feedback": {**ON, "dp_intra_node_size": 1, "dp_error_feedback": "fp32"},
    "tagc, sketch": {"dp_compression": "tagc", "tagc_wire": "sketch"},
    "tagc, packed": {"dp_compression": "tagc"},
    "tagc, packed, sparsity 0.95": {"dp_compression": "tagc", "tagc_sparsity": 0.95},
    "plain int4, nodes of 1": {**ON, "dp_intra_node_size": 1, "hadamard_transform": False},
}


def gradients_of_a_model(device: torch.device, rank: int, steps: int) -> list[torch.Tensor]:
    """fp32 gradients, by parameter, of a small transformer language model after ``steps`` steps."""
    torch.manual_seed(0)
    width, vocabulary, length = 256, 512, 128
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(width, vocabulary),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps + 1):
        first = torch.randint(0, vocabulary, (8, 1), generator=generator)
        tokens = [first]
        for _ in range(length):
            noise = torch.randint(0, 7, (8, 1), generator=generator)
            tokens.append((5 * tokens[-1] + noise) % vocabulary)
        tokens = torch.cat(tokens, dim=1).to(device)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step < steps:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


class Bucket:
    """What a DDP communication hook is given: torch's GradBucket cannot be built by hand."""

    def __init__(self, gradients: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._buffer = torch.cat([g.reshape(-1).to(dtype) for g in gradients])
        self._shapes = [g.shape for g in gradients]

    def buffer(self) -> torch.Tensor:
        """Flat."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace it."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views by parameter."""
        sizes = [shape.numel() for shape in self._shapes]
        return [part.view(s) for part, s in zip(self._buffer.split(sizes), self._shapes, strict=True)]

    def index(self) -> int:
        """The only bucket."""
        return 0

    def is_last(self) -> bool:
        """The only bucket."""
        return True


def hooks():
    """Torch's hooks by name: each takes a bucket and returns the averaged buffer."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    def powersgd_of(rank: int):
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        state.iter = 2  # past its uncompressed warm-up

        def call(bucket: Bucket) -> torch.Tensor:
            return powersgd.powerSGD_hook(state, bucket).wait()

        # It communicates from callbacks on other threads, where nobody counts; it counts itself.
        call.share_sent = lambda: state.total_numel_after_compression / state.total_numel_before_compression
        return call

    def torchft(bucket: Bucket) -> torch.Tensor:
        flat, columns = bucket.buffer(), 1024
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % columns)).view(-1, columns)
        stream = torch.cuda.current_stream()
        allreduce_quantized([rows], dist.ReduceOp.AVG, dist.group.WORLD, stream).wait()
        return rows.view(-1)[: flat.numel()]

    methods = {
        "torch all-reduce": lambda: lambda bucket: default_hooks.allreduce_hook(None, bucket).wait(),
        "torch fp16 hook": lambda: lambda bucket: default_hooks.fp16_compress_hook(None, bucket).wait(),
        "torch PowerSGD, rank 4": lambda: powersgd_of(4),
        "torch PowerSGD, rank 32": lambda: powersgd_of(32),
    }
    if allreduce_quantized is not None and dist.get_backend() == "nccl":
        methods["torchft allreduce_quantized, fp8"] = lambda: torchft
    return methods


def ours(settings: dict):
    """The same for SDP4Bit's all-reduce."""
    config = DataParallelCompression(**settings)
    topology = find_topology(dist.group.WORLD, config.dp_intra_node_size)
    factory, _ = data_parallel_codecs(config)
    held = {}

    def call(bucket: Bucket) -> torch.Tensor:
        buffer = bucket.buffer()
        if buffer.data_ptr() not in held:
            # TAGC goes by name and shape: all of it one matrix
            whole = ParameterSpan("layer.mlp.weight", torch.empty(1, 1), 0, buffer.numel())
            view = GradientBucket(buffer, (whole,), 1 / topology.world_size, False, topology, Ledger())
            held.clear()
            held[buffer.data_ptr()] = factory(view)
        held[buffer.data_ptr()].start().wait()
        return buffer

    return call


class Counted:
    """Counts the bytes that one rank gives to c10d inside the ``with`` block."""

    def __enter__(self) -> "Counted":
        from tests.distributed.transport_audit import TransportAudit

        self.audit = TransportAudit()
        self.audit.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.audit.__exit__(*error)
        self.sent = sum(self.audit.sent.values())


def measure(name: str, make, gradients, copies: int, dtype, device, repeats: int) -> dict:
    """A row of the table."""
    exact = torch.cat([g.reshape(-1).to(dtype).double() for g in gradients])
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    call, total = make(), torch.zeros_like(exact)
    bucket = Bucket(gradients, dtype)
    flat = bucket.buffer().clone()
    first = None
    for _ in range(10):
        bucket.buffer().copy_(flat)
        with Counted() as counted:
            result = call(bucket).double()
        first = result if first is None else first
        total += result / 10
    norm = exact.norm()
    bits = 8 * counted.sent / bytes_sent("all_reduce", exact.numel(), dist.get_world_size())
    if hasattr(call, "share_sent"):
        bits = 8 * dtype.itemsize * call.share_sent()
    many = Bucket(gradients * copies, dtype)
    call = make()
    times = []
    for repeat in range(repeats + 2):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        call(many)
        synchronize(device)
        if repeat >= 2:
            times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "method": name,
        "error": float((first - exact).norm() / norm),
        "mean of 10": float((total - exact).norm() / norm),
        "bits": bits,
        "ms": 1e3 * float(slowest),
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Compare all methods and print the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=int, help="default: 32 (60 M values) on GPUs, 1 on CPUs")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the gradients")
    parser.add_argument("--steps", type=int, default=20, help="of training before the gradients are taken")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--pieces", type=int, nargs="*", default=[], help="sdp4bit's rows also in so many pieces"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 4 scripts/compare_gradient_hooks.py")
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=datetime.timedelta(minutes=5))
    gradients = gradients_of_a_model(device, dist.get_rank(), options.steps)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    copies = options.copies or (32 if gpus else 1)
    methods = hooks()
    pieces = {
        f"{name}, pipeline {n}": {**settings, "gradient_alltoall_pipeline": n}
        for name, settings in OURS.items()
        if settings["dp_compression"] == "sdp4bit"
        for n in options.pieces
    }
    for name, settings in {**OURS, **pieces}.items():
        size = settings.get("dp_intra_node_size", 1)
        if dist.get_world_size() % size == 0 and (size == 1 or size < dist.get_world_size()):
            methods[name] = lambda settings=settings: ours(settings)
    numel = sum(g.numel() for g in gradients)
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if gpus else "CPU, gloo"
        print(
            f"{dist.get_world_size()} ranks, {where}; {numel / 1e6:.2f} M {options.dtype} gradients, "
            f"timed on {copies * numel / 1e6:.1f} M"
        )
        print(
            "| method | error, one call | error, mean of 10 | bits a value sent | ms |\n|---|---|---|---|---|"
        )
    for name, make in methods.items():
        if dtype == torch.bfloat16 and "PowerSGD" in name:
            continue  # its orthogonalisation has no bf16
        try:
            row = measure(name, make, gradients, copies, dtype, device, options.repeats)
        except Exception as error:
            if name in OURS or name in pieces:
                raise
            if dist.get_rank() == 0:
                print(f"| {name} | failed: {type(error).__name__}: {str(error)[:300]!r} | | | |", flush=True)
            continue
        if dist.get_rank() == 0:
            print(
                f"| {name} | {row['error']:.5f} | {row['mean of 10']:.5f} | {row['bits']:.2f} | "
                f"{row['ms']:.2f} |",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
