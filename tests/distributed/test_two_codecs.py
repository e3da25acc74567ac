"""FIRST/SECOND over three ranks: the codec of each exchange, by its bytes and its values."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import (
    CommSite,
    TorchTransport,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import run_with

RANKS = 3
NUMEL = 3 * 128 * 40
"""Values of a message: whole groups of 128 for each of three ranks."""
SPECS = ("int5/int6", "int8/int4", "int4/int8")


def brought_by(rank: int) -> torch.Tensor:
    """Return a rank's tensor: Gaussian fp32 ``[NUMEL]``."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def two_codecs_worker(rank: int, ranks: int) -> dict[str, dict]:
    """Sums, gathered values and the bytes of each transport call, by spec."""
    results = {}
    for spec in SPECS:
        calls: list[tuple[str, int]] = []
        transport = TorchTransport(dist.group.WORLD, lambda *call, calls=calls: calls.append(call))
        codec = parse_codec(spec)
        total = all_reduce(brought_by(rank), codec, transport).wait()
        sum_calls = list(calls)
        calls.clear()
        gathered = all_gather(brought_by(rank), codec, transport).wait()
        gather_calls = list(calls)
        calls.clear()
        own_slice = reduce_scatter(brought_by(rank), codec, transport).wait()
        site = CommSite("layer", dist.group.WORLD, run_with(spec), fused=False)
        message = site.message("tp.forward", "all_gather", RANKS * 4 * NUMEL)
        results[spec] = {
            "sum": total,
            "sum calls": sum_calls,
            "gathered": gathered,
            "gather calls": gather_calls,
            "slice": own_slice,
            "slice calls": list(calls),
            "layer's payload": message.encode(brought_by(rank)),
        }
    return results


@cache
def results() -> list[dict[str, dict]]:
    """Return the results of ``two_codecs_worker`` by rank."""
    return spawn(two_codecs_worker, RANKS)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_take_the_bytes_of_the_first_codec_and_the_sum_those_of_the_second(spec: str) -> None:
    first, second = parse_codec(spec).hops
    piece = (NUMEL // RANKS,)
    for result in results():
        assert result[spec]["sum calls"] == [
            ("all_to_all", (RANKS - 1) * first.payload_bytes(piece)),
            ("all_gather", (RANKS - 1) * second.payload_bytes(piece)),
        ]


@pytest.mark.parametrize("spec", SPECS)
def test_the_sum_has_the_errors_of_both_codecs(spec: str) -> None:
    """Parts go through the first codec and their sum through the second, as computed in torch."""
    first, second = parse_codec(spec).hops
    pieces = torch.stack([brought_by(rank).view(RANKS, -1) for rank in range(RANKS)])
    decoded = [first.decode(first.encode(part), part.shape[1:], torch.float32) for part in pieces]
    sums = sum(decoded)
    expected = second.decode(second.encode(sums), sums.shape[1:], torch.float32).view(-1)
    exact = pieces.sum(0).view(-1)
    for result in results():
        total = result[spec]["sum"]
        error = (total - exact).norm() / exact.norm()
        expected_error = (expected - exact).norm() / exact.norm()
        assert error == pytest.approx(float(expected_error), rel=0.15)


@pytest.mark.parametrize("spec", SPECS)
def test_an_all_gather_uses_the_second_codec(spec: str) -> None:
    _, second = parse_codec(spec).hops
    expected = []
    for rank in range(RANKS):
        payload = second.encode(brought_by(rank)[None])
        expected.append(second.decode(payload, (NUMEL,), torch.float32)[0])
    for result in results():
        assert torch.equal(result[spec]["gathered"], torch.cat(expected))
        sent = (RANKS - 1) * second.payload_bytes((NUMEL,))
        assert result[spec]["gather calls"] == [("all_gather", sent)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_reduce_scatter_uses_the_first_codec(spec: str) -> None:
    """Its sum is not encoded again."""
    first, _ = parse_codec(spec).hops
    piece = (NUMEL // RANKS,)
    payloads = [first.encode(brought_by(rank).view(RANKS, -1)) for rank in range(RANKS)]
    sums = first.decode_sum(torch.stack(payloads), piece, torch.float32)
    for rank, result in enumerate(results()):
        assert torch.equal(result[spec]["slice"], sums[rank])
        sent = (RANKS - 1) * first.payload_bytes(piece)
        assert result[spec]["slice calls"] == [("all_to_all", sent)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_layers_kept_payload_is_the_second_codecs(spec: str) -> None:
    """A column-parallel layer under sequence parallelism gathers it forward, and again later."""
    _, second = parse_codec(spec).hops
    for rank, result in enumerate(results()):
        assert torch.equal(result[spec]["layer's payload"], second.encode(brought_by(rank)[None]))
