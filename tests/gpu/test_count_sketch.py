"""The count sketch on a GPU: the bits that it has on a CPU, whatever the order of atomic additions."""

import pytest
import torch

from taco_kernels import count_sketch as sketch


@pytest.mark.parametrize(("numel", "cell_bits", "load"), [(3_000_001, 16, 0.97), (1_000_000, 32, 1.3)])
def test_a_gpu_and_a_cpu_agree(numel: int, cell_bits: int, load: float) -> None:
    layout, senders = sketch.SketchLayout(sketch.SketchConfig(cell_bits=cell_bits), numel), 4
    g = torch.Generator().manual_seed(numel)
    x = torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).mul(2).exp()
    share = 1 - (1 - load * layout.exact_density) ** (1 / senders)
    x[0, 77] = float("nan")

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        thresholds, classes = sketch.candidates(x, share)
        exponents = sketch.row_exponents(x, layout).amax(0).expand(senders, -1)
        remainder = torch.empty_like(x)
        wires = sketch.encode(x, thresholds[:, -1], exponents, layout, senders, 99, remainder)
        decoded = sketch.decode(*sketch.combine(wires, layout), exponents[0], layout, senders, 99)
        assert (decoded.counters[1] > 0) == (load > 1)
        return [classes, wires, remainder, decoded.values, decoded.counters]

    for found, expected in zip(results(x.cuda()), results(x), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
