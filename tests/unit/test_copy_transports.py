"""The choice of a transport, and collectives over copies with threads as ranks."""

import pytest
import torch

from megatron.compression.codecs import build_codec
from megatron.compression.collectives import (
    CopyTransport,
    Transports,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron.compression.collectives.choice import TransportError
from tests.gpu import simulated_ranks as ranks
from tests.kernels.test_copy_exchanges import Group, Host, on_all_ranks


class Unused:
    """A symmetric group none of whose kernels may be asked for."""

    def __init__(self, group: Group) -> None:
        self.group = group


@pytest.mark.parametrize("settings", [{"format": "int8"}, {"format": "int6"}], ids=str)
def test_collectives_over_copies_have_the_bits_of_one_process(settings: dict, monkeypatch) -> None:
    """All-reduce, reduce-scatter and all-gather through CopyTransport, with the bytes it counts."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    codec, world_size, key = build_codec("taco", **settings), 3, 8
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 500, generator=generator) for _ in range(world_size)]
    slices = [x[:2] for x in xs]

    def call(rank: int, host: Host):
        sends: list[tuple[str, int]] = []
        transport = CopyTransport(
            Unused(Group(rank, world_size)),
            host.exchanges(rank),
            lambda name, sent: sends.append((name, sent)),
        )
        return [
            operation(x, codec, transport, async_op=True, key=key).wait()
            for operation, x in (
                (all_reduce, xs[rank]),
                (reduce_scatter, xs[rank]),
                (all_gather, slices[rank]),
            )
        ], sends

    total = ranks.expected_all_reduce(xs, codec.config)
    shards = ranks.expected_reduce_scatter(xs, codec.config)
    gathered = ranks.expected_all_gather(slices, codec.config)
    piece, shard = codec.config.chunk_numel(3000, world_size), codec.config.chunk_numel(1000)
    for rank, (results, sends) in enumerate(on_all_ranks(world_size, call)):
        for result, expected in zip(results, (total, shards[rank], gathered), strict=True):
            assert torch.equal(result, expected)
        assert [name for name, _ in sends] == ["all_to_all", "all_gather", "all_to_all", "all_gather"]
        wires = [codec.config.wire_bytes(numel) for numel in (piece, piece, shard, shard)]
        assert [sent for _, sent in sends] == [(world_size - 1) * nbytes for nbytes in wires]


@pytest.mark.parametrize("choice", ["symmetric", "copies"])
def test_without_devices_the_flag_is_refused(choice: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportError, match=f"--taco-transport {choice} is not possible: no CUDA device"):
        Transports(choice).prepare([Group(0, 2)])
    assert Transports("auto").transport(Group(0, 2)).fuses(build_codec("taco")) is False


def test_memory_that_cannot_be_shared(monkeypatch) -> None:
    """auto goes over torch.distributed and says why; who asked for symmetric memory is told."""
    import taco_kernels.symmetric_memory as symmetric_memory

    def refuse(group):
        raise symmetric_memory.SymmetricMemoryError("rank 1 cannot share its memory: pidfd_getfd: EPERM")

    monkeypatch.setattr(symmetric_memory, "SymmetricGroup", refuse)
    monkeypatch.setattr(Transports, "_why_collective", lambda self, group: None)
    monkeypatch.setattr("megatron.compression.collectives.choice.over_tcp", lambda group: False)
    monkeypatch.setattr("megatron.compression.collectives.choice.new_groups", lambda wanted: [])
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    group, transports = Group(0, 2), Transports("auto")
    assert transports.prepare([group]) == [
        "payloads travel over torch.distributed (rank 1 cannot share its memory: pidfd_getfd: EPERM)"
    ]
    assert transports.transport(group).overlaps
    with pytest.raises(TransportError, match="--taco-transport copies is not possible: rank 1 cannot share"):
        Transports("copies").prepare([group])


@pytest.mark.parametrize("communicators", [0, 1, 2])
def test_communicators_without_use_are_said(communicators: int, monkeypatch) -> None:
    """Symmetric memory needs none."""
    monkeypatch.setattr("taco_kernels.symmetric_memory.SymmetricGroup", lambda group: group)
    monkeypatch.setattr(Transports, "_why_collective", lambda self, group: None)
    monkeypatch.setattr("megatron.compression.collectives.choice.new_groups", lambda wanted: [])
    (line,) = Transports("auto", communicators).prepare([Group(0, 2)])
    assert line.startswith("payloads travel over symmetric memory between 2 ranks")
    assert ("--taco-communicators 2 has nothing to share" in line) == (communicators > 1)
