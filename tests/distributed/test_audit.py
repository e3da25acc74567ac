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
    x = torch.ones(VALUES)
    both = torch.empty(2 * VALUES)
    dist.all_reduce(x, group=group)
    ledger.record_uncompressed(traffic, "off", "all_reduce", SIZE, 2)
    HELD_BY_NAME(both, x, group=group)
    ledger.record_uncompressed(traffic, "off", "all_gather", 2 * SIZE, 2)
    dist._all_gather_base(both, x, group=group)
    ledger.record_uncompressed(traffic, "off", "all_gather", 2 * SIZE, 2)
    dist.reduce_scatter_tensor(x, both, group=group, async_op=True).wait()
    ledger.record_uncompressed(traffic, "off", "reduce_scatter", 2 * SIZE, 2)
    with dist._coalescing_manager(group, async_ops=True) as work:
        HELD_BY_NAME(both, x, group=group)
    work.wait()
    ledger.record_uncompressed(traffic, "off", "all_gather", 2 * SIZE, 2)
    dist.all_to_all_single(torch.empty_like(both), both, group=group)
    ledger.record_uncompressed(traffic, "off", "all_to_all", 2 * SIZE, 2)
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)
    if group.rank() == 0:
        ledger.record_uncompressed(traffic, "exact", "broadcast", SIZE, 2)
    peer = dist.get_global_rank(group, 1 - group.rank())
    sends = dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, torch.empty_like(x), peer, group)
    for request in dist.batch_isend_irecv(list(sends)):
        request.wait()
    ledger.record_uncompressed(traffic, "off", "send", SIZE, 2)


def audit_worker(rank: int, world_size: int) -> dict[str, list[str]]:
    groups, lines = _groups(rank), {}
    methods = dict(vars(dist.ProcessGroup))
    ledger = Ledger()
    tensor, data = groups["tensor parallel"], groups["data parallel"]

    def audited(name: str, action) -> None:
        audit = BackendAudit(ledger, lambda: {name: [one] if one else [] for name, one in groups.items()})
        with audit:
            action()
        assert dict(vars(dist.ProcessGroup)) == methods, "everything is as it was"
        lines[name] = audit.finish()
        assert audit.finish() == []

    def counted() -> None:
        _everything(tensor, ledger, "tp.forward")
        _everything(data, ledger, "dp.gradient")

    audited("all counted", counted)
    audited("an operation twice", lambda: (counted(), dist.all_reduce(torch.ones(VALUES), group=data)))
    audited("scalars", lambda: dist.all_reduce(torch.ones(NEGLIGIBLE // 4), group=tensor))
    audited("other groups", lambda: dist.all_reduce(torch.ones(VALUES)))

    def beside_symmetric_memory() -> None:
        """The ledger knows of payloads that c10d never saw; they must not hide what is missing."""
        ledger.record("tp.forward", "compressed", "all_gather", 10 * SIZE, 0)
        HELD_BY_NAME(torch.empty(2 * VALUES), torch.ones(VALUES), group=tensor)

    audited("beside symmetric memory", beside_symmetric_memory)

    def payloads() -> None:
        """Uint8, as codecs make them."""
        rows, gathered = torch.zeros(2, SIZE, dtype=torch.uint8), torch.zeros(2 * SIZE, dtype=torch.uint8)
        dist.all_to_all_single(torch.empty_like(rows), rows, group=data)
        ledger.record("dp.gradient", "compressed", "all_to_all", SIZE, 0)
        HELD_BY_NAME(gathered, rows[0], group=data)
        ledger.record("dp.gradient", "compressed", "all_gather", SIZE, 0)

    audited("payloads", payloads)

    def unequal() -> None:
        """A row more for one peer than for the other: each rank is said to send half of its buffer."""
        rows = torch.zeros(2 + data.rank(), SIZE, dtype=torch.uint8)
        parts = [1, 1 + data.rank()]
        dist.all_to_all_single(torch.empty_like(rows), rows, parts, parts, group=data)
        ledger.record("dp.gradient", "compressed", "all_to_all", SIZE // 4, 0)
        ledger.record("dp.gradient", "excluded", "all_to_all", SIZE, SIZE)
        flags = torch.zeros(SIZE, dtype=torch.uint8)
        dist.all_reduce(flags, group=data)
        ledger.record_uncompressed("dp.gradient", "excluded", "all_reduce", SIZE, 2)

    audited("unequal", unequal)
    if rank % 2 == 0:
        audited("on half of the ranks", lambda: dist.all_reduce(torch.ones(VALUES), group=data))
    else:
        audited("on half of the ranks", lambda: None)
    return lines


def test_what_the_ledger_does_not_know_is_said() -> None:
    """All that is counted passes; what is not is named with its dimension and its bytes, on every rank."""
    results = spawn(audit_worker, 4)
    assert all(result == results[0] for result in results)
    lines = results[0]
    for name in ("all counted", "scalars", "other groups", "payloads", "unequal"):
        assert lines[name] == [], name
    (line,) = lines["an operation twice"]
    assert line.startswith(
        "data parallelism sent 131,072 bytes in the first iteration that the ledger does not"
    )
    (line,) = lines["beside symmetric memory"]
    assert line.startswith("tensor parallelism sent 131,072 bytes")
    (line,) = lines["on half of the ranks"]
    assert line.startswith("data parallelism sent 65,536 bytes") and "mean over all ranks" in line


def lazy_worker(rank: int, world_size: int) -> tuple[list[str], bool]:
    ledger, model = Ledger(), torch.nn.Linear(2, 2)
    audit = BackendAudit(ledger, lambda: {"tensor parallel": [dist.group.WORLD]})
    audit.start_with_first_forward([model])
    big = torch.ones(VALUES)
    dist.all_reduce(big)  # setting up
    model.eval()(torch.ones(2))
    dist.all_reduce(big)  # an evaluation
    model.train()(torch.ones(2))
    dist.all_reduce(big)
    lines = audit.finish()
    dist.all_reduce(big)
    return lines, bool(model._forward_pre_hooks)


def test_counting_begins_with_the_first_training_forward() -> None:
    """What sets a run up and an evaluation before it are no iteration."""
    for lines, hooked in spawn(lazy_worker, 2):
        assert len(lines) == 1 and "sent 131,072 bytes" in lines[0]
        assert not hooked


def joined_worker(rank: int, world_size: int) -> list[str]:
    """Experts share ranks with data parallelism: the bytes of one may be counted under the other."""
    ledger = Ledger()
    world = dist.group.WORLD
    part = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    audit = BackendAudit(ledger, lambda: {"data parallel": [world], "expert parallel": [part]})
    with audit:
        dist.all_reduce(torch.ones(VALUES), group=part)
        ledger.record_uncompressed("dp.gradient", "off", "all_reduce", SIZE, 2)
        dist.all_reduce(torch.ones(2 * VALUES), group=part)
    return audit.finish()


def test_dimensions_that_share_ranks_are_looked_at_together() -> None:
    for lines in spawn(joined_worker, 4):
        assert len(lines) == 1
        assert lines[0].startswith("data and expert parallelism sent 262,144 bytes")
