"""A threshold among sampled magnitudes: the kernels under Triton's CPU interpreter, against a sort."""

import pytest
import torch

from tests.unit.interpreter import output_interpreted

KINDS = ("spread", "ties", "zeros", "denormals", "odd", "alike", "rows")


def values(kind: str, numel: int) -> torch.Tensor:
    """fp32[3, numel] that make the choice hard."""
    g = torch.Generator().manual_seed(numel)
    x = torch.randn(3, numel, generator=g)
    if kind == "spread":
        x *= torch.randn(3, numel, generator=g).mul(4).exp()
    elif kind == "ties":
        x = x.mul(2).round()
    elif kind == "zeros":
        x = torch.where(torch.rand(3, numel, generator=g) < 0.5, -0.0, x)
    elif kind == "denormals":
        x *= 1e-41
    elif kind == "odd":
        x[:, ::7], x[:, 1::7], x[0, 2::7] = float("nan"), float("-inf"), float("inf")
    elif kind == "alike":
        x[:] = torch.tensor([[1.5], [0.0], [float("nan")]])
    elif kind == "rows":  # sizes that depend on the place
        x *= torch.arange(numel).div(64, rounding_mode="floor") % 9
    return x


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit, but for which NaN it is."""
    number = ~expected.isnan()
    return bool(
        (found.isnan() == ~number).all()
        and (found.view(torch.int32)[number] == expected.contiguous().view(torch.int32)[number]).all()
    )


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return output_interpreted(__file__).splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_find_what_a_sort_finds(printed: list[str], kind: str) -> None:
    assert f"{kind}: 9 cases, 0 differ" in printed


def test_a_band_that_misses_costs_time_only(printed: list[str]) -> None:
    assert "missed: 6 cases, 0 differ" in printed


def test_a_whole_sample(printed: list[str]) -> None:
    """65536 samples, the programs and bands of a real launch."""
    assert "whole: 2 cases, 0 differ" in printed


def test_positions_need_no_division(printed: list[str]) -> None:
    assert "positions: 7 sizes, 0 differ" in printed


def test_needs_rows_without_gaps() -> None:
    pytest.importorskip("triton")
    from taco_kernels.count_sketch.order_launch import largest_of_sample, plan_of

    for x in (torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64, 2).t()):
        with pytest.raises(ValueError, match="float32 rows without gaps"):
            largest_of_sample(x, 65536, 1)
    with pytest.raises(ValueError, match="power of two"):
        plan_of(100, 65537, 1)


def test_nothing_spills() -> None:
    """Both kernels, compiled ahead of time for sm_90, hold their keys in registers."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from taco_kernels.benchmarks.instructions import figures_of
    from taco_kernels.count_sketch import order_kernels, order_launch

    pointers = dict(x="*fp32", keys="*i32", notes="*i64", thresholds="*fp32", x_stride="i64")
    programs, slots = order_launch.PROGRAMS, order_launch.SLOTS
    for kernel, warps, constants in (
        (
            order_kernels.band_kernel,
            order_launch.PROGRAM_WARPS,
            dict(LOG=16, SAMPLED=True, M=order_launch.MOST_SHARED),
        ),
        (order_kernels.pick_kernel, order_launch.PICK_WARPS, dict(OWN=65536 // programs)),
    ):
        constants |= dict(P=programs, SLOTS=slots)
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
        source = ASTSource(kernel, signature, values)
        options = dict(num_warps=warps)
        figures = figures_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), 1)
        assert figures.spills == 0 and figures.registers < 255


def main() -> None:
    """A few programs, few slots, small samples: several chunks of slots even here."""
    from taco_kernels.count_sketch import order_launch as launch
    from taco_kernels.count_sketch.selection import MOST_LOCAL_SAMPLES, needed, sorted_sample
    from tests.unit.interpreter import speed_up

    speed_up()
    real = launch.PROGRAMS, launch.LEAST_SHARED, launch.MOST_SHARED, launch.SLOTS
    launch.PROGRAMS, launch.LEAST_SHARED, launch.MOST_SHARED, launch.SLOTS = 4, 64, 256, 16

    def differs(x: torch.Tensor, most: int, need: int) -> int:
        found = launch.largest_of_sample(x, most, need)
        return not same(found, sorted_sample(x, most)[:, need - 1])

    cases = [(1, 1), (37, 12), (256, 70), (256, 256), (1000, 1), (1000, 128), (5003, 60), (5003, 200)]
    cases += [(70_001, 51)]
    for kind in KINDS:
        wide = [(values(kind, numel + 5)[:, 5:], need) for numel, need in cases]  # strided, not aligned
        print(f"{kind}: {len(cases)} cases, {sum(differs(x, 256, need) for x, need in wide)} differ")
    plan_of, missed = launch.plan_of, 0
    for low, high in ((4, 2), (64, 63)):  # too far up, and too far down
        launch.plan_of = lambda *sizes, ends=(low, high): plan_of(*sizes)._replace(low=ends[0], high=ends[1])
        missed += sum(differs(values(kind, 3001), 256, 100) for kind in ("spread", "rows", "odd"))
    print(f"missed: 6 cases, {missed} differ")
    launch.plan_of = plan_of
    launch.PROGRAMS, launch.LEAST_SHARED, launch.MOST_SHARED, launch.SLOTS = real
    launch.plan_of.cache_clear()
    wrong = sum(
        differs(values(kind, 200_003)[:1], MOST_LOCAL_SAMPLES, needed(200_003, share))
        for kind, share in (("spread", 0.2), ("zeros", 0.6))
    )
    print(f"whole: 2 cases, {wrong} differ")
    sizes = (65_537, 100_000, 131_072, 10_485_760, 67_108_869, 2**31 + 7, 2**37 + 12_345)
    print(f"positions: {len(sizes)} sizes, {sum(positions_differ(numel) for numel in sizes)} differ")


def positions_differ(numel: int) -> bool:
    """Whether the kernel's positions of 65536 samples are others than the definition's."""
    import triton
    import triton.language as tl

    from taco_kernels.count_sketch import order_kernels
    from taco_kernels.count_sketch.order_launch import plan_of
    from taco_kernels.count_sketch.selection import sample_positions

    @triton.jit
    def write(out, step, fraction, inverse, next_inverse, LOG: tl.constexpr):
        number = tl.arange(0, 2**LOG)
        at = order_kernels.position_of(number, step, fraction, inverse, next_inverse, LOG)
        tl.store(out + number, at)

    globals().update(order_kernels=order_kernels, tl=tl)  # where the interpreter looks for them
    out = torch.zeros(65536, dtype=torch.int64)
    plan = plan_of(numel, 65536, 13_000)
    write[(1,)](out, *plan.strata, LOG=plan.log)
    return not torch.equal(out, sample_positions(numel, 65536))


if __name__ == "__main__":
    main()
