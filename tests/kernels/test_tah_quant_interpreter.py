"""TAH-Quant's Triton kernels under Triton's CPU interpreter, against the reference, at tiny sizes."""

import pytest

from tests.kernels.interpreter import interpreted

pytestmark = pytest.mark.slow


def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "7"


def main() -> int:
    """Both kernels in a spread of settings; exits with a traceback on a difference."""
    import torch

    from taco_kernels.tah_quant import TahConfig, launch, reference
    from tests.kernels.wires.tah_quant import difference

    cases = (
        (TahConfig(), (40, 2, 128), torch.bfloat16, None),  # several steps of programs, the last not full
        (TahConfig(), (33, 1, 192), torch.float32, float("nan")),  # three products a transform
        (TahConfig(allocation="tile", high_ratio=0.3), (7, 3, 100), torch.float16, None),  # padded rows
        (TahConfig(tile_size=32, low_bits=2), (35, 2, 64), torch.bfloat16, float("inf")),  # two extra bits
        (TahConfig(tile_size=128, high_bits=3, low_bits=2), (10, 2, 256), torch.float32, -1e5),
        (TahConfig(low_bits=4), (20, 2, 64), torch.bfloat16, 7e4),  # no extra bits: no choice
        (TahConfig(high_ratio=1.0, allocation="tile"), (9,), torch.float32, None),  # a part of one tile
    )
    for number, (config, shape, dtype, special) in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(shape, generator=generator)
        x *= torch.randn(shape[:-1], generator=generator)[..., None].exp()  # tokens of different scales
        x.view(-1)[5::192] *= 40
        if special is not None:
            x.view(-1)[3] = special
        x = x.to(dtype)
        if number == 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        exact, wire = reference.encode(x, config), launch.encode(x, config)
        found = difference(exact, wire, config, shape)
        # a transform summed in another order moves a value that lies near the middle between two codes
        assert found.widths == 0 and found.pivots == 0 and found.padding, (config, shape, found)
        assert found.scales <= 0.05 and found.codes <= 0.002 and found.cells <= 1, (config, shape, found)
        for dtype_out in {torch.float32, dtype}:
            result = launch.decode(exact, config, shape, dtype_out)
            expected = reference.decode(exact, config, shape, dtype_out)
            assert torch.equal(result.isnan(), expected.isnan()), (config, shape)
            error = (result.float() - expected.float()).nan_to_num(0.0, 0.0, 0.0).abs()
            # the interpreter cuts fp32 off to bf16 and fp16, where devices round
            bound = 0.0 if dtype_out == torch.float32 else 2**-7 * expected.float().nan_to_num(0.0).abs()
            assert (error <= bound).all(), (config, shape, dtype_out)
    return len(cases)
