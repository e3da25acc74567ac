"""The sketch kernels under Triton's CPU interpreter, bit for bit against the reference, at tiny sizes."""

import pytest

from tests.kernels.interpreter import output_interpreted

pytestmark = pytest.mark.slow


def test_sketch_kernels_reproduce_the_reference() -> None:
    assert output_interpreted(__file__) == "leftovers [0, 1, 1, 0, 0]"


def main() -> None:
    """Below and above the bound, one and several blocks, 32 and 16 bits; a traceback on a difference."""
    import torch

    from taco_kernels.count_sketch import Layout, SketchConfig, launch, reference
    from tests.kernels.interpreter import speed_up

    speed_up()
    launch.PEEL_CELLS = 256  # several steps even here
    seed, senders, leftovers = -5, 3, []
    cases = (
        (1_500, 0.17, {"ratio": 4.0}),
        (1_601, 0.7, {"ratio": 1.4, "width": 64}),
        (1_301, 0.4, {"ratio": 4.0, "cell_bits": 16, "block_rows": 32}),
        (1_111, 0.6, {"ratio": 1.0, "cell_bits": 16}),
        (1_403, 0.2, {"ratio": 4.0, "block_rows": 32}),
    )
    for numel, density, settings in cases:
        layout = Layout(SketchConfig(**settings), numel)
        g = torch.Generator().manual_seed(numel)
        x = torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).mul(3).exp()
        x[0, 77], x[1, 500] = 1e-40, float("nan") if numel % 2 else 3e38
        finite = x.nan_to_num(0)
        share = (1 - density) ** (1 / senders)
        thresholds = finite.abs().kthvalue(int(numel * share), dim=1).values

        hashes = launch.row_hashes(layout, seed, "cpu")
        assert torch.equal(hashes, reference.row_hashes(layout, seed))
        exponents = launch.row_exponents(x, layout)
        assert torch.equal(exponents, reference.row_exponents(x, layout))
        exponents = exponents.amax(0).expand(senders, -1).contiguous()
        rest, expected_rest = x.clone(), torch.empty_like(x)
        wires = launch.encode(rest, thresholds, exponents, layout, senders, seed, rest)
        expected = reference.encode(x, thresholds, exponents, layout, senders, seed, expected_rest)
        assert torch.equal(wires, expected)
        torch.testing.assert_close(rest, expected_rest, rtol=0, atol=0, equal_nan=True)
        cells, words = launch.combine(wires, layout)
        expected_cells, expected_words = reference.combine(wires, layout)
        assert torch.equal(cells, expected_cells) and torch.equal(words, expected_words)
        values, counters, estimates = launch.decode(cells, words, exponents[0], layout, senders, seed)
        expected = reference.decode(expected_cells, words, exponents[0], layout, senders, seed)
        assert counters.tolist() == expected.counters.tolist()
        assert torch.equal(values.view(torch.int32), expected.values.view(torch.int32))
        torch.testing.assert_close(estimates, expected.estimates)
        assert bool(estimates.all()) == bool(estimates.any()) == bool(counters[1])
        assert bool(values.isnan().any()) == bool(x.isnan().any())
        leftovers.append(int(counters[1] > 0))
    print("leftovers", leftovers)


if __name__ == "__main__":
    main()
