"""Compressed gradient sums beside torch's DDP hooks, on the same gradients: error, bytes, time.

    torchrun --nproc-per-node 4 scripts/compare_gradient_hooks.py
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --nproc-per-node 4 scripts/compare_gradient_hooks.py

Gradients are those of a small GPT on its own tokens, different on each rank, taken after a few steps of
training; --copies repeats them up to the size of a real bucket for the timing. Every method averages the same
bucket over all ranks: the error is relative to the fp64 average, of one call. PowerSGD and error feedback
make up for theirs over calls: the second error is of the mean of ten calls on the same gradients. Bytes are
what one rank sends. Our sums are whole all-reduces here, as under plain DDP; the distributed optimizer needs
their first half only.
"""

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable

import _launch
import torch
import torch.distributed as dist

from megatron.compression import flags
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.topology import find_topology
from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.data_parallel.error_feedback import parse_error_feedback

CODECS = [
    "int8",
    "int6",
    "taco",
    "sdp4bit",
    "sdp4bit --dp-compression-node-size 1",
    "sdp4bit --dp-compression-node-size 1 --dp-error-feedback fp32",
    "sdp4bit:hadamard=off --dp-compression-node-size 1",
    "tagc --dp-error-feedback fp32",
    "tagc:wire=sketch --dp-error-feedback fp32",
]


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
        tokens = [torch.randint(0, vocabulary, (8, 1), generator=generator)]
        for _ in range(length):
            noise = torch.randint(0, 7, (8, 1), generator=generator)
            tokens.append((5 * tokens[-1] + noise) % vocabulary)
        batch = torch.cat(tokens, dim=1).to(device)
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
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


class Hook:
    """One of torch's: the averaged buffer of a bucket, and bits a value that it sends."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        self.dtype, self.state = dtype, None
        self.hook: Callable = default_hooks.allreduce_hook
        self.sent_bits = 8.0 * dtype.itemsize
        if name == "fp16":
            self.hook, self.sent_bits = default_hooks.fp16_compress_hook, 16.0
        elif name != "all-reduce":
            rank = int(name.split()[-1])
            self.state = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.state.iter, self.hook = 2, powersgd.powerSGD_hook  # past its uncompressed warm-up

    def __call__(self, bucket: Bucket) -> torch.Tensor:
        return self.hook(self.state, bucket).wait()

    def bits(self, values: int, calls: int) -> float:
        """Of a value."""
        if self.state is None:
            return self.sent_bits
        share = self.state.total_numel_after_compression / self.state.total_numel_before_compression
        return self.sent_bits * share


class Ours:
    """The same for a setting of ``--dp-compression``."""

    def __init__(self, setting: _launch.Setting, dtype: torch.dtype) -> None:
        args = flags.add_flags(argparse.ArgumentParser()).parse_args(setting.words("data"))
        self.config = DataParallelConfig(
            compression=args.dp_compression,
            error_feedback=args.dp_error_feedback,
            node_size=args.dp_compression_node_size,
        )
        self.topology = find_topology(dist.group.WORLD, self.config.node_size)
        self.ledger, self.held, self.calls = Ledger(), None, 0

    def __call__(self, bucket: Bucket) -> torch.Tensor:
        buffer = bucket.buffer()
        if self.held is None:  # all of it one matrix: TAGC goes by name and shape
            whole = ParameterSpan("layer.mlp.weight", torch.empty(1, 1), 0, buffer.numel())
            view = GradientBucket(
                buffer, (whole,), 1 / self.topology.world_size, False, self.topology, self.ledger
            )
            memory = parse_error_feedback(self.config.feedback)
            self.held = self.config.compressor.build(view, lambda: memory(lambda: self.calls))
        self.calls += 1
        self.held.start().wait()
        return buffer

    def bits(self, values: int, calls: int) -> float:
        """Of a value."""
        sent = sum(pair[0] for pair in self.ledger.totals()["dp.gradient"].values())
        return 8 * sent / calls / bytes_sent("all_reduce", values, self.topology.world_size)


def measure(make: Callable, gradients, copies: int, dtype, device, repeats: int) -> list[str]:
    """Errors of one call and of the mean of ten, bits a value, milliseconds: cells of the table."""
    exact = torch.cat([g.reshape(-1).to(dtype).double() for g in gradients])
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    call, total, first = make(), torch.zeros_like(exact), None
    bucket = Bucket(gradients, dtype)
    flat = bucket.buffer().clone()
    for _ in range(10):
        bucket.buffer().copy_(flat)
        result = call(bucket).double()
        first = result if first is None else first
        total += result / 10
    errors = [float((found - exact).norm() / exact.norm()) for found in (first, total)]
    bits = call.bits(exact.numel(), 10)
    many, call, times = Bucket(gradients * copies, dtype), make(), []
    for _ in range(repeats + 2):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        call(many)
        synchronize(device)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [*(f"{error:.5f}" for error in errors), f"{bits:.2f}", f"{1e3 * float(slowest):.2f}"]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Compare all methods and print the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS, help=_launch.SETTINGS_HELP)
    parser.add_argument("--copies", type=int, help="default: 32 (60 M values) on GPUs, 1 on CPUs")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the gradients")
    parser.add_argument("--steps", type=int, default=20, help="of training before the gradients are taken")
    parser.add_argument("--repeats", type=int, default=10)
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
    names = ["all-reduce", "fp16", "PowerSGD, rank 4", "PowerSGD, rank 32"]
    names = names[: 2 if dtype == torch.bfloat16 else 4]  # PowerSGD's orthogonalisation has no bf16
    methods: dict[str, Callable] = {f"torch {name}": lambda name=name: Hook(name, dtype) for name in names}
    for text in options.codecs:
        methods[text] = lambda text=text: Ours(_launch.parse_setting(text), dtype)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    where, numel = torch.cuda.get_device_name() if gpus else "CPU, gloo", sum(g.numel() for g in gradients)
    timed = f"{numel / 1e6:.2f} M {options.dtype} gradients, timed on {copies * numel / 1e6:.1f} M"
    say(f"{dist.get_world_size()} ranks, {where}; {timed}")
    say("| method | error, one call | error, mean of 10 | bits a value sent | ms |\n|---|---|---|---|---|")
    for name, make in methods.items():
        cells = measure(make, gradients, copies, dtype, device, options.repeats)
        say(f"| {name} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
