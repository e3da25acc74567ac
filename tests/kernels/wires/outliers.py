"""Operations on values with outliers against the reference, for any device's kernels."""

from dataclasses import replace
from typing import NamedTuple

import torch

from taco_kernels.channel_norm import ChannelNormLayout
from taco_kernels.taco import CodecConfig, outliers, reference
from tests.kernels.wires.taco import assert_alike


def with_outliers(shape: tuple[int, ...], count: int, seed: int, near: int = 0) -> torch.Tensor:
    """fp32 normal values, some of them a few hundred to 10^4 times as large.

    Args:
        shape: of the result.
        count: how many are large.
        seed: of the values.
        near: the large ones lie among the 1500 values behind this one.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    index = near + torch.randperm(min(1500, x.numel() - near), generator=generator)[:count]
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    x.view(-1)[index] = signs * 10 ** (2.5 + 1.5 * torch.rand(count, generator=generator))
    return x


def assert_wires_alike(
    result: torch.Tensor,
    expected: torch.Tensor,
    config: CodecConfig,
    chunk: int,
    codes: float = 0.01,
) -> None:
    """Two wires have the same lists, bit for bit, and the same codes but for some neighbours.

    Args:
        result: uint8[rows, bytes].
        expected: uint8[rows, bytes].
        config: of both.
        chunk: values of a row.
        codes: share of codes that may differ.
    """
    lists_at = config.lists_at(chunk)
    assert torch.equal(result[:, lists_at:], expected[:, lists_at:]), (config, "lists")
    assert_alike(result[:, :lists_at], expected[:, :lists_at], config, codes, scales=1e-5)


class Operations(NamedTuple):
    """What the checks of one set of values share."""

    launch: object
    """Module whose functions are checked."""
    config: CodecConfig
    dtype: torch.dtype
    count: int
    """Outliers of each sender."""
    shape: tuple
    seed: int
    device: str

    @property
    def tolerance(self) -> dict[str, float]:
        """Rounding of the result, and of sums in another order."""
        return dict(rtol=2**-7 if self.dtype == torch.bfloat16 else 2**-10, atol=1e-4)

    def check_two_chunks(self) -> None:
        """Encode and decode of a contiguous tensor in two chunks."""
        x = with_outliers(self.shape, self.count, self.seed).to(self.dtype)
        chunk = self.config.chunk_numel(x.numel(), 2)
        exact = reference.encode(x, self.config, 2)
        wires = self.launch.encode(x.to(self.device), self.config, 2).cpu()
        assert_wires_alike(wires, exact, self.config, chunk)
        if self.count <= outliers.SLOTS:  # of more, a block may leave all in their groups
            lists = exact[:, self.config.lists_at(chunk) :].clone().view(torch.int32)
            assert bool((lists > 0).any()) == (self.count > 0)
        result = self.launch.decode(exact.to(self.device), self.config, self.shape, self.dtype)
        expected = reference.decode(exact, self.config, self.shape, self.dtype)
        torch.testing.assert_close(result.cpu(), expected, **self.tolerance)

    def check_strided_rows(self) -> None:
        """Encode from, and decode into, rows of a larger tensor, a group each."""
        group_size = self.config.group_size
        wide = torch.full((self.shape[0], 3 * group_size), 7.0, dtype=self.dtype)
        x = wide[:, :group_size]
        shape = tuple(x.shape)
        x.copy_(with_outliers(shape, min(self.count, 3), self.seed))
        exact = reference.encode(x, self.config)
        wires = self.launch.encode(x.to(self.device), self.config).cpu()
        assert_wires_alike(wires, exact, self.config, x.numel())
        out = torch.empty_like(x, device=self.device)
        self.launch.decode(exact.to(self.device), self.config, shape, self.dtype, out=out)
        expected = reference.decode(exact, self.config, shape, self.dtype)
        torch.testing.assert_close(out.cpu(), expected, **self.tolerance)

    def wires_of_senders(self, senders: int = 3) -> torch.Tensor:
        """Wires of several senders, whose outliers lie in the same and in other blocks."""
        wires = []
        for w in range(senders):
            x = with_outliers(self.shape, self.count, 10 * self.seed + w, near=600 * (w % 2))
            wires.append(reference.encode(x, self.config))
        return torch.cat(wires)

    def check_decode_sum(self, wires: torch.Tensor) -> None:
        """The sum in fp32."""
        total = self.launch.decode_sum(
            wires.to(self.device), self.config, self.shape, torch.float32
        )
        expected = reference.decode_sum(wires, self.config, self.shape, torch.float32)
        tolerance = 1e-5 + 2e-7 * float(expected.abs().max())
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-5, atol=tolerance)

    def check_decode_sum_encode(self, wires: torch.Tensor, config_out: CodecConfig) -> None:
        """The sum, encoded with the same or another config."""
        numel = torch.Size(self.shape).numel()
        expected = reference.decode_sum_encode(wires, self.config, numel, config_out=config_out)
        result = self.launch.decode_sum_encode(
            wires.to(self.device), self.config, numel, config_out
        )
        assert_wires_alike(result.cpu()[None], expected[None], config_out, numel)


def check_operations(
    launch,
    config: CodecConfig,
    dtype: torch.dtype,
    count: int,
    shape: tuple,
    seed: int,
    device: str,
) -> None:
    """Compare encode, decode, decode_sum and decode_sum_encode with the reference.

    Args:
        launch: module with these functions.
        config: of the codec, which stores outliers separately.
        dtype: of the tensors.
        count: outliers of each sender; more than a list's slots are left in their groups.
        shape: of each sender's tensor.
        seed: of the values.
        device: that the kernels run on.
    """
    operations = Operations(launch, config, dtype, count, shape, seed, device)
    operations.check_two_chunks()
    operations.check_strided_rows()
    wires = operations.wires_of_senders()
    operations.check_decode_sum(wires)
    other_format = "int8" if config.format == "int4" else "int4"
    for config_out in (config, replace(config, format=other_format, scales="single")):
        operations.check_decode_sum_encode(wires, config_out)


NORMALISED = CodecConfig("int6", 64, "single", hadamard=False, outliers=True)
"""A codec of normalised channels that stores outliers separately."""


def check_values_apart(encode, decode, dtype: torch.dtype, device: str = "cpu") -> None:
    """Values apart in a channel of equal values arrive, and disturb no other channel.

    Args:
        encode: channel_norm's.
        decode: channel_norm's.
        dtype: of the message.
        device: that the functions run on.
    """

    def round_trip(x: torch.Tensor, dtype_out: torch.dtype) -> torch.Tensor:
        layout = ChannelNormLayout(*x.shape, NORMALISED)
        return decode(encode(x.to(device), layout), layout, dtype_out).cpu().float()

    for constant, tokens, count in ((0.0, 64, 1), (0.5, 300, 2), (300.0, 64, 3), (-7.0, 130, 1)):
        quiet = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(count))
        quiet[:, 5] = constant
        x = quiet.clone()
        index = torch.arange(count) * 6 + 2
        x[index, 5] = torch.tensor([-300.0, 200.0, 100.0])[:count] + constant
        x = x.to(dtype)
        quiet = quiet.to(dtype)
        case = (constant, tokens, count, dtype)
        error = round_trip(x, dtype) - x.float()
        distance = (x[index, 5].float() - constant).abs()
        assert (error[index, 5].abs() <= 0.04 * distance).all(), case
        other_channels = torch.arange(128) != 5
        quiet_error = round_trip(quiet, dtype) - quiet.float()
        allowed = 1.1 * quiet_error[:, other_channels].norm()
        assert error[:, other_channels].norm() <= allowed, case

    # Channels of mean 300 and spread 0.5, which bf16 rounds to few values, beside normal ones.
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(7))
    x[:, ::2] = 300 + 0.5 * x[:, ::2]
    x = x.to(dtype)
    error = round_trip(x, torch.float32) - x.float()
    apart = (x[:, ::2].float() - 300).abs() > 1.5
    assert apart.any()
    assert (error[:, ::2][apart].abs() <= 0.5).all()
    assert error[:, 1::2].norm() < 0.05 * x[:, 1::2].float().norm()
