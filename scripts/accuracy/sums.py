#!/usr/bin/env python
"""How exact sums of gradients are over 8, 32 and 128 data-parallel ranks: bf16 in a ring, and codecs.

    python -m scripts.accuracy.sums --work-dir W                     # 111 M, trained for 300 steps
    python -m scripts.accuracy.sums --work-dir W --gradients normal  # synthetic values

A model is trained uncompressed. Then one micro-batch after the other gives the gradients of one
rank after the other, with the same weights: N micro-batches are N ranks. Their sum in fp64 is exact.
The table has the relative L2 error of a reduce-scatter of these gradients:

    ring        bf16 messages, each rank adds its own and rounds to bf16: N - 1 roundings in a row
    tree        the same in a balanced binary tree: log2 N roundings in a row
    fp32 sums   bf16 messages, summed in fp32
    codecs      the project's, 8 ranks a node: encoded inside the node, their sums between nodes;
                or in one exchange among all ranks

Blocks of neighbouring values are sampled evenly from all parameters. W keeps the trained weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.report.render import table
from scripts.accuracy import run
from scripts.accuracy.data_parallel import sum_gradients

RANKS_OF_NODE = 8
CODECS = ("int8", "int6", "sdp4bit")
BLOCK = 4096
"""Neighbouring values that are sampled together; groups of all codecs divide it."""
SLICE = 2**20
"""Values that are summed in one go, as one bucket; a whole number of blocks for up to 256 ranks."""


def ring(rows: Tensor) -> Tensor:
    """Return the sum of [N, n] as a ring's reduce-scatter in bf16 forms it, [n].

    The message of chunk c starts at rank c + 1 and goes once around, to rank c, its owner. Each
    rank adds what it has of the chunk and rounds. n is a multiple of N.
    """
    ranks = len(rows)
    chunks = torch.arange(ranks, device=rows.device)
    parts = rows.bfloat16().view(ranks, ranks, -1)  # [rank, chunk, values]
    message = parts[(chunks + 1) % ranks, chunks]
    for hop in range(2, ranks + 1):
        local = parts[(chunks + hop) % ranks, chunks]
        # bf16 addition rounds the fp32 sum of its operands, as NCCL's kernels do.
        message = message + local
    return message.reshape(-1)


def tree(rows: Tensor) -> Tensor:
    """Return the sum of [N, n] by pairs, in bf16: log2 N levels. N is a power of two."""
    level = rows.bfloat16()
    while len(level) > 1:
        level = level[0::2] + level[1::2]
    return level[0]


def fp32_sums(rows: Tensor) -> Tensor:
    """Return the sum of [N, n] of what bf16 messages carry, in fp32."""
    return rows.bfloat16().float().sum(dim=0)


def codec_sums(name: str, one_exchange: bool = False) -> Callable[[Tensor], Tensor]:
    """Return the function that sums rows [N, n] with a gradients' codec.

    Args:
        name: the codec, as of ``--dp-compression``.
        one_exchange: among all ranks, in place of one inside nodes and one between them.
    """
    codec = DataParallelConfig(compression=name).compressor.codec

    def total(rows: Tensor) -> Tensor:
        nodes = 1 if one_exchange else max(1, len(rows) // RANKS_OF_NODE)
        return sum_gradients(rows, codec.hops, 1.0, nodes=nodes)

    return total


def methods() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return by name the functions that sum rows [N, n]."""
    named = {"bf16 ring": ring, "bf16 tree": tree, "bf16, fp32 sums": fp32_sums}
    named |= {f"`{name}`": codec_sums(name) for name in CODECS}
    return named | {"`int8`, one exchange": codec_sums("int8", one_exchange=True)}


def errors(rows: Tensor) -> dict[str, float]:
    """Return the relative L2 error of each method's sum of rows [N, n] against fp64.

    ``agreement`` is the square of the sum's norm over the sum of the rows' squares, divided by N:
    1 where all ranks have the same gradient, 1 / N where theirs have nothing in common.
    """
    named = methods()
    squares = dict.fromkeys(named, 0.0)
    total = 0.0
    of_rows = 0.0
    for part in rows.split(SLICE, dim=1):
        exact = part.sum(dim=0, dtype=torch.float64)
        total += float(exact.square().sum())
        of_rows += float(part.square().sum(dtype=torch.float64))
        for name, method in named.items():
            squares[name] += float((method(part).double() - exact).square().sum())
    result = {name: (square / total) ** 0.5 for name, square in squares.items()}
    result["agreement"] = total / of_rows / len(rows)
    return result


