"""The audit of the first iteration names bytes of the backend that the ledger does not know."""

import functools

import pytest
import torch
import torch.distributed as dist

from megatron.compression.communication.audit import NEGLIGIBLE, BackendAudit
from megatron.compression.communication.ledger import Ledger
from tests.distributed.spawn import spawn

# Megatron has imported the function by name: replacing torch.distributed's attribute misses it.
IMPORTED_ALL_GATHER = dist.all_gather_into_tensor
VALUES = 32_768
SIZE = 4 * VALUES


def _groups(rank: int) -> dict[str, dist.ProcessGroup]:
    """Make groups of four ranks: tensor parallelism over neighbours, data parallelism across."""
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return {
        "tensor parallel": tensor[rank // 2],
        "data parallel": data[rank % 2],
        "pipeline parallel": None,
    }


def _everything(group: dist.ProcessGroup, ledger: Ledger, traffic: str) -> None:
    """Run and count each operation that Megatron or we use.

    Args:
        group: of two ranks.
        ledger: counts them.
        traffic: traffic class that they are counted under.
    """
    x = torch.ones(VALUES)
    both = torch.empty(2 * VALUES)
    dist.all_reduce(x, group=group)
    IMPORTED_ALL_GATHER(both, x, group=group)
    dist._all_gather_base(both, x, group=group)
    with dist._coalescing_manager(group, async_ops=True) as work:
        IMPORTED_ALL_GATHER(both, x, group=group)
    work.wait()
    dist.reduce_scatter_tensor(x, both, group=group, async_op=True).wait()
    dist.all_to_all_single(torch.empty_like(both), both, group=group)
    ledger.record_uncompressed(traffic, "off", "all_reduce", SIZE, 2)
    for operation in ("all_gather", "all_gather", "all_gather", "reduce_scatter", "all_to_all"):
        ledger.record_uncompressed(traffic, "off", operation, 2 * SIZE, 2)
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)
    if group.rank() == 0:
        ledger.record_uncompressed(traffic, "exact", "broadcast", SIZE, 2)
    peer = dist.get_global_rank(group, 1 - group.rank())
    sends = [
        dist.P2POp(dist.isend, x, peer, group),
        dist.P2POp(dist.irecv, torch.empty_like(x), peer, group),
    ]
    for request in dist.batch_isend_irecv(sends):
        request.wait()
    ledger.record_uncompressed(traffic, "off", "send", SIZE, 2)


