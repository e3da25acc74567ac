"""The audit of the first iteration: what the backend was given and the ledger does not know is said."""

import torch
import torch.distributed as dist

from megatron.compression.communication.audit import NEGLIGIBLE, BackendAudit
from megatron.compression.communication.ledger import Ledger
from tests.distributed.spawn import spawn

HELD_BY_NAME = dist.all_gather_into_tensor  # as Megatron holds it
VALUES = 32_768
SIZE = 4 * VALUES


def _groups(rank: int) -> dict[str, dist.ProcessGroup]:
    """Four ranks: tensor parallelism over neighbours, data parallelism across."""
    lists = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    made = [[dist.new_group(ranks) for ranks in one] for one in lists]
    tensor, data = made[0][rank // 2], made[1][rank % 2]
    return {"tensor parallel": tensor, "data parallel": data, "pipeline parallel": None}


def _everything(group: dist.ProcessGroup, ledger: Ledger, traffic: str) -> None:
    """Each operation that Megatron or we use, once, and counted."""
    x, both = torch.ones(VALUES), torch.empty(2 * VALUES)
    dist.all_reduce(x, group=group)
    HELD_BY_NAME(both, x, group=group)
    dist._all_gather_base(both, x, group=group)
    with dist._coalescing_manager(group, async_ops=True) as work:
        HELD_BY_NAME(both, x, group=group)
    work.wait()
    dist.reduce_scatter_tensor(x, both, group=group, async_op=True).wait()
    dist.all_to_all_single(torch.empty_like(both), both, group=group)
    ledger.record_uncompressed(traffic, "off", "all_reduce", SIZE, 2)
    for operation in (*["all_gather"] * 3, "reduce_scatter", "all_to_all"):
        ledger.record_uncompressed(traffic, "off", operation, 2 * SIZE, 2)
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)
    if group.rank() == 0:
        ledger.record_uncompressed(traffic, "exact", "broadcast", SIZE, 2)
    peer = dist.get_global_rank(group, 1 - group.rank())
    sends = (
        dist.P2POp(dist.isend, x, peer, group),
        dist.P2POp(dist.irecv, torch.empty_like(x), peer, group),
    )
    for request in dist.batch_isend_irecv(list(sends)):
        request.wait()
    ledger.record_uncompressed(traffic, "off", "send", SIZE, 2)


def audit_worker(rank: int, world_size: int) -> dict[str, list[str]]:
    groups, lines = _groups(rank), {}
    methods = dict(vars(dist.ProcessGroup))
    ledger = Ledger()
    tensor, data = groups["tensor parallel"], groups["data parallel"]

    def audited(name: str, action) -> None:
        audit = BackendAudit(
            ledger, lambda: {name: [one] if one else [] for name, one in groups.items()}
        )
        with audit:
            action()
        assert dict(vars(dist.ProcessGroup)) == methods, "everything is as it was"
        lines[name] = audit.finish()
        assert audit.finish() == []

    def counted() -> None:
        _everything(tensor, ledger, "tp.forward")
        _everything(data, ledger, "dp.gradient")

    audited("all counted", counted)
    audited(
        "an operation twice", lambda: (counted(), dist.all_reduce(torch.ones(VALUES), group=data))
    )
    audited("scalars", lambda: dist.all_reduce(torch.ones(NEGLIGIBLE // 4), group=tensor))
    audited("other groups", lambda: dist.all_reduce(torch.ones(VALUES)))

    def beside_symmetric_memory() -> None:
        """The ledger knows of payloads that c10d never saw; they must not hide what is missing."""
        ledger.record("tp.forward", "compressed", "all_gather", 10 * SIZE, 0)
        HELD_BY_NAME(torch.empty(2 * VALUES), torch.ones(VALUES), group=tensor)

    audited("beside symmetric memory", beside_symmetric_memory)

    def unequal() -> None:
        """A row more for one peer than for the other: each rank is said to send half of its buffer."""
        rows = torch.zeros(2 + data.rank(), SIZE, dtype=torch.uint8)
        parts = [1, 1 + data.rank()]
        dist.all_to_all_single(torch.empty_like(rows), rows, parts, parts, group=data)
        ledger.record("dp.gradient", "compressed", "all_to_all", SIZE // 4, 0)
        ledger.record("dp.gradient", "excluded", "all_to_all", SIZE, SIZE)
        flags = torch.zeros(SIZE, dtype=torch.uint8)  # as payloads are
        dist.all_reduce(flags, group=data)
        ledger.record_uncompressed("dp.gradient", "excluded", "all_reduce", SIZE, 2)

    audited("unequal", unequal)
    audited(
        "on half of the ranks",
        lambda: None if rank % 2 else dist.all_reduce(torch.ones(VALUES), group=data),
    )
    lines["shared"] = _shared_ranks(tensor)
    lines["lazy"] = _lazy()
    return lines


def _shared_ranks(part: dist.ProcessGroup) -> list[str]:
    """Experts share ranks with data parallelism: the bytes of one may be counted under the other."""
    ledger = Ledger()
    groups = {"data parallel": [dist.group.WORLD], "expert parallel": [part]}
    with BackendAudit(ledger, lambda: groups) as audit:
        dist.all_reduce(torch.ones(VALUES), group=part)
        ledger.record_uncompressed("dp.gradient", "off", "all_reduce", SIZE, 2)
        dist.all_reduce(torch.ones(2 * VALUES), group=part)
    return audit.finish()


def _lazy() -> list[str]:
    """What sets a run up, an evaluation before its first iteration, and what follows are not counted."""
    model, big = torch.nn.Linear(2, 2), torch.ones(VALUES)
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


def test_what_the_ledger_does_not_know_is_said() -> None:
    """All that is counted passes; what is not is named with its dimension and its bytes, on every rank."""
    results = spawn(audit_worker, 4)
    assert all(result == results[0] for result in results)
    lines = results[0]
    for name in ("all counted", "scalars", "other groups", "unequal"):
        assert lines[name] == [], name
    for name, start in {
        "an operation twice": "data parallelism sent 131,072 bytes in the first iteration that the ledger",
        "beside symmetric memory": "tensor parallelism sent 131,072 bytes",
        "on half of the ranks": "data parallelism sent 65,536 bytes",
        "shared": "data and expert parallelism sent 262,144 bytes",
        "lazy": "tensor parallelism sent 196,608 bytes",
    }.items():
        (line,) = lines[name]
        assert line.startswith(start), line
    assert "mean over all ranks" in lines["on half of the ranks"][0]
