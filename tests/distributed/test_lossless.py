"""Lossless compression changes no bit: collectives, and the losses of whole runs to the last digit.

Between pipeline stages under every schedule: test_pipeline_schedules.py.
"""

import json
import re

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import Transports, all_gather, all_reduce, reduce_scatter
from megatron.compression.communication.transport import TorchTransport
from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.test_training import GPT
from tests.distributed.tiny_gpt import device_of
from tests.kernels.wires.lossless import bits

SIZES = (1, 1000, 40_000)


def rank_tensor(rank: int, rows: int, size: int, dtype: torch.dtype, wild: bool) -> torch.Tensor:
    """What a rank brings: ``[rows, size]``, of all magnitudes where ``wild``."""
    generator = torch.Generator().manual_seed(100 * rank + size)
    x = torch.randn(rows, size, generator=generator)
    if wild:
        x = x * torch.exp2(40 * torch.rand(x.shape, generator=generator) - 20)
    return x.to(device_of(dist.get_rank()), dtype)


def collectives_worker(rank: int, world_size: int) -> dict[str, int]:
    """Every collective against torch's sums, the flag asked before it sends; the bytes sent by case."""
    codec = parse_codec("lossless")
    group = dist.group.WORLD
    transports = Transports("collective", communicators=2)
    sent = {}
    transports.prepare([group])
    for dtype in (torch.bfloat16, torch.float32):
        for wild in (None, 0, world_size - 1):  # no rank's values, the first's, the last's
            for size in SIZES:
                x = [
                    rank_tensor(r, 2 * world_size, size, dtype, r == wild)
                    for r in range(world_size)
                ]
                exact = sum((other.float() for other in x[1:]), x[0].float())
                before = x[rank].clone()
                total = 0

                def count(operation: str, nbytes: int) -> None:
                    nonlocal total
                    total += nbytes

                for transport in (TorchTransport(group, count), transports.transport(group)):
                    summed = all_reduce(x[rank], codec, transport).wait()
                    assert torch.equal(summed, exact.to(dtype)), (dtype, wild, size)
                    into = torch.empty_like(x[rank])
                    assert all_reduce(x[rank], codec, transport, out=into).wait() is not None
                    assert torch.equal(into, summed)
                    own = reduce_scatter(x[rank], codec, transport).wait()
                    assert torch.equal(own, exact.to(dtype)[2 * rank : 2 * rank + 2])
                    gathered = all_gather(x[rank], codec, transport).wait()
                    assert torch.equal(bits(gathered), bits(torch.cat(x)))
                assert torch.equal(bits(x[rank]), bits(before))
                sent[f"{dtype} {wild} {size}"] = total
    return sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size: int) -> None:
    """Exact where payloads fit and where one rank's do not; then in the tensors' bytes."""
    by_rank = spawn(collectives_worker, world_size)
    assert all(other == by_rank[0] for other in by_rank), "all send alike"
    for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        tensor = 2 * world_size * SIZES[-1] * itemsize
        share = (world_size - 1) / world_size
        plain = (
            share * tensor * (2 + 2 + 1 + world_size)
        )  # two all-reduces, reduce-scatter, all-gather
        ratio = 1.39 if itemsize == 2 else 1.16
        assert by_rank[0][f"{dtype} None {SIZES[-1]}"] < plain / ratio
        for wild in (0, world_size - 1):
            assert by_rank[0][f"{dtype} {wild} {SIZES[-1]}"] <= 1.005 * plain


def observed(run: Run) -> dict[str, dict[str, int]]:
    """What a run of observed_lossless.py prints, of all ranks together."""
    actual: dict[str, dict[str, int]] = {"passes": {}, "asked": {}}
    for line in re.findall(r"observed (\{.*\})", run.output):
        for name, counts in json.loads(line).items():
            for key, count in counts.items():
                actual[name][key] = actual[name].get(key, 0) + count
    return actual


EVERY_MESSAGE = ("--compression-min-mb", "0")
EVALUATED = ("--eval-iters", "1", "--eval-interval", "2")
SEQUENCE = """--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1"""
RANDOM = "--pipeline-model-parallel-size 2 --attention-dropout 0.1 --hidden-dropout 0.1"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RUNS = {
    "sequence": (SEQUENCE, ("--tp-compression", *EVERY_MESSAGE), "1 input"),
    "pipeline": (RANDOM, ("--pp-compression",), "0 input"),
    "data": (OVERLAP, ("--dp-compression",), "1 gradient"),
    "data, unsharded": ("", ("--dp-compression",), "1 gradient"),
}
"""Flags; those that compress, the spec after the first; what overflows in the second iteration."""


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_uncompressed_run(name: str) -> None:
    """In bf16, to the last digit, in training and evaluation, with payloads that fit and with some that
    overflow in the second iteration. That is repeated uncompressed, and it alone; nobody asks in training."""
    flags, (compression, *more), poison = RUNS[name]

    def run(*compressed: str) -> Run:
        words = tiny_flags(*GPT, "--bf16", *EVALUATED, *flags.split(), *compressed)
        return pretrain(
            *words, script="tests/distributed/observed_lossless.py", env={"POISON": poison}
        )

    plain = run()
    losses = plain.losses
    evaluated = plain.output.count("validation loss")
    assert len(set(losses.values())) == len(losses) == 4 and evaluated
    once = observed(plain)["passes"]
    compressed = run(compression, "lossless", *more)
    assert compressed.losses == losses
    for line in re.findall("validation loss.*", plain.output):
        assert line in compressed.output
    seen = observed(compressed)
    assert seen["passes"] == once | {"2": 2 * once["2"]}
    assert not [key for key in seen["asked"] if key.startswith("training")]
    assert bool(seen["asked"]) == (name == "sequence")
    rows = [row for rank in compressed.ranks for row in rank.ledger]
    kinds = {row["kind"] for row in rows if row["phase"] == "train"}
    assert {"compressed", "overflow"} <= kinds
    assert compressed.output.count("is repeated uncompressed") == 1
