"""Comparing two wires of the same values, and all that kernels do with the reference's results."""

import torch

from taco_kernels.common.reference import unpack
from taco_kernels.sdp4bit import GroupFormat, reference
from tests.kernels.wires.taco import Difference, relative


def apart(a: torch.Tensor, b: torch.Tensor, format: GroupFormat, numel: int) -> Difference:
    """Compare wires uint8[rows, bytes] of rows of ``numel`` values; codes only of groups with a step."""
    groups, split = format.groups(numel), format.code_bytes(numel)
    codes, steps = [], []
    for wires in (a, b):
        plane = unpack([wires[:, :split]], (format.bits,)).view(len(wires), groups, -1)
        codes.append(plane.view(torch.int8).int() if format.bits == 8 else plane.int())
        steps.append(wires[:, split : split + 4 * groups].contiguous().view(torch.float32))
    distance = (codes[0] - codes[1]).abs()[~steps[0].isnan()]
    rest = split + 4 * groups
    return Difference(
        float((distance > 0).float().mean()) if distance.numel() else 0.0,
        int(distance.max()) if distance.numel() else 0,
        float(relative(*steps).max()),
        torch.equal(a[:, rest:], b[:, rest:]),
    )


def assert_alike(
    a: torch.Tensor,
    b: torch.Tensor,
    format: GroupFormat,
    numel: int,
    codes: float,
    scales: float = 0.0,
) -> None:
    """Two wires are the same but for a share of codes, which are neighbours, and the rounding of steps."""
    difference = apart(a, b, format, numel)
    assert difference.codes <= codes and difference.grid_steps <= 1, difference
    assert difference.scales <= scales and difference.padding, difference


def check_operations(
    kernels,
    format: GroupFormat,
    target: GroupFormat,
    numel: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Every operation of ``kernels``, with and without damaged values, against the reference."""
    for damaged in (False, True):
        g = torch.Generator().manual_seed(numel + damaged)
        wide = torch.randn(2, 3, numel + 32, generator=g)
        wide[1, 1] *= torch.logspace(-20, 0, numel + 32)
        wide[0, 2] = 0.0
        if damaged:
            wide[1, 0, 16] = float("nan")
            wide[0, 1, 16] = float("inf")
        wide = wide.to(device, dtype)
        x = wide[:, :, 16 : 16 + numel].transpose(0, 1)  # strided in both upper dimensions
        # sums and codes without a rotation are bit-equal, but under the interpreter, whose fused multiply-add
        # rounds twice; a rotation sums in another order: a value near the middle of two codes may move
        ties = 0.002 if device == "cpu" else 0.0
        moved, rounding = (2e-4 + 2 / 6 / numel, 2**-14) if format.hadamard else (0.0, 0.0)
        exact = reference.quantize(x, format)
        assert_alike(exact, kernels.quantize(x, format), format, numel, ties + moved, rounding)

        ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2e-6)
        senders = exact.view(3, 2, -1)
        out = torch.full((2, 2 * numel), 7.0, dtype=dtype, device=device)[:, :numel]
        kernels.sum_dequantize(senders, format, out, 1 / 3)
        expected = reference.sum_dequantize(senders, format, torch.empty_like(out), 1 / 3)
        torch.testing.assert_close(out, expected, rtol=ulp, atol=1e-6, equal_nan=True)
        assert bool(out.isnan().any()) == damaged
        if device == "cpu" and dtype == torch.float16:  # the interpreter cuts fp32 off to bf16
            assert torch.equal(out.nan_to_num(), expected.nan_to_num()), (
                "rounded once, after the scale"
            )

        expected = reference.sum_requantize(senders, format, numel, target)
        again = kernels.sum_requantize(senders, format, numel, target)
        assert_alike(expected, again, target, numel, ties)

        plain = GroupFormat(format.bits, format.group_size)
        old = torch.randn(numel, generator=g).to(device, dtype)
        new = (old.float() + x[0, 1].float() * 1e-3).to(dtype)
        expected = reference.quantize_difference(new, old, plain)
        assert_alike(expected, kernels.quantize_difference(new, old, plain), plain, numel, ties)
        weights = torch.stack([old, new])
        both = torch.cat([expected, reference.quantize_difference(old, new, plain)])
        updated = kernels.add_dequantized(both, plain, weights.clone())
        expected = reference.add_dequantized(both, plain, weights.clone())
        torch.testing.assert_close(updated, expected, rtol=ulp, atol=0, equal_nan=True)
