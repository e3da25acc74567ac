"""Gradient state through checkpoints: by parameter, to the bit at the same split, as a sum at another."""

import contextlib
import io
from argparse import Namespace

import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.data_parallel.checkpoint import KEY, MADE_BY, GradientState
from megatron.compression.data_parallel.codec_gradients import CodecGradientSync
from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan
from megatron.compression.data_parallel.error_feedback import INT8, ErrorFeedback

SIZES = (700, 64, 3000)


def _sync(topology: Topology, store=None, alignment: int = 64) -> CodecGradientSync:
    """A bucket of three parameters with gaps between them, and a memory of what int4 lost of it."""
    spans, start = [], 0
    for number, size in enumerate(SIZES):
        parameter = torch.nn.Parameter(torch.zeros(size))
        spans.append(ParameterSpan(f"p{number}", parameter, start, start + size))
        start += -(-size // alignment) * alignment
    numel = -(-start // (128 * 12)) * 128 * 12
    view = GradientBucket(
        torch.zeros(numel),
        tuple(spans),
        1 / topology.world_size,
        True,
        topology,
        Ledger(),
    )
    sync = CodecGradientSync(view, parse_codec("sdp4bit"), ErrorFeedback(store=store), 2)
    generator = torch.Generator().manual_seed(topology.rank)
    for span in spans:
        view.gradients[span.start : span.end] = torch.randn(span.end - span.start, generator=generator)
    sync.start().wait()
    return sync


def _args(ranks: int, **changes) -> Namespace:
    values = dict(
        data_parallel_size=ranks,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )
    return Namespace(**{**values, **changes})


def _save(sync: CodecGradientSync | None, args: Namespace) -> list[dict]:
    """What every rank's ``add_to`` gave."""
    mine = {}
    if sync is not None:
        GradientState(args, "sdp4bit", "fp32", [(sync, sync.bucket)]).add_to(mine, False)
    saved = [None] * dist.get_world_size()
    dist.all_gather_object(saved, mine)
    return saved


def _carry(saved: list[dict], sync: CodecGradientSync | None, args: Namespace, made_with: Namespace) -> str:
    """Load it without a file in between; returns what the log says (on rank 0)."""
    rows = [row for one in saved for row in one.get(KEY, {}).values()]
    made_by = saved[0].get(MADE_BY, {})
    by_key = {(row.key, row.global_offset): row.data for row in rows}
    syncs = [(sync, sync.bucket)] if sync is not None else []
    held = {row.key: tuple(row.global_shape) for row in rows}
    state = GradientState(
        args, "sdp4bit", "fp32", syncs, lambda line: dist.get_rank() or print(line), lambda _: held
    )
    with contextlib.redirect_stdout(io.StringIO()) as log:
        state.loaded({"args": made_with, MADE_BY: made_by}, "somewhere")
        wanted = {}
        state.add_to(wanted, True)
        read = {
            name: {number: by_key[row.key, row.global_offset] for number, row in rows.items()}
            for name, rows in wanted.get(KEY, {}).items()
        }
        state.loaded({KEY: read} if read else {}, "somewhere")
    return log.getvalue()


def _pending(sync: CodecGradientSync) -> torch.Tensor:
    """What this rank holds back, of parameters only."""
    state = sync.state()["error_feedback"]
    return torch.cat([state[s.start : s.end] for s in sync.bucket.spans])


def _summed(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values


def state_worker(rank: int, world_size: int) -> None:
    """Saved on two ranks, taken up by two and by four, on one node and on two, in fp32 and in int8."""
    two = dist.new_group([0, 1])
    wide = [find_topology(dist.group.WORLD, size) for size in (None, 2)]
    for store, narrow in ((None, Topology(two, 1, 2)), (INT8, Topology(two, 2, 1))):
        sync = _sync(narrow, store) if rank < 2 else None
        saved = _save(sync, _args(2))
        pending = _summed(_pending(sync) if sync else torch.zeros(sum(SIZES)))
        assert pending.any()

        if rank < 2:  # at the same size: to the bit
            again = _sync(narrow, store)
            again.load_state({})
            assert not again.state()["error_feedback"].any()
            _carry(saved, again, _args(2), _args(2))
            assert torch.equal(_pending(again), _pending(sync))

        # at another size: the sum over all ranks, in the units of an average over more of them
        for topology in wide:
            wider = _sync(topology, store)
            log = _carry(saved, wider, _args(world_size), _args(2))
            assert rank or "the sum over the 2 ranks that saved it was spread over 4 ranks" in log
            bound = 1e-5 if store is None else 2e-2
            expected = pending * world_size / 2
            torch.testing.assert_close(_summed(_pending(wider)), expected, rtol=bound, atol=bound)
        _narrower(rank, world_size, wide, narrow, store)
    _other_nodes(rank, world_size, wide)
    _other_buckets(rank, world_size, wide)
    _less_in_the_checkpoint(rank, wide[0])


def _other_nodes(rank: int, world_size: int, topologies: list[Topology]) -> None:
    """The same ranks and flags on other nodes, where ranks hold other shards' errors: the sum is kept."""
    for before, after in (topologies, topologies[::-1]):
        sync, other = _sync(before), _sync(after)
        pending = _summed(_pending(sync))
        log = _carry(_save(sync, _args(world_size)), other, _args(world_size), _args(world_size))
        assert rank or "was spread over 4 ranks" in log
        torch.testing.assert_close(_summed(_pending(other)), pending, rtol=1e-5, atol=1e-5)


def _narrower(rank: int, world_size: int, wide: list[Topology], narrow: Topology, store) -> None:
    """Saved on four ranks, taken up by two of them, each of which reads two rows."""
    for before in wide:
        sync = _sync(before, store)
        pending = _summed(_pending(sync))
        saved = _save(sync, _args(world_size))
        taken = torch.zeros(sum(SIZES))
        if rank < 2:
            less = _sync(narrow, store)
            log = _carry(saved, less, _args(2), _args(world_size))
            assert rank or "the sum over the 4 ranks that saved it was spread over 2 ranks" in log
            taken = _pending(less)
        bound = 1e-5 if store is None else 2e-2
        torch.testing.assert_close(_summed(taken), pending * 2 / world_size, rtol=bound, atol=bound)


def _other_buckets(rank: int, world_size: int, topologies: list[Topology]) -> None:
    """The same ranks, nodes and flags, but parameters lie elsewhere in the bucket, and so in other shards."""
    for topology in topologies:
        sync, other = _sync(topology), _sync(topology, alignment=2048)
        assert sync.bucket.numel != other.bucket.numel
        pending = _summed(_pending(sync))
        log = _carry(_save(sync, _args(world_size)), other, _args(world_size), _args(world_size))
        assert rank or "over 4 ranks, whose buckets or nodes are cut otherwise" in log
        torch.testing.assert_close(_summed(_pending(other)), pending, rtol=1e-5, atol=1e-5)


def _less_in_the_checkpoint(rank: int, topology: Topology) -> None:
    """A parameter without a saved state, checkpoints without any, layers that lie elsewhere: zeros."""
    sync, args = _sync(topology), _args(4)
    saved = _save(sync, args)
    for one in saved:
        del one[KEY]["error_feedback.p0"]
    other = _sync(topology)
    _carry(saved, other, args, args)
    assert not _pending(other)[: SIZES[0]].any()
    assert torch.equal(_pending(other)[SIZES[0] :], _pending(sync)[SIZES[0] :])
    for made_with, reason in (
        (_args(1), "made on one data-parallel rank"),
        (_args(4, virtual_pipeline_model_parallel_size=2), "another --virtual-pipeline-model-parallel-size"),
    ):
        log = _carry(saved, other, args, made_with)
        assert rank or reason in log, log
    for changes, reason in (
        ({"state": False}, "made without --dp-error-feedback"),
        ({"compression": "tagc"}, "made with another --dp-compression"),
        (
            {"compression": "sdp4bit:group=64"},
            "it was sdp4bit:group=64's, and what sdp4bit does not compress",
        ),
    ):
        for one in saved:
            one[MADE_BY] |= changes
        log = _carry(saved, other, args, args)
        assert rank or reason in log, log
        for one in saved:
            one[MADE_BY] |= {"state": True, "compression": "sdp4bit"}
    log = _carry(saved, None, args, args)
    assert rank or "the checkpoint's error feedback is dropped: this run goes on on one" in log, log
