"""Lossless compression changes no bit: collectives, and the losses of whole runs to the last digit.

Between pipeline stages under every schedule: test_pipeline_schedules.py.
"""

import functools
import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass

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
    """Return a rank's tensor.

    Args:
        rank: of the values.
        rows: first dimension.
        size: second dimension.
        dtype: of the tensor.
        wild: values of all magnitudes, which no lossless payload fits.
    """
    generator = torch.Generator().manual_seed(100 * rank + size)
    x = torch.randn(rows, size, generator=generator)
    if wild:
        x = x * torch.exp2(40 * torch.rand(x.shape, generator=generator) - 20)
    return x.to(device_of(dist.get_rank()), dtype)


@dataclass(frozen=True)
class Tensors:
    """A case of the collectives: every rank has ``[2 W, size]`` of this type."""

    dtype: torch.dtype
    size: int
    wild: str
    """The rank whose values overflow the payload: "no rank", "first" or "last"."""

    def of_rank(self, rank: int, world_size: int) -> torch.Tensor:
        """Return a rank's tensor."""
        wild_ranks = {"no rank": None, "first": 0, "last": world_size - 1}
        is_wild = rank == wild_ranks[self.wild]
        return rank_tensor(rank, 2 * world_size, self.size, self.dtype, is_wild)


WILD = ("no rank", "first", "last")
DTYPES = (torch.bfloat16, torch.float32)


def collectives_worker(rank: int, world_size: int) -> dict[Tensors, dict]:
    """Run every collective over torch and over the transport of payloads.

    Returns:
        {case: {result: whether its bits are those of uncompressed tensors, and "sent": bytes}}.
    """
    group = dist.group.WORLD
    transports = Transports("collective", communicators=2)
    transports.prepare([group])
    results = {}
    for dtype, wild, size in itertools.product(DTYPES, WILD, SIZES):
        case = Tensors(dtype, size, wild)
        sent = Counter()

        def count(operation: str, nbytes: int, sent: Counter = sent) -> None:
            sent["bytes"] += nbytes

        tensors = [case.of_rank(other_rank, world_size) for other_rank in range(world_size)]
        over_torch = exact_results(rank, tensors, TorchTransport(group, count))
        over_ours = exact_results(rank, tensors, transports.transport(group))
        exact = {name: over_torch[name] and over_ours[name] for name in over_torch}
        results[case] = {**exact, "sent": sent["bytes"]}
    return results


def exact_results(rank: int, tensors: list[torch.Tensor], transport) -> dict[str, bool]:
    """Run every collective through the lossless codec, and compare bits with torch's own sums.

    Args:
        rank: this rank.
        tensors: every rank's.
        transport: of the payloads.

    Returns:
        By collective whether its result is exact.
    """
    codec = parse_codec("lossless")
    x = tensors[rank]
    before = x.clone()
    # Sums are in fp32 in the order of the ranks.
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    total = total.to(x.dtype)

    summed = all_reduce(x, codec, transport).wait()
    into = torch.empty_like(x)
    assert all_reduce(x, codec, transport, out=into).wait() is not None
    scattered = reduce_scatter(x, codec, transport).wait()
    gathered = all_gather(x, codec, transport).wait()
    return {
        "all-reduce": torch.equal(summed, total),
        "all-reduce into a tensor": torch.equal(into, summed),
        "reduce-scatter": torch.equal(scattered, total[2 * rank : 2 * rank + 2]),
        "all-gather": torch.equal(bits(gathered), bits(torch.cat(tensors))),
        "input unchanged": torch.equal(bits(x), bits(before)),
    }


@functools.cache
def collectives(world_size: int) -> list[dict[Tensors, dict]]:
    """Return the results of ``collectives_worker`` by rank."""
    return spawn(collectives_worker, world_size)


RESULTS = (
    "all-reduce",
    "all-reduce into a tensor",
    "reduce-scatter",
    "all-gather",
    "input unchanged",
)


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_exact(world_size: int, result: str) -> None:
    """They are where payloads fit, and where one rank's do not."""
    for rank in collectives(world_size):
        for case, results in rank.items():
            assert results[result], case


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_send_equal_bytes(world_size: int) -> None:
    """One rank's overflow has every rank send uncompressed."""
    by_rank = collectives(world_size)
    for rank in by_rank:
        for case, results in rank.items():
            assert results["sent"] == by_rank[0][case]["sent"], case


