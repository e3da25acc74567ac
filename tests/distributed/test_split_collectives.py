"""scripts/_split.py: uncompressed collectives over several communicators have the same results."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

VALUES = 2**18 * 3 + 6


def _collectives(rank: int, world_size: int, function) -> dict[str, torch.Tensor]:
    """Each operation's result, started and waited for as ``function`` says."""
    own = torch.arange(VALUES * world_size, dtype=torch.float32) % 1001 + rank
    total, gathered = own.clone(), torch.empty(VALUES * world_size)
    scattered, exchanged = torch.empty(VALUES), torch.empty_like(own)
    slice_of = own[:VALUES].clone()
    function(lambda **how: dist.all_reduce(total, **how))
    function(lambda **how: dist.all_gather_into_tensor(gathered, slice_of, **how))
    function(lambda **how: dist.reduce_scatter_tensor(scattered, own, **how))
    function(lambda **how: dist.all_to_all_single(exchanged, own, **how))
    rows = own[: 5 * 200].view(5, 200)  # the first rank sends 1 and 4 rows, the second 3 and 2
    to, came = ([1, 4], [1, 3]) if rank == 0 else ([3, 2], [4, 2])
    tokens = torch.empty(sum(came), 200)
    function(lambda **how: dist.all_to_all_single(tokens, rows, came, to, **how))
    return dict(reduced=total, gathered=gathered, scattered=scattered, exchanged=exchanged, tokens=tokens)


def worker(rank: int, world_size: int) -> list[str]:
    """What differs."""
    import _split
    from megatron.core.distributed import param_and_grad_buffer

    expected = _collectives(rank, world_size, lambda call: call())
    _split.install()
    _split.split_over([dist.group.WORLD], 3)
    groups = len(_split._groups[tuple(range(world_size))])

    def coalesced(call) -> None:
        with param_and_grad_buffer._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
            call(async_op=True)
        manager.wait()

    ways = {"at once": lambda call: call(), "waited for": lambda call: call(async_op=True).wait()}
    ways["coalesced"] = coalesced
    wrong = [] if groups == 3 else [f"{groups} groups"]
    for way, function in ways.items():
        found = _collectives(rank, world_size, function)
        wrong += [f"{name}, {way}" for name in found if not torch.equal(found[name], expected[name])]
    return wrong


def test_parts_make_the_whole() -> None:
    assert spawn(worker, 2) == [[], []]
