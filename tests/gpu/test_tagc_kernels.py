"""TAGC's packing and sketch kernels on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels import count_sketch as sketch
from taco_kernels.count_sketch.selection import share_threshold
from tests.kernels.test_bitmap_sparse import EXACTLY, check_kernels, gradients


@pytest.mark.parametrize(
    ("numel", "share", "bits", "senders", "keep"),
    [
        (1_000_003, 0.2, 16, 3, 0.198),  # the published share
        (800_001, 0.1, 8, 16, 0.6),  # more than there is room for
        (1_500, 0.3, 16, 2, 0.2),  # fewer rows than a start
        (17_000_002, 0.2, 16, 2, 0.198),  # rows enough for a running sum of several blocks
    ],
)
def test_kernels_reproduce_the_reference(
    numel: int, share: float, bits: int, senders: int, keep: float
) -> None:
    layout = bitmap_sparse.BitmapLayout(numel, share, bits)
    x = gradients(senders, numel, spread=2.0)
    x[0, numel * 7 // 10] = float("nan")
    # below the smallest exponent, alone in some rows and beside larger values in others
    x[1, ::5] *= 2.0**-120
    x[1, :2048] *= 2.0**-120
    check_kernels(bitmap_sparse, x, share_threshold(x, keep), layout, "cuda")


SENDERS = 4


def sketched(
    x: torch.Tensor, layout: sketch.SketchLayout, share: float
) -> tuple[list[torch.Tensor], sketch.Decoded]:
    """All that senders of x fp32[SENDERS, numel] make of it on x's device, and what is decoded."""
    thresholds, classes = sketch.candidates(x, share)
    exponents = sketch.row_exponents(x, layout).amax(0).expand(SENDERS, -1)
    remainder = torch.empty_like(x)
    wires = sketch.encode(x, thresholds[:, -1], exponents, layout, SENDERS, 99, remainder)
    cells, words = sketch.combine(wires, layout)
    decoded = sketch.decode(cells, words, exponents[0], layout, SENDERS, 99)
    return [classes, wires, remainder], decoded


@pytest.mark.parametrize(
    ("numel", "cell_bits", "load"), [(3_000_001, 16, 0.97), (1_000_000, 32, 1.3)]
)
def test_a_gpu_and_a_cpu_agree(numel: int, cell_bits: int, load: float) -> None:
    """Below the bound of exact decoding and above it: only then are there leftovers."""
    layout = sketch.SketchLayout(sketch.SketchConfig(cell_bits=cell_bits), numel)
    x = gradients(SENDERS, numel, spread=2.0)
    share = 1 - (1 - load * layout.exact_density) ** (1 / SENDERS)
    x[0, 77] = float("nan")
    sent, decoded = sketched(x.cuda(), layout, share)
    expected_sent, expected = sketched(x, layout, share)
    assert (expected.counters[1] > 0) == (load > 1)
    for result, reference in zip([*sent, *decoded], [*expected_sent, *expected], strict=True):
        torch.testing.assert_close(result.cpu(), reference, **EXACTLY)
