"""TAH-Quant's Triton kernels under Triton's CPU interpreter, against the reference, at tiny sizes."""

import pytest

from tests.kernels.interpreter import output_interpreted

pytestmark = pytest.mark.slow


def test_kernels_reproduce_the_reference() -> None:
    assert output_interpreted(__file__) == "12 cases"


def main() -> None:
    """Both kernels in a spread of settings; exits with a traceback on a difference."""
    import torch

    from taco_kernels.tah_quant import TahConfig, launch, reference
    from tests.kernels.interpreter import speed_up
    from tests.kernels.wires.tah_quant import difference

    speed_up()
    cases = 0
    for config, shape, dtype in (
        (TahConfig(), (40, 2, 128), torch.bfloat16),
        (TahConfig(), (33, 1, 192), torch.float32),
        (TahConfig(), (7, 3, 100), torch.float16),
        (TahConfig(allocation="tile"), (37, 3, 192), torch.bfloat16),
        (TahConfig(allocation="tile", high_ratio=0.3), (5, 70), torch.float32),
        (TahConfig(tile_size=32, high_bits=4, low_bits=2), (35, 2, 64), torch.bfloat16),
        (TahConfig(tile_size=128, high_bits=3, low_bits=2), (10, 2, 256), torch.float32),
        (TahConfig(tile_size=128, high_bits=4, low_bits=4), (10, 2, 128), torch.bfloat16),
        (TahConfig(transform="none"), (20, 2, 64), torch.bfloat16),
        (TahConfig(high_bits=4, low_bits=4), (20, 2, 64), torch.bfloat16),
        (TahConfig(high_ratio=0.0), (20, 2, 64), torch.bfloat16),
        (TahConfig(high_ratio=1.0, allocation="tile"), (9,), torch.float32),
    ):
        generator = torch.Generator().manual_seed(cases)
        x = torch.randn(shape, generator=generator)
        x *= torch.randn(shape[:-1], generator=generator)[..., None].exp()  # tokens of different scales
        x.view(-1)[5::192] *= 40
        if cases % 2:
            x.view(-1)[3] = (float("nan"), float("inf"), -1e5, 7e4)[cases // 2 % 4]
        x = x.to(dtype)
        if cases == 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        launch.CHOSEN = (8192, 32)[cases % 2]  # populations in one step, or in several
        exact, wire = reference.encode(x, config), launch.encode(x, config)
        apart = difference(exact, wire, config, shape)
        # a transform summed in another order moves a value that lies near the middle between two codes
        assert apart.widths == 0 and apart.pivots == 0 and apart.padding, (config, shape, apart)
        assert apart.scales <= 0.05 and apart.codes <= 0.002 and apart.cells <= 1, (config, shape, apart)
        for dtype_out in (torch.float32, dtype):
            result = launch.decode(exact, config, shape, dtype_out)
            expected = reference.decode(exact, config, shape, dtype_out)
            assert torch.equal(result.isnan(), expected.isnan()), (config, shape)
            error = (result.float() - expected.float()).nan_to_num(0.0, 0.0, 0.0).abs()
            # the interpreter cuts fp32 off to bf16 and fp16, where devices round
            bound = 0.0 if dtype_out == torch.float32 else 2**-7 * expected.float().nan_to_num(0.0).abs()
            assert (error <= bound).all(), (config, shape, dtype_out)
        cases += 1
    print(cases, "cases")


if __name__ == "__main__":
    main()
