"""Error feedback keeps the books: what has arrived and what is held back make up what there was."""

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.two_hops import TwoHops
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.data_parallel.codec_gradients import CodecGradientSync
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.error_feedback import INT8 as STORE
from megatron.compression.data_parallel.error_feedback import ErrorFeedback

NUMEL, STEPS = 20_000, 8
INT4 = parse_codec("sdp4bit:intra=4")
MIXED = parse_codec("sdp4bit")


class ExactInside(TwoHops):
    """Nothing is lost before the exchange between nodes."""

    def __post_init__(self) -> None:
        pass


def _sync(
    topology: Topology, sharded: bool, codec: Codec, feedback: ErrorFeedback | None
) -> CodecGradientSync:
    """fp32 gradients in several pieces; plain DDP's are no multiple of the ranks."""
    flat = torch.zeros(NUMEL if sharded else NUMEL - 3)
    bucket = GradientBucket(flat, (), 1.0, sharded, topology, Ledger())
    return CodecGradientSync(bucket, codec, feedback, 2)


def _run(sync: CodecGradientSync) -> tuple[torch.Tensor, float]:
    """(arrived + remembered - sent, on the values that this rank gets; rms of one step's sum)."""
    bucket, rank = sync.bucket, sync.topology.rank
    balance = torch.zeros(bucket.numel, dtype=torch.float64)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        own = torch.randn(bucket.numel, generator=generator)
        bucket.gradients.copy_(own)
        total = own.double()
        dist.all_reduce(total)
        sync.start().wait()
        balance += bucket.gradients.double() - total
    if sync.feedback is not None:
        held = sync.state()["error_feedback"].double()
        dist.all_reduce(held)
        balance += held
    size = bucket.numel // sync.topology.world_size
    return balance[rank * size : (rank + 1) * size] if bucket.sharded else balance, float(total.std())


def conservation_worker(rank: int, world_size: int) -> None:
    """One hop and two, sharded and not: only the 8 bits inside a node are lost for good."""
    for node_size in (None, 2):
        topology = find_topology(dist.group.WORLD, node_size)
        for sharded in (True, False):
            inside = ExactInside(parse_codec("identity"), INT4) if topology.two_hops else INT4
            balance, scale = _run(_sync(topology, sharded, inside, ErrorFeedback()))
            assert balance.abs().max() < 1e-4 * scale, (node_size, sharded)
            if not sharded:
                forgotten, _ = _run(_sync(topology, sharded, inside, None))
                assert forgotten.std() > 0.3 * scale, "which without a memory it is not"
                eighth, _ = _run(_sync(topology, sharded, inside, ErrorFeedback(store=STORE)))
                assert eighth.std() < 0.05 * scale, "8 bits lose little of what is remembered"
                copies = [torch.empty_like(balance) for _ in range(world_size)]
                dist.all_gather(copies, balance)
                assert all(torch.equal(copy, balance) for copy in copies)
    rounded, scale = _run(_sync(topology, False, MIXED, ErrorFeedback()))
    assert 1e-3 * scale < rounded.std() < 0.1 * scale, "the first exchange's rounding is not remembered"


def non_finite_worker(rank: int) -> None:
    """Two hops: an infinity of one rank shows in the sum, and no rank's memory takes it in."""
    topology = find_topology(dist.group.WORLD, 2)
    for sharded in (True, False):
        for store in (None, STORE):
            sync = _sync(topology, sharded, MIXED, ErrorFeedback(store=store))
            seen = []
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + rank)
                sync.bucket.gradients.copy_(torch.randn(sync.bucket.numel, generator=generator))
                before = sync.state()["error_feedback"]
                if step == 1 and rank == 3:
                    sync.bucket.gradients[70] = float("inf")
                sync.start().wait()
                mine = sync.bucket.shard if sharded else sync.bucket.gradients
                damaged = (~mine.isfinite()).any().float()
                dist.all_reduce(damaged)
                seen.append(int(damaged))
                after = sync.state()["error_feedback"]
                assert after.isfinite().all() and after.any()
                # ranks with the owner's index add up its values of a node: those of node 1 were spoiled
                if step == 1 and rank == 2:
                    assert torch.equal(after[:128], before[:128])
            assert seen == [0, 1 if sharded else topology.world_size, 0]