def sampled(parameters: Sequence[Tensor], gradients: Sequence[Tensor], values: int) -> Tensor:
    """Return blocks of the gradients, evenly from all of them, flat.

    Args:
        parameters: of the model, which say how many values there are.
        gradients: of the parameters.
        values: how many to return at most, rounded down to whole slices or, of fewer, blocks.
    """
    blocks = [gradient.flatten()[: gradient.numel() // BLOCK * BLOCK] for gradient in gradients]
    every_block = torch.cat(blocks).view(-1, BLOCK)
    unit = SLICE if min(values, every_block.numel()) >= SLICE else BLOCK
    count = min(values, every_block.numel()) // unit * unit // BLOCK
    chosen = torch.linspace(0, len(every_block) - 1, count, device=every_block.device).long()
    return every_block[chosen].flatten()


def model_gradients(args: argparse.Namespace) -> Tensor:
    """Return [most ranks, values]: the gradients of as many micro-batches of a trained model."""
    from scripts.accuracy import layers
    from scripts.accuracy.exchange import Exchange
    from scripts.accuracy.model import GPT
    from scripts.accuracy.settings import setting_of
    from scripts.accuracy.training import Corpus, Trainer

    config, schedule = run.sizes(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = Corpus(run.prepare(args), config.sequence, device)
    trainer = Trainer(GPT(config, compile_blocks=device == "cuda").to(device), corpus, schedule)
    checkpoint = args.work_dir / f"sums-{args.train_steps}.pt"
    setting = setting_of("none", config.ranks)
    if checkpoint.exists():
        trainer.load(checkpoint)
    else:
        trainer.start(0)
        trainer.train(setting, args.train_steps, 0, {args.train_steps: checkpoint})
    layers.attach(Exchange(setting))
    # Windows that the training has not come to.
    ranks = max(args.ranks)
    first = args.train_steps * schedule.batch
    order = corpus.order(0, first + ranks * args.micro_batch)[first:]
    parameters = list(trainer.model.parameters())
    rows = []
    for windows in torch.from_numpy(order).to(device).split(args.micro_batch):
        ids, targets = corpus.take(corpus.train, windows)
        loss = trainer.model(ids, targets).mean()
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(sampled(parameters, gradients, args.values))
    return torch.stack(rows)


def normal_gradients(args: argparse.Namespace) -> Tensor:
    """Return [most ranks, values] of standard normal values."""
    generator = torch.Generator().manual_seed(0)
    values = max(BLOCK, args.values // BLOCK * BLOCK)
    return torch.randn(max(args.ranks), values, generator=generator)


def table_of(records: Sequence[dict]) -> str:
    """Return markdown: a row for each number of ranks."""
    names = [name for name in records[0] if name not in ("ranks", "values", "agreement")]
    rows = [["ranks", *names, "agreement of gradients"]]
    for record in records:
        cells = [f"{record[name]:.5f}" for name in names]
        rows.append([str(record["ranks"]), *cells, f"{record['agreement']:.3f}"])
    return "\n".join(table(*rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="folder of text, weights and sums.json")
    add("--gradients", choices=("model", "normal"), default="model", help="default: model")
    add("--ranks", type=int, nargs="+", default=(8, 32, 128), help="powers of two, 8 to 256")
    add("--size", choices=run.SIZES, default="111m", help="the model (default: 111m)")
    add("--steps", type=int, default=1232, help="of the schedule (default: 1232)")
    add("--train-steps", type=int, default=300, help="before the gradients (default: 300)")
    add("--micro-batch", type=int, default=4, help="sequences of a rank (default: 4)")
    add("--values", type=int, default=2**24, help="sampled gradients (default: 2^24)")
    add("--corpus-mb", type=float, default=60, help="text, 10^6 bytes (default: 60)")
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        if not 8 <= ranks <= 256 or ranks.bit_count() != 1:
            parser.error(f"--ranks {ranks} must be a power of two from 8 to 256")
    args.work_dir = args.work_dir.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write sums.json, and print the table."""
    args = parse(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    rows = model_gradients(args) if args.gradients == "model" else normal_gradients(args)
    records = []
    for ranks in args.ranks:
        records.append({"ranks": ranks, "values": rows.shape[1], **errors(rows[:ranks])})
    (args.work_dir / "sums.json").write_text(json.dumps(records, indent=1) + "\n")
    print(table_of(records))


if __name__ == "__main__":
    main(sys.argv[1:])
