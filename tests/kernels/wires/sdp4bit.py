"""Comparing two wires of the same values, and all that kernels do with the reference's results."""

from typing import NamedTuple

import torch

from taco_kernels.common.reference import unpack
from taco_kernels.sdp4bit import GroupFormat, reference
from tests.kernels.wires.taco import Difference, largest, relative

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}
"""Relative rounding of results, by dtype; of fp32 also of a sum in another order."""


def codes_and_steps(
    wires: torch.Tensor, format: GroupFormat, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int[rows, groups, G] codes and fp32[rows, groups] steps of wires uint8[rows, bytes]."""
    groups = format.groups(numel)
    split = format.code_bytes(numel)
    plane = unpack([wires[:, :split]], (format.bits,)).view(len(wires), groups, -1)
    codes = plane.view(torch.int8).int() if format.bits == 8 else plane.int()
    steps = wires[:, split : split + 4 * groups].contiguous().view(torch.float32)
    return codes, steps


def apart(a: torch.Tensor, b: torch.Tensor, format: GroupFormat, numel: int) -> Difference:
    """Compare wires uint8[rows, bytes]; codes only of groups with a step.

    Args:
        a: wires.
        b: wires.
        format: of both.
        numel: values of a row.
    """
    codes_a, steps_a = codes_and_steps(a, format, numel)
    codes_b, steps_b = codes_and_steps(b, format, numel)
    distance = (codes_a - codes_b).abs()[~steps_a.isnan()]
    share = int((distance > 0).sum()) / max(distance.numel(), 1)
    end = format.code_bytes(numel) + 4 * format.groups(numel)
    padding = torch.equal(a[:, end:], b[:, end:])
    return Difference(
        share, int(largest(distance)), float(relative(steps_a, steps_b).max()), padding
    )


def assert_alike(
    a: torch.Tensor,
    b: torch.Tensor,
    format: GroupFormat,
    numel: int,
    codes: float,
    scales: float = 0.0,
) -> None:
    """Two wires are the same but for some codes, which are neighbours, and the rounding of steps.

    Args:
        a: uint8[rows, bytes].
        b: uint8[rows, bytes].
        format: of both.
        numel: values of a row.
        codes: share of codes that may differ.
        scales: relative difference that steps may have.
    """
    difference = apart(a, b, format, numel)
    assert difference.codes <= codes and difference.grid_steps <= 1, difference
    assert difference.scales <= scales and difference.padding, difference


class Operations(NamedTuple):
    """What the checks of one set of values share."""

    kernels: object
    """Module whose functions are checked."""
    format: GroupFormat
    numel: int
    """Values of a row."""
    dtype: torch.dtype
    device: str

    def values(self, damaged: bool) -> torch.Tensor:
        """Return [3, 2, numel], strided in two dimensions; with zeros and a row over 20 decades."""
        generator = torch.Generator().manual_seed(self.numel + damaged)
        wide = torch.randn(2, 3, self.numel + 32, generator=generator)
        wide[1, 1] *= torch.logspace(-20, 0, self.numel + 32)
        wide[0, 2] = 0.0
        if damaged:
            wide[1, 0, 16] = float("nan")
            wide[0, 1, 16] = float("inf")
        wide = wide.to(self.device, self.dtype)
        return wide[:, :, 16 : 16 + self.numel].transpose(0, 1)

    def check_quantize(self, x: torch.Tensor) -> None:
        """Codes without a rotation are equal bit for bit; a rotation sums in another order."""
        codes = 0.0
        scales = 0.0
        if self.format.hadamard:
            codes = 2e-4 + 2 / 6 / self.numel
            scales = 2**-14
        expected = reference.quantize(x, self.format)
        result = self.kernels.quantize(x, self.format)
        assert_alike(expected, result, self.format, self.numel, codes, scales)

    def check_sum_dequantize(self, senders: torch.Tensor, damaged: bool) -> None:
        """Scaled by a third, which is rounded once; damaged values show."""
        shape = (2, 2 * self.numel)
        out = torch.full(shape, 7.0, dtype=self.dtype, device=self.device)[:, : self.numel]
        self.kernels.sum_dequantize(senders, self.format, out, 1 / 3)
        expected = torch.empty_like(out)
        reference.sum_dequantize(senders, self.format, expected, 1 / 3)
        torch.testing.assert_close(out, expected, rtol=ULP[self.dtype], atol=1e-6, equal_nan=True)
        assert bool(out.isnan().any()) == damaged
        if self.device == "cpu":
            assert torch.equal(out.nan_to_num(), expected.nan_to_num()), "rounded after the scale"

    def check_sum_requantize(self, senders: torch.Tensor, target: GroupFormat) -> None:
        """Equal bit for bit: sums stay in the integers' domain."""
        expected = reference.sum_requantize(senders, self.format, self.numel, target)
        result = self.kernels.sum_requantize(senders, self.format, self.numel, target)
        assert_alike(expected, result, target, self.numel, codes=0.0)

    def check_differences(self, change: torch.Tensor) -> None:
        """Check differences of weights that a small ``change`` [numel] moves, and adding them."""
        format = GroupFormat(self.format.bits, self.format.group_size)
        generator = torch.Generator().manual_seed(self.numel)
        old = torch.randn(self.numel, generator=generator).to(self.device, self.dtype)
        new = (old.float() + change.float() * 1e-3).to(self.dtype)
        forward = reference.quantize_difference(new, old, format)
        result = self.kernels.quantize_difference(new, old, format)
        assert_alike(forward, result, format, self.numel, codes=0.0)

        weights = torch.stack([old, new])
        wires = torch.cat([forward, reference.quantize_difference(old, new, format)])
        updated = self.kernels.add_dequantized(wires, format, weights.clone())
        expected = reference.add_dequantized(wires, format, weights.clone())
        torch.testing.assert_close(updated, expected, rtol=ULP[self.dtype], atol=0, equal_nan=True)


def check_operations(
    kernels,
    format: GroupFormat,
    target: GroupFormat,
    numel: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Compare every operation, with and without damaged values, with the reference.

    Args:
        kernels: module with the operations.
        format: of gradients; weights' differences are in the same one without a rotation.
        target: of sums that are quantised again.
        numel: values of a row.
        dtype: of the values.
        device: that the kernels run on.
    """
    operations = Operations(kernels, format, numel, dtype, device)
    for damaged in (False, True):
        x = operations.values(damaged)
        senders = reference.quantize(x, format).view(3, 2, -1)
        operations.check_quantize(x)
        operations.check_sum_dequantize(senders, damaged)
        operations.check_sum_requantize(senders, target)
        operations.check_differences(x[0, 1])
