"""TAGC's packing and sketch kernels on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels import count_sketch as sketch
from taco_kernels.count_sketch.selection import share_threshold
from tests.kernels.test_bitmap_sparse import check_kernels, gradients


@pytest.mark.parametrize(
    ("numel", "share", "bits", "senders", "keep"),
    [
        (1_000_003, 0.2, 16, 3, 0.198),  # the published share
        (800_001, 0.1, 8, 16, 0.6),  # more than there is room for
        (1_500, 0.3, 16, 2, 0.2),  # fewer rows than a start
        (17_000_002, 0.2, 16, 2, 0.198),  # rows enough for a running sum of several blocks
    ],
)
def test_kernels_reproduce_the_reference(numel, share, bits, senders, keep) -> None:
    layout = bitmap_sparse.BitmapLayout(numel, share, bits)
    x = gradients(senders, numel, spread=2.0)
    x[0, numel * 7 // 10] = float("nan")
    x[1, ::5] *= 2.0**-120  # below the smallest exponent, where rows have nothing else
    x[1, :2048] *= 2.0**-120
    check_kernels(bitmap_sparse, x, share_threshold(x, keep), layout, "cuda")


@pytest.mark.parametrize(
    ("numel", "cell_bits", "load"), [(3_000_001, 16, 0.97), (1_000_000, 32, 1.3)]
)
def test_a_gpu_and_a_cpu_agree(numel: int, cell_bits: int, load: float) -> None:
    layout, senders = sketch.SketchLayout(sketch.SketchConfig(cell_bits=cell_bits), numel), 4
    x = gradients(senders, numel, spread=2.0)
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
