"""The packing kernels on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from taco_kernels import packed
from taco_kernels.homomorphic.selection import share_threshold
from taco_kernels.packed import reference
from tests.unit.test_order_kernels import KINDS, same, values


@pytest.mark.parametrize(
    ("numel", "share", "bits", "senders", "keep"),
    [
        (3_000_000, 0.2, 16, 4, 0.198),
        (1_000_003, 0.2, 32, 3, 0.198),
        (70_001, 0.02, 16, 16, 0.02),
        (2_000_000, 0.4, 8, 4, 0.396),
        (500_000, 1.0, 16, 2, 0.99),
        (700_003, 0.3, 16, 8, 0.5),  # more than there is room for
        (17_000_002, 0.2, 16, 2, 0.198),  # tiles so many that a kernel of its own makes their running sums
    ],
)
def test_kernels_reproduce_the_reference(
    numel: int, share: float, bits: int, senders: int, keep: float
) -> None:
    layout = packed.PackedLayout(numel, share, bits)
    g = torch.Generator().manual_seed(numel)
    x = torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).mul(2).exp()
    x[0, 70_000] = float("nan")
    thresholds = share_threshold(x, keep)
    device = x.cuda()
    rest, expected_rest = device.clone(), torch.empty_like(x)
    wires = packed.encode(rest, thresholds.cuda(), layout, rest)
    expected = reference.encode(x, thresholds, layout, expected_rest)
    assert torch.equal(wires.cpu(), expected)
    torch.testing.assert_close(rest.cpu(), expected_rest, rtol=0, atol=0, equal_nan=True)
    total = packed.decode_sum(wires, layout).cpu()
    expected_total = reference.decode_sum(expected, layout)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
    assert bool(total.isnan().any())


@pytest.mark.parametrize("senders", [4, 16])
def test_running_sums_of_many_tiles(senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shards of more than 2^26 values take: a kernel that makes the sums of tiles running ones."""
    from taco_kernels.packed import launch

    for name in ("TILES_TO_SUM", "TILES_TO_MOVE"):
        monkeypatch.setattr(launch, name, 1)
    monkeypatch.setattr(launch, "MOST_COUNTED", 32)
    test_kernels_reproduce_the_reference(600_003, 0.2, 16, senders, 0.198)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [5, 40_000, 65_536, 1_000_003, 16_777_216])
def test_the_threshold_is_that_of_a_sort(kind: str, numel: int) -> None:
    device = values(kind, numel + 1).cuda()[:, 1:]  # strided, not aligned
    x = device.cpu()
    assert device.stride(0) == numel + 1
    for share in (0.001, 0.02, 0.2, 0.59, 1.0):
        expected = share_threshold(x, share)
        assert same(share_threshold(device, share).cpu(), expected), share
        assert same(share_threshold(device[1:], share).cpu(), expected[1:]), share


def test_the_threshold_in_a_graph() -> None:
    x = values("spread", 3_000_000).cuda()
    share_threshold(x, 0.2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = share_threshold(x, 0.2)
    for scale in (3.0, 1e-3, 0.0):
        x.mul_(scale)
        graph.replay()
        assert same(found.cpu(), share_threshold(x.cpu(), 0.2))
