"""The sketch kernels on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from taco_kernels import count_sketch as sketch
from taco_kernels.count_sketch import hashing, launch, reference

CASES = [  # numel, ratio, cell_bits, senders, density of the union over the exact one
    (3_000_000, 4.0, 32, 4, 0.97),
    (3_000_001, 4.0, 16, 4, 0.97),
    (1_000_003, 1.35, 32, 16, 0.97),
    (100_001, 8.0, 32, 3, 0.9),
    (5_000, 4.0, 32, 2, 0.8),
    (1_000_000, 4.0, 32, 4, 1.3),
    (1_000_000, 2.0, 16, 2, 2.0),
]


@pytest.mark.parametrize(("numel", "ratio", "cell_bits", "senders", "load"), CASES)
def test_kernels_reproduce_the_reference(numel, ratio, cell_bits, senders, load) -> None:
    layout, seed = sketch.Layout(sketch.SketchConfig(ratio=ratio, cell_bits=cell_bits), numel), 99
    share = 1 - (1 - min(1.0, load * layout.exact_density)) ** (1 / senders)
    g = torch.Generator().manual_seed(numel)
    x = torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).mul(2).exp()
    thresholds = x.abs().kthvalue(int(numel * (1 - share)), dim=1).values
    x[0, 77] = float("nan")
    device = x.cuda()
    exponents = sketch.row_exponents(device, layout)
    assert torch.equal(exponents.cpu(), reference.row_exponents(x, layout))
    exponents = exponents.amax(0).expand(senders, -1).contiguous()
    rest, expected_rest = device.clone(), torch.empty_like(x)
    wires = sketch.encode(rest, thresholds.cuda(), exponents, layout, senders, seed, rest)
    expected = reference.encode(x, thresholds, exponents.cpu(), layout, senders, seed, expected_rest)
    assert torch.equal(wires.cpu(), expected)
    torch.testing.assert_close(rest.cpu(), expected_rest, rtol=0, atol=0, equal_nan=True)
    cells, words = sketch.combine(wires, layout)
    expected_cells, expected_words = reference.combine(expected, layout)
    assert torch.equal(cells.cpu(), expected_cells) and torch.equal(words.cpu(), expected_words)
    values, counters, estimates = sketch.decode(cells, words, exponents[0], layout, senders, seed)
    decoded = reference.decode(expected_cells, expected_words, exponents[0].cpu(), layout, senders, seed)
    assert counters.tolist() == decoded.counters.tolist()
    assert (counters[1] > 0) == (load > 1)
    torch.testing.assert_close(estimates.cpu(), decoded.estimates, rtol=1e-3, atol=0)
    assert torch.equal(values.cpu().view(torch.int32), decoded.values.view(torch.int32))


def test_decoding_again_and_again_gives_the_same_bits() -> None:
    """Atomics in any order, also far above the bound."""
    layout = sketch.Layout(sketch.SketchConfig(), 4_000_000)
    x = torch.randn(1, layout.numel, device="cuda")
    exponents, threshold = sketch.row_exponents(x, layout), torch.full((1,), 1.0, device="cuda")
    results = []
    for _ in range(5):
        cells, words = sketch.combine(sketch.encode(x, threshold, exponents, layout, 4, 3), layout)
        results.append(sketch.decode(cells, words, exponents[0], layout, 4, 3))
    assert int(results[0].counters[1]) > 0
    for result in results[1:]:
        assert torch.equal(result.values, results[0].values)
        assert torch.equal(result.counters, results[0].counters)


def test_hashes_are_those_of_the_cpu() -> None:
    layout = sketch.Layout(sketch.SketchConfig(), 5_000_000)
    for seed in (0, -1, 2**63 + 5):
        assert torch.equal(launch.row_hashes(layout, seed, "cuda").cpu(), hashing.row_hashes(layout, seed))


def test_nothing_waits_for_the_host() -> None:
    """Selection, encode and decode in one CUDA graph: no synchronisation, no allocation by data."""
    layout = sketch.Layout(sketch.SketchConfig(), 500_000)
    x, out = torch.randn(1, layout.numel, device="cuda"), []

    def step() -> sketch.Decoded:
        thresholds, classes = sketch.candidates(x, 0.2)
        threshold = sketch.choose(thresholds, classes, layout.exact_density)
        exponents = sketch.row_exponents(x, layout)
        wire = sketch.encode(x, threshold, exponents, layout, 1, 5)
        return sketch.decode(*sketch.combine(wire, layout), exponents[0], layout, 1, 5)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.append(step())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[0].values, eager.values) and int(out[0].counters[1]) == 0
    assert int(out[0].counters[0]) > 0.1 * layout.numel