def uncompressed_bytes(world_size: int, dtype: torch.dtype) -> float:
    """Return what a rank sends of the largest tensor without a codec.

    An all-reduce sends two shares, and there are two; a reduce-scatter sends one, and the gather of
    W tensors W.
    """
    tensor = 2 * world_size * SIZES[-1] * dtype.itemsize
    share = (world_size - 1) / world_size
    return share * tensor * (2 + 2 + 1 + world_size)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 1.39), (torch.float32, 1.16)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_payloads_that_fit_are_smaller(world_size: int, dtype: torch.dtype, ratio: float) -> None:
    sent = collectives(world_size)[0][Tensors(dtype, SIZES[-1], "no rank")]["sent"]
    assert sent < uncompressed_bytes(world_size, dtype) / ratio


@pytest.mark.parametrize("wild", ["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_overflow_sends_the_tensors_bytes(world_size: int, dtype: torch.dtype, wild: str) -> None:
    sent = collectives(world_size)[0][Tensors(dtype, SIZES[-1], wild)]["sent"]
    assert sent <= 1.005 * uncompressed_bytes(world_size, dtype)


def observed(run: Run) -> dict[str, dict[str, int]]:
    """Return what observed_lossless.py prints, summed over the ranks."""
    total: dict[str, dict[str, int]] = {"passes": {}, "asked": {}}
    for line in re.findall(r"observed (\{.*\})", run.output):
        for name, counts in json.loads(line).items():
            for key, count in counts.items():
                total[name][key] = total[name].get(key, 0) + count
    return total


EVERY_MESSAGE = ("--compression-min-mb", "0")
EVALUATED = ("--eval-iters", "1", "--eval-interval", "2")
SEQUENCE = """--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1"""
RANDOM = "--pipeline-model-parallel-size 2 --attention-dropout 0.1 --hidden-dropout 0.1"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Training:
    """A run in bf16, and what lossless payloads do not fit in its second iteration."""

    flags: str
    compression: str
    poison: str
    """Rank, and what is poisoned: see observed_lossless.py."""
    more: tuple[str, ...] = ()
    """Further flags of the compressed run."""


TRAININGS = {
    "sequence": Training(SEQUENCE, "--tp-compression", "1 input", EVERY_MESSAGE),
    "pipeline": Training(RANDOM, "--pp-compression", "0 input"),
    "data": Training(OVERLAP, "--dp-compression", "1 gradient"),
    "data, unsharded": Training("", "--dp-compression", "1 gradient"),
}


@functools.cache
def runs(name: str) -> tuple[Run, Run]:
    """Return the uncompressed and the compressed run of a training."""
    training = TRAININGS[name]

    def run(*compression: str) -> Run:
        flags = (*GPT, "--bf16", *EVALUATED, *training.flags.split(), *compression)
        script = "tests/distributed/observed_lossless.py"
        return pretrain(*tiny_flags(*flags), script=script, env={"POISON": training.poison})

    return run(), run(training.compression, "lossless", *training.more)


@pytest.mark.parametrize("name", TRAININGS)
def test_training_losses_are_the_uncompressed_runs(name: str) -> None:
    """They are to the last digit, with payloads that fit and with some that overflow."""
    uncompressed, compressed = runs(name)
    losses = uncompressed.losses
    assert len(set(losses.values())) == 4
    assert len(losses) == 4
    assert compressed.losses == losses


@pytest.mark.parametrize("name", TRAININGS)
def test_validation_losses_are_the_uncompressed_runs(name: str) -> None:
    uncompressed, compressed = runs(name)
    lines = re.findall("validation loss.*", uncompressed.output)
    assert lines
    for line in lines:
        assert line in compressed.output


@pytest.mark.parametrize("name", TRAININGS)
def test_iteration_that_overflows_is_repeated_alone(name: str) -> None:
    uncompressed, compressed = runs(name)
    expected = observed(uncompressed)["passes"]
    expected["2"] *= 2
    assert observed(compressed)["passes"] == expected
    assert compressed.output.count("is repeated uncompressed") == 1


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_ask_for_overflows_in_evaluations_alone(name: str) -> None:
    """They ask once an iteration in training. Only tensor parallelism compresses evaluations."""
    _, compressed = runs(name)
    asked = observed(compressed)["asked"]
    assert not [phase for phase in asked if phase.startswith("training")]
    assert bool(asked) == (name == "sequence")


@pytest.mark.parametrize("name", TRAININGS)
def test_both_passes_are_in_the_ledger(name: str) -> None:
    _, compressed = runs(name)
    rows = [row for rank in compressed.ranks for row in rank.ledger]
    kinds = {row["kind"] for row in rows if row["phase"] == "train"}
    assert {"compressed", "overflow"} <= kinds
