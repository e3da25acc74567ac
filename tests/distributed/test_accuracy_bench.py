"""The accuracy bench's simulated exchanges have the bits of the real collectives."""

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import (
    Ledger,
    TorchTransport,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron.compression.communication.topology import find_topology
from megatron.compression.data_parallel.codec_gradients import CodecGradientSync
from megatron.compression.data_parallel.compressor import GradientBucket
from scripts.accuracy.data_parallel import NODES, RANKS, sum_gradients
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.settings import Setting
from tests.distributed.spawn import spawned

SPECS = (
    "taco",
    "int6:outliers=on",
    "int6",
    "int4:group=64,scales=single",
    "int5/int8",
    "sdp4bit",
    "tah-quant",
)


def _partials(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(world_size, 8, 256, generator=generator).bfloat16()


def _gradients() -> torch.Tensor:
    return torch.randn(RANKS, 4 * 4096 * RANKS, generator=torch.Generator().manual_seed(4))


def worker(rank: int, world_size: int) -> dict:
    """Return this rank's results of the real collectives, by codec and collective."""
    transport = TorchTransport(dist.group.WORLD)
    x = _partials(world_size)[rank]
    topology = find_topology(dist.group.WORLD, RANKS // NODES)
    results = {}
    for spec in SPECS:
        codec = parse_codec(spec)
        works = {
            "all-reduce": all_reduce(x, codec, transport),
            "reduce-scatter": reduce_scatter(x, codec, transport),
            "all-gather": all_gather(x[:2], codec, transport),
        }
        results[spec] = {name: work.wait().float() for name, work in works.items()}
        if not codec.sees_shape:
            results[spec]["shard of gradients"] = _summed(rank, codec, True, topology).shard
            results[spec]["gradients"] = _summed(rank, codec, False, topology).gradients
    return results


def _summed(rank: int, codec, sharded: bool, topology) -> GradientBucket:
    """Return a bucket whose gradients are summed over the ranks.

    Args:
        rank: this rank.
        codec: of the gradients.
        sharded: each rank needs its shard only.
        topology: of the ranks.
    """
    bucket = GradientBucket(_gradients()[rank], (), 1 / RANKS, sharded, topology, Ledger())
    CodecGradientSync(bucket, codec).start().wait()
    return bucket


ranks = spawned(worker, 4)
"""Results of each of four ranks."""

WITHOUT_SHAPE = tuple(spec for spec in SPECS if not parse_codec(spec).sees_shape)
"""Codecs of gradients, which have no shape."""


@pytest.mark.parametrize("spec", SPECS)
def test_simulated_all_reduce_has_the_bits(spec: str, ranks: list[dict]) -> None:
    total = Exchange(Setting("s", spec, spec)).reduce(_partials(4), "forward").float()
    for rank in ranks:
        assert torch.equal(rank[spec]["all-reduce"], total)


@pytest.mark.parametrize("spec", SPECS)
def test_simulated_reduce_scatter_has_the_bits(spec: str, ranks: list[dict]) -> None:
    exchange = Exchange(Setting("s", spec, spec, sequence_parallel=True))
    shards = exchange.reduce(_partials(4), "backward").float().chunk(4)
    for rank, shard in zip(ranks, shards, strict=True):
        assert torch.equal(rank[spec]["reduce-scatter"], shard)


@pytest.mark.parametrize("spec", SPECS)
def test_simulated_all_gather_has_the_bits(spec: str, ranks: list[dict]) -> None:
    exchange = Exchange(Setting("s", spec, spec, sequence_parallel=True))
    gathered = exchange.gather(torch.cat([part[:2] for part in _partials(4)]), "forward").float()
    for rank in ranks:
        assert torch.equal(rank[spec]["all-gather"], gathered)


@pytest.mark.parametrize("spec", WITHOUT_SHAPE)
def test_simulated_shards_of_gradients_have_the_bits(spec: str, ranks: list[dict]) -> None:
    shards = sum_gradients(_gradients(), parse_codec(spec).hops, 1 / RANKS).chunk(RANKS)
    for rank, shard in zip(ranks, shards, strict=True):
        assert torch.equal(rank[spec]["shard of gradients"], shard)


@pytest.mark.parametrize("spec", WITHOUT_SHAPE)
def test_simulated_sums_of_gradients_have_the_bits(spec: str, ranks: list[dict]) -> None:
    total = sum_gradients(_gradients(), parse_codec(spec).hops, 1 / RANKS, unsharded=True)
    for rank in ranks:
        assert torch.equal(rank[spec]["gradients"], total)
