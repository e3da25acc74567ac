"""Every operation on values with outliers among them, against the reference: for any device's kernels."""

from dataclasses import replace

import torch

from taco_kernels.channel_norm import ChannelNormLayout
from taco_kernels.taco import CodecConfig, outliers, reference
from tests.kernels.wires.taco import assert_alike


def with_outliers(shape: tuple[int, ...], count: int, seed: int, near: int = 0) -> torch.Tensor:
    """fp32 normal values, ``count`` of them a few hundred to 10^4 times as large, behind the ``near``-th."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    places = near + torch.randperm(min(1500, x.numel() - near), generator=g)[:count]
    signs = torch.randint(0, 2, (count,), generator=g) * 2 - 1
    x.view(-1)[places] = signs * 10 ** (2.5 + 1.5 * torch.rand(count, generator=g))
    return x


def assert_wires_alike(
    found: torch.Tensor,
    expected: torch.Tensor,
    config: CodecConfig,
    chunk: int,
    codes: float = 0.01,
) -> None:
    """uint8[rows, bytes] of chunks of ``chunk`` values: lists bit for bit, codes but for few neighbours."""
    at = config.lists_at(chunk)
    assert torch.equal(found[:, at:], expected[:, at:]), (config, "lists")
    assert_alike(found[:, :at], expected[:, :at], config, codes, scales=1e-5)


def check_operations(
    launch,
    config: CodecConfig,
    dtype: torch.dtype,
    count: int,
    shape: tuple,
    seed: int,
    device: str,
) -> None:
    """encode, decode, decode_sum and decode_sum_encode of ``launch``, in one and two chunks, three senders.

    Args:
        count: outliers of each sender; more than a list's slots are left in their groups.
    """
    x = with_outliers(shape, count, seed).to(dtype)
    numel, chunks = x.numel(), 2
    exact = reference.encode(x, config, chunks)
    found = launch.encode(x.to(device), config, chunks).cpu()
    chunk = config.chunk_numel(numel, chunks)
    assert_wires_alike(found, exact, config, chunk)
    lists = exact[:, config.lists_at(chunk) :].clone().view(torch.int32)
    assert bool((lists > 0).any()) == (count > 0) or count > outliers.SLOTS

    loose = dict(rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-4)
    y = launch.decode(exact.to(device), config, shape, dtype).cpu()
    torch.testing.assert_close(y, reference.decode(exact, config, shape, dtype), **loose)
    strided = torch.full((shape[0], 3 * config.group_size), 7.0, dtype=dtype)[
        :, : config.group_size
    ]
    small = reference.encode(
        strided.copy_(with_outliers(tuple(strided.shape), min(count, 3), seed)), config
    )
    assert_wires_alike(
        launch.encode(strided.to(device), config).cpu(), small, config, strided.numel()
    )
    into = torch.empty_like(strided, device=device)
    launch.decode(small.to(device), config, tuple(strided.shape), dtype, out=into)
    expected = reference.decode(small, config, tuple(strided.shape), dtype)
    torch.testing.assert_close(into.cpu(), expected, **loose)

    senders = [with_outliers(shape, count, 10 * seed + w, near=600 * (w % 2)) for w in range(3)]
    stack = torch.cat([reference.encode(sender, config) for sender in senders])
    total = launch.decode_sum(stack.to(device), config, shape, torch.float32).cpu()
    expected = reference.decode_sum(stack, config, shape, torch.float32)
    torch.testing.assert_close(
        total, expected, rtol=1e-5, atol=1e-5 + 2e-7 * float(expected.abs().max())
    )
    for config_out in (
        config,
        replace(config, format="int8" if config.format == "int4" else "int4", scales="single"),
    ):
        expected = reference.decode_sum_encode(stack, config, numel, config_out=config_out)[None]
        again = launch.decode_sum_encode(stack.to(device), config, numel, config_out).cpu()[None]
        assert_wires_alike(again, expected, config_out, numel)


def check_values_apart(encode, decode, dtype: torch.dtype, device: str = "cpu") -> None:
    """Values apart in a channel whose others are equal arrive, and the other channels are not disturbed.

    At several constants and numbers of tokens, by channel_norm's ``encode`` and
    ``decode``; and a channel of mean 300 and spread 0.5, which bf16 rounds to few values.
    """
    config = CodecConfig("int6", 64, "single", hadamard=False, outliers=True)
    for constant, tokens, count in ((0.0, 64, 1), (0.5, 300, 2), (300.0, 64, 3), (-7.0, 130, 1)):
        layout = ChannelNormLayout(tokens, 128, config)
        plain = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(count))
        plain[:, 5] = constant
        x = plain.clone()
        places = torch.arange(count) * 6 + 2
        x[places, 5] = torch.tensor([-300.0, 200.0, 100.0])[:count] + constant
        plain, x = plain.to(dtype), x.to(dtype)
        quiet, y = (
            decode(encode(v.to(device), layout), layout, dtype).cpu().float() for v in (plain, x)
        )
        case = (constant, tokens, count, dtype)
        distance = (x[places, 5].float() - constant).abs()
        assert ((y - x.float())[places, 5].abs() <= 0.04 * distance).all(), case
        others = torch.arange(128) != 5
        errors = [(a - b.float())[:, others].norm() for a, b in ((y, x), (quiet, plain))]
        assert errors[0] <= 1.1 * errors[1], case
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(7))
    x[:, ::2] = 300 + 0.5 * x[:, ::2]
    x = x.to(dtype)
    layout = ChannelNormLayout(300, 64, config)
    y = decode(encode(x.to(device), layout), layout, torch.float32).cpu()
    apart = (x[:, ::2].float() - 300).abs() > 1.5
    assert apart.any() and ((y - x.float())[:, ::2][apart].abs() <= 0.5).all()
    assert (y - x.float())[:, 1::2].norm() < 0.05 * x[:, 1::2].float().norm()
