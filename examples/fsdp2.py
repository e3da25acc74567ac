"""Train a small transformer under PyTorch's FSDP2, with compressed weights and gradients.

    torchrun --nproc-per-node 2 examples/fsdp2.py --gather lossless --reduce int8 --steps 20

One line compresses: ``attach`` after ``fully_shard``. ``summary`` says what was sent. The
checkpoint has ``compression`` in it for ``--reduce tagc``, which leaves gradients over for later
steps. Without a GPU the ranks are CPU processes.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_transformer import Transformer, batch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron.compression.errors import InputError, one_line_errors
from megatron.compression.fsdp2 import Fsdp2Compression, attach


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gather", default="lossless", help="codec of the weights; none: uncompressed")
    add("--reduce", default="int8", help="codec of the gradients, or tagc; none: uncompressed")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=128, help="width of the model")
    add("--vocabulary", type=int, default=256)
    add("--sequence", type=int, default=64, help="tokens in a sequence")
    add("--samples", type=int, default=4, help="sequences of a rank in a step")
    add("--seed", type=int, default=1)
    add("--steps", type=int, default=20)
    add("--checkpoint", type=Path, help="folder to resume from, if it has one, and save to")
    return parser.parse_args()


def checkpoint_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Fsdp2Compression,
    steps_done: torch.Tensor,
) -> dict:
    """Return what a checkpoint holds, in the form that torch.distributed.checkpoint reads and
    writes.

    Args:
        model: the model under FSDP2.
        optimizer: its optimizer.
        compression: what ``attach`` has returned. It adds nothing to a checkpoint, except under
            tagc: the gradients that a rank has left over.
        steps_done: number of steps, a tensor without dimensions; loading overwrites it.
    """
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "done": steps_done,
        "compression": compression,
    }


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Fsdp2Compression,
    steps_done: torch.Tensor,
) -> None:
    """Load what ``checkpoint_state`` describes.

    Weights and optimizer are resharded where the number of ranks has changed. What tagc has left
    over belongs to a rank, so it needs as many ranks as before.

    Args:
        folder: the checkpoint.
        model, optimizer, compression, steps_done: what is loaded, as in ``checkpoint_state``.

    Raises:
        InputError: another number of ranks has saved leftover gradients.
    """
    state = checkpoint_state(model, optimizer, compression, steps_done)
    if compression.state_dict():  # this run keeps leftover gradients
        # Their names in a checkpoint are compression.rank0.0.memory and so on.
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        saved_ranks = {name.split(".")[1] for name in names if name.startswith("compression.rank")}
        if not saved_ranks:
            del state["compression"]  # saved with another --reduce: nothing is left over
        elif len(saved_ranks) != dist.get_world_size():
            raise InputError(
                f"--checkpoint {folder}: {len(saved_ranks)} ranks have saved what --reduce left over, "
                f"and this run has {dist.get_world_size()}; start {len(saved_ranks)} ranks, or drop it "
                "with a --reduce that keeps nothing, such as int8"
            )
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    compression.iteration = int(steps_done)


def main() -> None:
    """Train, and print each step's loss and time, and what has been sent."""
    options = parse()
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        device = "cpu"
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(options.seed)
    model = Transformer(options.layers, options.hidden, options.vocabulary, options.sequence)
    model = model.to(device)
    # Blocks first, then the whole model: a block's weights are gathered when the block runs.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # From here on FSDP2's all-gathers and reduce-scatters are compressed.
    compression = attach(model, options.gather, options.reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    steps_done = torch.zeros((), dtype=torch.int64)
    if options.checkpoint is not None and (options.checkpoint / ".metadata").exists():
        load_checkpoint(options.checkpoint, model, optimizer, compression, steps_done)

    first_step = int(steps_done)
    for step in range(first_step, first_step + options.steps):
        start = time.perf_counter()
        tokens = batch(step, options.samples, options.vocabulary, options.sequence)
        loss = model(tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.item()  # waits for the GPU, so the time below is the whole step's
        milliseconds = 1e3 * (time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(
                f"step {step + 1}: loss {loss:.4f}, {milliseconds:.0f} ms; {compression.summary()}",
                flush=True,
            )
        steps_done += 1
    if options.checkpoint is not None:
        state = checkpoint_state(model, optimizer, compression, steps_done)
        dcp.save(state, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
