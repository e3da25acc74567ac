"""Train a small transformer under PyTorch's DistributedDataParallel, with compressed gradients.

    torchrun --nproc-per-node 2 examples/ddp.py --reduce int8 --steps 20
    torchrun --nproc-per-node 2 examples/ddp.py --reduce none bf16 powersgd int8 sdp4bit none

One line compresses: ``attach`` after ``DistributedDataParallel``. Several values of ``--reduce``
are trained one after the other from the same weights, a line each: time of a step, bytes, loss.
bf16 and powersgd are torch's own communication hooks, none is DDP as it is. Without a GPU the ranks
are CPU processes.
"""

import argparse
import contextlib
import gc
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from small_transformer import Transformer, batch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.ddp import DdpCompression, attach
from megatron.compression.errors import InputError, one_line_errors

SHAPES = {
    "tiny": {"layers": 2, "hidden": 128, "vocabulary": 256, "sequence": 64},
    "350m": {"layers": 24, "hidden": 1024, "vocabulary": 32000, "sequence": 1024},
}
"""Sizes of the model; 350m has 369 million parameters."""
UNTIMED = 4
"""Steps of each setting that come before the timed ones: DDP makes its buckets anew after the first,
and PowerSGD compresses from the third on."""


@dataclass
class Gradients:
    """How one model's gradients are summed."""

    reduce: str
    compression: DdpCompression | None = None
    powersgd: PowerSGDState | None = None

    def megabytes(self, parameters: int, steps: int) -> float:
        """Return MB that this rank sends in a step, on average.

        Args:
            parameters: of the model; each has a gradient in fp32.
            steps: how many have been trained.
        """
        if self.compression is not None:
            totals = self.compression.run.ledger.totals()["dp.gradient"]
            return sum(sent for sent, _ in totals.values()) / steps / 1e6
        # Torch's hooks count no bytes: an all-reduce of fp32, of bf16, or of thin matrices.
        sent = 4.0 * parameters
        if self.reduce == "bf16":
            sent /= 2
        if self.powersgd is not None:
            ratio, _, _ = self.powersgd.compression_stats()
            sent /= ratio
        return bytes_sent("all_reduce", int(sent), dist.get_world_size()) / 1e6


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--reduce",
        nargs="+",
        default=["int8"],
        help="codec of the gradients, or tagc; bf16, powersgd: torch's own hooks; none: DDP as it "
        "is. Several are trained one after the other",
    )
    add("--shape", choices=SHAPES, default="tiny", help="size of the model")
    for name, meaning in (
        ("layers", "number of blocks"),
        ("hidden", "width of the model"),
        ("vocabulary", "number of tokens"),
        ("sequence", "tokens in a sequence"),
    ):
        add(f"--{name}", type=int, help=f"{meaning} (default: the shape's)")
    add("--samples", type=int, default=4, help="sequences of a rank in a step")
    add("--seed", type=int, default=1)
    add("--steps", type=int, default=20)
    options = parser.parse_args()
    for name, size in SHAPES[options.shape].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if len(options.reduce) > 1 and options.steps <= UNTIMED:
        raise InputError(
            f"--steps {options.steps} times no step of several --reduce: the first {UNTIMED} are "
            f"not timed; give {UNTIMED + 1} or more"
        )
    return options


def bf16_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket):
    """Call torch's bf16 hook, which DDP takes on GPUs alone by its own name."""
    return bf16_compress_hook(group, bucket)


def powersgd_hook(state: PowerSGDState, bucket: dist.GradBucket):
    """Call torch's PowerSGD hook, on CPUs one bucket after the other: two would block both threads
    of gloo, which they need themselves."""
    future = powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        future.wait()
    return future


def compressed(model: DistributedDataParallel, reduce: str) -> Gradients:
    """Have a model's gradients summed as ``reduce`` says."""
    if reduce == "none":
        return Gradients(reduce)
    if reduce == "bf16":
        model.register_comm_hook(None, bf16_hook)
        return Gradients(reduce)
    if reduce == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powersgd_hook)
        return Gradients(reduce, powersgd=state)
    # The line that compresses.
    return Gradients(reduce, compression=attach(model, reduce))


def train(reduce: str, options: argparse.Namespace, device: torch.device) -> None:
    """Train one model, and print its steps, or where there are several models a line of each.

    Args:
        reduce: how its gradients are summed.
        options: the command line's.
        device: of this rank.
    """
    prints_steps = dist.get_rank() == 0 and len(options.reduce) == 1
    torch.manual_seed(options.seed)
    # The same weights for each setting.
    with device:
        model = Transformer(options.layers, options.hidden, options.vocabulary, options.sequence)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    gradients = compressed(wrapped, reduce)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=device.type == "cuda")
    losses = []
    milliseconds = []
    for step in range(options.steps):
        tokens = batch(step, options.samples, options.vocabulary, options.sequence).to(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU, so the time below is the whole step's
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if prints_steps:
            line = f"step {step + 1}: loss {losses[-1]:.4f}, {milliseconds[-1]:.0f} ms"
            if gradients.compression is not None:
                line += f"; {gradients.compression.summary()}"
            print(line, flush=True)
    if len(options.reduce) == 1:
        return
    # The ranks have different tokens, so the loss is the mean over them.
    mean = torch.tensor(statistics.fmean(losses[-5:]), device=device)
    dist.all_reduce(mean)
    timed = milliseconds[UNTIMED:]
    if dist.get_rank() == 0:
        sent = gradients.megabytes(parameters, options.steps)
        print(
            f"{reduce}: {statistics.median(timed):.0f} ms a step ({min(timed):.0f} to "
            f"{max(timed):.0f}), {sent:.3f} MB sent a step, loss "
            f"{mean.item() / dist.get_world_size():.4f}",
            flush=True,
        )
    if gradients.compression is not None:
        gradients.compression.close()


def main() -> None:
    """Train, and print each step's loss and time, and what has been sent."""
    options = parse()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for reduce in options.reduce:
            train(reduce, options, device)
            # The model is gone with its references, of which DDP has circular ones.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    with one_line_errors():
        main()
