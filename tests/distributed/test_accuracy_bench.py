"""The accuracy bench's simulated exchanges have the bits of the real collectives."""

import torch
import torch.distributed as dist

from megatron.compression.codecs import build_codec
from megatron.compression.collectives import TorchTransport, all_gather, all_reduce, reduce_scatter
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.settings import Setting
from tests.distributed.spawn import spawn

CODECS = {
    ("fp8-e4m3:128:dual",): {"format": "fp8-e4m3"},
    ("int6:128:single:dither",): {"format": "int6", "scales": "single", "rounding": "dither"},
    ("int4:64:single:stochastic",): {
        "format": "int4",
        "group_size": 64,
        "scales": "single",
        "rounding": "stochastic",
    },
    ("int5:128:single", "int8:128:single:dither"): {
        "format": "int5,int8",
        "scales": "single",
        "rounding": "nearest,dither",
    },
}


def _partials(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(world_size, 8, 256, generator=generator).bfloat16()


def worker(rank: int, world_size: int) -> dict:
    """This rank's results of the real collectives."""
    transport, own = TorchTransport(dist.group.WORLD), _partials(world_size)[rank]
    results = {}
    for name, fields in CODECS.items():
        codec = build_codec("taco", **fields)
        results[name] = [
            all_reduce(own, codec, transport, key=77).float().numpy(),
            reduce_scatter(own, codec, transport, key=77).float().numpy(),
            all_gather(own[:2], codec, transport, key=77).float().numpy(),
        ]
    return results


class FixedKey(Exchange):
    """Exchanges with the key that the ranks used."""

    def key(self) -> int:
        return 77


def test_simulation_has_the_bits_of_the_collectives():
    world_size = 4
    ranks = spawn(worker, world_size)
    partials = _partials(world_size)
    for name in CODECS:
        hops = (name[0], name[-1])
        two_shot = FixedKey(Setting("s", *hops, *hops))
        total = two_shot.reduce(partials, "forward").float()
        slices = FixedKey(Setting("s", *hops, *hops, sequence_parallel=True))
        scattered = slices.reduce(partials, "backward").float()
        gathered = slices.gather(torch.cat([p[:2] for p in partials]), "forward").float()
        for rank, results in enumerate(ranks):
            reduced, shard, whole = (torch.from_numpy(array) for array in results[name])
            assert torch.equal(reduced, total), name
            assert torch.equal(shard, scattered[2 * rank : 2 * rank + 2]), name
            assert torch.equal(whole, gathered), name
