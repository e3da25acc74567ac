"""The Triton kernels under Triton's CPU interpreter, against the reference, at tiny sizes."""

from dataclasses import replace

import pytest

from tests.kernels.interpreter import interpreted, small_tiles

pytestmark = pytest.mark.slow

FORMATS = ("fp8-e4m3", "fp8-e5m2", "int8", "int6", "int5", "int4")
EVERY_CASE = ("fp8-e4m3", "int6")  # others: each configuration is strided in one format and not in the next
SMALL = ("fp8-e5m2", "int5")  # with transforms of 64 points and butterflies, as on sm_86


def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "50"


def main() -> int:
    """All formats; exits with a traceback on a difference."""
    return sum(check_format(format) for format in FORMATS)


def check_format(format: str) -> int:
    """Every kernel in a spread of configurations of one format; their number."""
    import torch

    from taco_kernels.common.device import Device, device_number
    from taco_kernels.taco import CodecConfig, launch, reference, spec
    from tests.kernels.wires.taco import difference

    small_tiles(spec.TUNING)
    spec.LEAST_TILE, spec.MOST_RANKS = 256, 1  # and tiles of a chunk, where groups are short
    small = Device(multiprocessors=4, capability=(8, 6), interpret=True)
    assert (small.point, device_number(-1).point) == (64, 128)
    launch.device_number = lambda index: small if format in SMALL else device_number(index)

    def alike(expected, found, config, codes=0.004) -> None:
        """A sum in another order moves a value that lies within 1e-6 of the middle between two codes."""
        apart = difference(expected, found, config)
        assert apart.grid_steps <= 1 and apart.codes < codes and apart.padding, (config, apart)
        assert apart.scales <= (2**-7 if config.scales != "dual" else 1e-6), (config, apart)

    cases = together = 0
    for number, (group_size, scales, hadamard, dtype) in enumerate(
        (
            (32, "dual", True, torch.float32),
            (64, "single", True, torch.bfloat16),
            (128, "dual", True, torch.float16),
            (128, "single", False, torch.float32),
            (256, "single", True, torch.float32),
            (64, "signed", False, torch.float32),
            (128, "signed", True, torch.bfloat16),
        )
    ):
        if scales == "signed" and format.startswith("fp8"):
            continue
        config = CodecConfig(format, group_size, scales, hadamard)
        both, one = (False, True), ((number + FORMATS.index(format)) % 2 == 0,)
        for strided in both if format in EVERY_CASE else one:
            g = torch.Generator().manual_seed(2 * number + strided)
            base = torch.randn(3, 2, 2 * group_size + 16, generator=g)
            base[1, 0, 40] = float("nan") if strided else 50.0
            # strided: rows of one group inside a wider tensor; else a size that divides nothing
            x = (base[:, :, 16 : 16 + group_size] if strided else base[:, :, 1:]).to(dtype)
            numel, shape = x.numel(), x.shape
            exact = reference.encode(x, config, 2)
            alike(exact, launch.encode(x, config, 2), config)

            # chunks of which a tile holds several, the last tile not all of them
            width = (1 + number % 3) * max(group_size, 256 if number % 2 else 128)
            short = torch.randn(9, width, generator=torch.Generator().manual_seed(number)).to(dtype)
            rows, like = reference.encode(short, config, 9), (config, short.numel(), None)
            wires = (9,), dtype, 0
            encoding = launch._plan("encode", *like, *wires, -1).launch.constants["C"]
            wires = rows.shape, torch.uint8, rows.shape[1]
            decoding = launch._plan("decode", *like, *wires, -1).launch.constants["C"]
            together += encoding.ROW.value > 0 and decoding.ROW.value > 0
            alike(rows, launch.encode(short, config, 9), config)
            again = launch.decode(rows, config, short.shape, dtype)
            expected = reference.decode(rows, config, short.shape, dtype)
            # sums of codes are exact in any order, but for e5m2's, which span 32 binades; and the interpreter
            # truncates where bf16 is rounded
            ulp = 2**-7 if dtype == torch.bfloat16 else 0.0
            bit = 2**-22 if format == "fp8-e5m2" and dtype == torch.float32 else 0.0
            torch.testing.assert_close(again, expected, rtol=ulp + bit, atol=bit)

            y = torch.full(shape, 7.0, dtype=dtype)
            target = torch.full((3, 2, 3 * group_size), 7.0, dtype=dtype)[:, :, :group_size] if strided else y
            launch.decode(exact, config, shape, dtype, out=target)
            expected = reference.decode(exact, config, shape, dtype)
            torch.testing.assert_close(target, expected, rtol=ulp + bit, atol=bit, equal_nan=True)
            assert bool(target.isnan().any()) == strided

            senders = torch.randn(3, numel, generator=g)
            stack = torch.cat([reference.encode(s, config) for s in senders])
            for wires in (stack, stack[:2]):
                total = launch.decode_sum(wires, config, shape, torch.float32)
                expected = reference.decode_sum(wires, config, shape, torch.float32)
                torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)

            expected = reference.decode_sum_encode(stack, config, numel)
            again = launch.decode_sum_encode(stack, config, numel)
            # sums of codes times bf16 steps can lie in the middle between two codes, where the interpreter,
            # without a fused multiply-add, rounds twice
            middles = 0.01 if scales != "dual" and not hadamard else 0.004
            alike(expected[None], again[None], config, middles)

            other = replace(config, format="int8" if format == "int4" else "int4")
            expected = reference.decode_sum_encode(stack, config, numel, config_out=other)
            again = launch.decode_sum_encode(stack, config, numel, config_out=other)
            alike(expected[None], again[None], other, 0.01)
            cases += 1
    assert 2 * together >= cases, "chunks of which a tile holds several"
    return cases
