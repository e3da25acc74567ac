"""SDP4Bit's Triton kernels under Triton's CPU interpreter, against the reference, at tiny sizes."""

import pytest

from tests.kernels.interpreter import interpreted, small_tiles

pytestmark = pytest.mark.slow


def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "10"


def same_but_for_ties(difference) -> bool:
    """The interpreter's fused multiply-add rounds twice, which moves a value in the middle of two codes."""
    return difference.codes < 0.002 and difference.grid_steps <= 1 and difference[2:] == (0.0, True)


def main() -> int:
    """Every kernel in a spread of formats; exits with a traceback on a difference."""
    import torch

    from taco_kernels.sdp4bit import GroupFormat, launch, reference
    from tests.kernels.wires.sdp4bit import apart

    small_tiles(launch.TUNING)
    cases = 0
    for format, target, numel, dtype in (
        (GroupFormat(8, 128, True), GroupFormat(4, 128, True), 1300, torch.bfloat16),
        (GroupFormat(4, 64, True), GroupFormat(8, 256, True), 640, torch.float32),
        (GroupFormat(8, 512, True), GroupFormat(4, 64, True), 1000, torch.float16),
        (GroupFormat(4, 2048, False), GroupFormat(4, 128, False), 2100, torch.bfloat16),
        (GroupFormat(8, 128, False), GroupFormat(8, 128, False), 1, torch.float32),
    ):
        for damaged in (False, True):
            g = torch.Generator().manual_seed(cases)
            wide = torch.randn(2, 3, numel + 32, generator=g)
            wide[1, 1] *= 1e-20
            wide[0, 2] = 0.0
            if damaged:
                wide[1, 0, 16] = float("nan")
                wide[0, 1, 16] = float("inf")
            x = wide.to(dtype)[:, :, 16 : 16 + numel].transpose(0, 1)  # strided in both upper dimensions
            exact = reference.quantize(x, format)
            wires = launch.quantize(x, format)
            difference = apart(exact, wires, format, numel)
            # a rotation sums in another order: a value near the middle of two codes may move
            assert difference.codes < 0.004 and difference.grid_steps <= 1, difference
            assert difference.steps <= 1e-4 * format.hadamard and difference.padding, difference

            # codes times steps are exact, so sums are bit-equal; the interpreter truncates to bf16
            ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2e-6)
            senders = exact.view(3, 2, -1)
            out = torch.full((2, 2 * numel), 7.0, dtype=dtype)[:, :numel]
            launch.sum_dequantize(senders, format, out, 1 / 3)
            expected = reference.sum_dequantize(senders, format, torch.empty_like(out), 1 / 3)
            torch.testing.assert_close(out, expected, rtol=ulp, atol=1e-6, equal_nan=True)
            assert bool(out.isnan().any()) == damaged
            if dtype == torch.float16:  # the only type that the interpreter rounds to as a GPU does
                assert torch.equal(out.nan_to_num(), expected.nan_to_num()), "rounded once, after the scale"

            expected = reference.sum_requantize(senders, format, numel, target)
            again = launch.sum_requantize(senders, format, numel, target)
            difference = apart(expected, again, target, numel)
            assert same_but_for_ties(difference), difference

            plain = GroupFormat(format.bits, format.group_size)
            old = torch.randn(numel, generator=g).to(dtype)
            new = (old.float() + x[0, 1].float() * 1e-3).to(dtype)
            expected = reference.quantize_difference(new, old, plain)
            wire = launch.quantize_difference(new, old, plain)
            difference = apart(expected, wire, plain, numel)
            assert same_but_for_ties(difference), difference
            weights = torch.stack([old, new])
            both = torch.cat([expected, reference.quantize_difference(old, new, plain)])
            updated = launch.add_dequantized(both, plain, weights.clone())
            expected = reference.add_dequantized(both, plain, weights.clone())
            torch.testing.assert_close(updated, expected, rtol=ulp, atol=0, equal_nan=True)
            cases += 1
    return cases
