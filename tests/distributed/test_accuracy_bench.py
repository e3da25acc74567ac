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

SPECS = ("taco", "int6", "int4:group=64,scales=single", "int5/int8", "sdp4bit", "tah-quant")


def _partials(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(world_size, 8, 256, generator=generator).bfloat16()


def _gradients() -> torch.Tensor:
    return torch.randn(RANKS, 4 * 4096 * RANKS, generator=torch.Generator().manual_seed(4))


def worker(rank: int, world_size: int) -> dict:
    """This rank's results of the real collectives."""
    transport, own = TorchTransport(dist.group.WORLD), _partials(world_size)[rank]
    topology = find_topology(dist.group.WORLD, RANKS // NODES)
    results = {}
    for spec in SPECS:
        codec = parse_codec(spec)
        works = [all_reduce(own, codec, transport), reduce_scatter(own, codec, transport)]
        works.append(all_gather(own[:2], codec, transport))
        results[spec] = [work.wait().float().numpy() for work in works]
        if not codec.sees_shape:
            for sharded in (True, False):
                bucket = GradientBucket(
                    _gradients()[rank], (), 1 / RANKS, sharded, topology, Ledger()
                )
                CodecGradientSync(bucket, codec).start().wait()
                results[spec].append((bucket.shard if sharded else bucket.gradients).numpy())
    return results


ranks = spawned(worker, 4)
"""What each of four ranks has."""


@pytest.mark.parametrize("spec", SPECS)
def test_simulation_has_the_bits_of_the_collectives(spec: str, ranks: list[dict]) -> None:
    partials = _partials(4)
    total = Exchange(Setting("s", spec, spec)).reduce(partials, "forward").float()
    slices = Exchange(Setting("s", spec, spec, sequence_parallel=True))
    scattered = slices.reduce(partials, "backward").float()
    gathered = slices.gather(torch.cat([p[:2] for p in partials]), "forward").float()
    codec = parse_codec(spec)
    shards = whole_sum = None
    if not codec.sees_shape:
        shards = sum_gradients(_gradients(), codec.hops, 1 / RANKS).chunk(RANKS)
        whole_sum = sum_gradients(_gradients(), codec.hops, 1 / RANKS, unsharded=True)
    for rank, results in enumerate(ranks):
        reduced, shard, whole, *gradients = (torch.from_numpy(array) for array in results[spec])
        assert torch.equal(reduced, total)
        assert torch.equal(shard, scattered[2 * rank : 2 * rank + 2])
        assert torch.equal(whole, gathered)
        if shards is not None:
            assert torch.equal(gradients[0], shards[rank]) and torch.equal(gradients[1], whole_sum)
