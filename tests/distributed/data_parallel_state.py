"""Gradient state through checkpoints: by parameter, to the bit at the same split, as a sum at another."""

from argparse import Namespace

import torch
import torch.distributed as dist

from megatron.compression.data_parallel.bucket import GradientBucket, ParameterSpan
from megatron.compression.data_parallel.checkpoint import KEY, GradientState
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.gradients import CodedGradientSync
from megatron.compression.data_parallel.sdp4bit import ErrorStore, GroupGradientCodec
from megatron.compression.data_parallel.topology import Topology, find_topology
from megatron.compression.telemetry import Ledger
from taco_kernels.sdp4bit import GroupFormat

SIZES = (700, 64, 3000)


def _sync(topology: Topology, store=None) -> CodedGradientSync:
    """A bucket of three parameters with gaps between them, and a memory of what int4 lost of it."""
    spans, start = [], 0
    for number, size in enumerate(SIZES):
        parameter = torch.nn.Parameter(torch.zeros(size))
        spans.append(ParameterSpan(f"p{number}", parameter, start, start + size))
        start += -(-size // 64) * 64
    numel = -(-start // (128 * 12)) * 128 * 12
    view = GradientBucket(
        torch.zeros(numel),
        tuple(spans),
        1 / topology.world_size,
        True,
        topology,
        Ledger(),
    )
    int8, int4 = (GroupGradientCodec(GroupFormat(bits, 128, True)) for bits in (8, 4))
    sync = CodedGradientSync(view, int8, int4, 2, ErrorFeedback(store=store))
    generator = torch.Generator().manual_seed(topology.rank)
    for span in spans:
        view.gradients[span.start : span.end] = torch.randn(span.end - span.start, generator=generator)
    sync.start().wait()
    return sync


def _args(ranks: int) -> Namespace:
    return Namespace(
        data_parallel_size=ranks,
        context_parallel_size=1,
        dp_compression="sdp4bit",
        dp_error_feedback="fp32",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )


def _carry(saved: list[dict], state: GradientState, made_with: Namespace) -> None:
    """Load what the ranks' ``add_to`` gave, without a file in between."""
    state.loaded({"args": made_with})
    wanted = {}
    state.add_to(wanted, True)
    by_key = {(row.key, row.global_offset): row.data for one in saved for row in one.get(KEY, {}).values()}
    read = {
        name: {number: by_key[row.key, row.global_offset] for number, row in rows.items()}
        for name, rows in wanted.get(KEY, {}).items()
    }
    state.loaded({KEY: read} if read else {})


def state_worker(rank: int, world_size: int) -> None:
    """Saved on two ranks, taken up by two and by four, on one node and on two, in fp32 and in int8."""
    two = dist.new_group([0, 1])
    wide = [find_topology(dist.group.WORLD, size) for size in (None, 2)]
    for store, narrow in ((None, Topology(two, 1, 2)), (ErrorStore(), Topology(two, 2, 1))):
        mine, pending = {}, torch.zeros(sum(SIZES))
        if rank < 2:
            sync = _sync(narrow, store)
            pending = torch.cat([sync.state()["error_feedback"][s.start : s.end] for s in sync.bucket.spans])
            assert pending.any()
            GradientState(_args(2), [(sync, sync.bucket)]).add_to(mine, False)
        saved = [None] * world_size
        dist.all_gather_object(saved, mine)
        dist.all_reduce(pending)

        if rank < 2:  # at the same size: to the bit
            again = _sync(narrow, store)
            expected = sync.state()["error_feedback"]
            again.load_state({})
            assert not again.state()["error_feedback"].any()
            _carry(saved, GradientState(_args(2), [(again, again.bucket)]), _args(2))
            for span in sync.bucket.spans:
                part = slice(span.start, span.end)
                assert torch.equal(again.state()["error_feedback"][part], expected[part])

        # at another size: the sum over all ranks, in the units of an average over more of them
        for topology in wide:
            wider = _sync(topology, store)
            _carry(saved, GradientState(_args(world_size), [(wider, wider.bucket)]), _args(2))
            total = torch.cat([wider.state()["error_feedback"][s.start : s.end] for s in wider.bucket.spans])
            dist.all_reduce(total)
            bound = 1e-5 if store is None else 2e-2
            torch.testing.assert_close(total, pending * world_size / 2, rtol=bound, atol=bound)