def audit_worker(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return the audit's lines by scenario."""
    groups = _groups(rank)
    groups_by_dimension = {name: [group] if group else [] for name, group in groups.items()}
    lines = {}
    methods = dict(vars(dist.ProcessGroup))
    ledger = Ledger()
    tensor, data = groups["tensor parallel"], groups["data parallel"]

    def audited(name: str, action) -> None:
        audit = BackendAudit(ledger, lambda: groups_by_dimension)
        with audit:
            action()
        assert dict(vars(dist.ProcessGroup)) == methods, "the audit leaves the methods as they were"
        lines[name] = audit.finish()
        assert audit.finish() == []

    def counted() -> None:
        _everything(tensor, ledger, "tp.forward")
        _everything(data, ledger, "dp.gradient")

    audited("all counted", counted)

    def twice() -> None:
        counted()
        dist.all_reduce(torch.ones(VALUES), group=data)

    audited("an operation twice", twice)
    audited("scalars", lambda: dist.all_reduce(torch.ones(NEGLIGIBLE // 4), group=tensor))
    audited("other groups", lambda: dist.all_reduce(torch.ones(VALUES)))

    def beside_symmetric_memory() -> None:
        """The ledger knows of payloads that c10d never saw; they must not hide what is missing."""
        ledger.record("tp.forward", "compressed", "all_gather", 10 * SIZE, 0)
        IMPORTED_ALL_GATHER(torch.empty(2 * VALUES), torch.ones(VALUES), group=tensor)

    audited("beside symmetric memory", beside_symmetric_memory)

    def beside_host_memory() -> None:
        """Count an all-to-all that c10d never saw, which must not hide another operation."""
        ledger.record("tp.forward", "compressed", "all_to_all", 10 * SIZE, 0)
        IMPORTED_ALL_GATHER(torch.empty(2 * VALUES), torch.ones(VALUES), group=tensor)

    audited("beside host memory", beside_host_memory)

    def unequal() -> None:
        """One peer gets a row more than the other: c10d's count is half of the buffer a rank."""
        rows = torch.zeros(2 + data.rank(), SIZE, dtype=torch.uint8)
        parts = [1, 1 + data.rank()]
        dist.all_to_all_single(torch.empty_like(rows), rows, parts, parts, group=data)
        ledger.record("dp.gradient", "compressed", "all_to_all", SIZE // 4, 0)
        ledger.record("dp.gradient", "excluded", "all_to_all", SIZE, SIZE)
        flags = torch.zeros(SIZE, dtype=torch.uint8)  # as payloads are
        dist.all_reduce(flags, group=data)
        ledger.record_uncompressed("dp.gradient", "excluded", "all_reduce", SIZE, 2)

    audited("unequal", unequal)

    def on_half_of_the_ranks() -> None:
        if rank % 2 == 0:
            dist.all_reduce(torch.ones(VALUES), group=data)

    audited("on half of the ranks", on_half_of_the_ranks)
    lines["shared"] = _shared_ranks(tensor)
    lines["lazy"] = _lazy()
    return lines


def _shared_ranks(part: dist.ProcessGroup) -> list[str]:
    """Let experts share ranks with data parallelism: bytes may be counted under either."""
    ledger = Ledger()
    groups = {"data parallel": [dist.group.WORLD], "expert parallel": [part]}
    with BackendAudit(ledger, lambda: groups) as audit:
        dist.all_reduce(torch.ones(VALUES), group=part)
        ledger.record_uncompressed("dp.gradient", "off", "all_reduce", SIZE, 2)
        dist.all_reduce(torch.ones(2 * VALUES), group=part)
    return audit.finish()


def _lazy() -> list[str]:
    """Send before, within and after the first iteration, of which the audit sees the middle alone.

    Setting a run up and an evaluation before its first iteration come before.
    """
    model = torch.nn.Linear(2, 2)
    big = torch.ones(VALUES)
    audit = BackendAudit(Ledger(), lambda: {"tensor parallel": [dist.group.WORLD]})
    audit.start_with_first_forward([model])
    dist.all_reduce(big)
    model.eval()(torch.ones(2))
    dist.all_reduce(big)
    model.train()(torch.ones(2))
    dist.all_reduce(big)
    lines = audit.finish()
    dist.all_reduce(big)
    assert not model._forward_pre_hooks
    return lines


@functools.cache
def audits() -> list[dict[str, list[str]]]:
    """Return the results of ``audit_worker`` by rank."""
    return spawn(audit_worker, 4)


def test_ranks_say_the_same() -> None:
    for rank in audits():
        assert rank == audits()[0]


@pytest.mark.parametrize("scenario", ["all counted", "scalars", "other groups", "unequal"])
def test_nothing_is_named(scenario: str) -> None:
    assert audits()[0][scenario] == []


@pytest.mark.parametrize(
    ("scenario", "start"),
    {
        "an operation twice": "data parallelism sent 131,072 bytes in the first iteration that "
        "the ledger",
        "beside symmetric memory": "tensor parallelism sent 131,072 bytes",
        "beside host memory": "tensor parallelism sent 131,072 bytes",
        "on half of the ranks": "data parallelism sent 65,536 bytes",
        "shared": "data and expert parallelism sent 262,144 bytes",
        "lazy": "tensor parallelism sent 196,608 bytes",
    }.items(),
)
def test_unknown_bytes_are_named_with_their_dimension(scenario: str, start: str) -> None:
    (line,) = audits()[0][scenario]
    assert line.startswith(start), line


def test_bytes_of_some_ranks_are_a_mean() -> None:
    (line,) = audits()[0]["on half of the ranks"]
    assert "mean over all ranks" in line
