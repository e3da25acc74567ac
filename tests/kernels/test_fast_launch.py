"""A fast launch must choose the kernel that Triton would choose, and give it the same arguments."""

import random as python_random
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from taco_kernels.common import fast_launch
from taco_kernels.common.fast_launch import Launch
from tests.kernels.recorded_launches import FAST, KNOWN, Record, recorded_launches

pytestmark = pytest.mark.skipif(
    not KNOWN,
    reason=f"follows the launcher of Triton {fast_launch.KNOWN_TRITON}x (constraints.txt)",
)


@triton.jit(do_not_specialize=["late"])
def small_kernel(x, out, numel, stride, pair, late, T: tl.constexpr):
    """out = x + late, as far as numel and the pair's product allow."""
    at = tl.arange(0, T)
    value = tl.load(x + at * stride, mask=at < numel * pair[0] * pair[1]) + late
    tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit
def unmarked_kernel(x, late, T: tl.constexpr):
    """``late`` is specialised on."""
    tl.store(x + tl.arange(0, T), late)


def compare(calls, records: list[Record]) -> None:
    """Make every call by Triton, then twice as fast launches in a shuffled order.

    A call is a function without arguments whose launches take the same arguments each time.
    """
    expected = []
    for call in calls:
        records.clear()
        with mock.patch.object(fast_launch, "_always_triton", True):
            call()
        assert records and all(record.hooks != FAST for record in records)
        expected.append(list(records))
    order = list(range(len(calls)))
    for attempt in range(2):
        python_random.Random(attempt).shuffle(order)
        for number in order:
            records.clear()
            calls[number]()
            found, wanted = (
                [r._replace(hooks=()) for r in some] for some in (records, expected[number])
            )
            assert found == wanted
            if attempt:
                assert all(record.hooks == FAST for record in records), number


def test_every_specialisation_has_a_kernel_of_its_own() -> None:
    """Compiled kernels: addresses, dtypes, sizes of one, multiples of 16 and none, 32 and 64 bits."""
    base = {dtype: torch.zeros(256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    out = torch.zeros(256)
    numbers = [(1, 1, (3, 4)), (16, 1, (3, 4)), (17, 2**31, (1, 16)), (-16, 2**40 + 1, (2**31, 1))]
    calls = []
    with recorded_launches(small_kernel, compiled=True) as (records, _):
        for fixed in numbers:
            prepared = Launch(small_kernel, (3,), fixed, dict(T=16, num_warps=1))
            launches = ((torch.bfloat16, 0, 1), (torch.bfloat16, 1, 2**31), (torch.float32, 4, -7))
            for dtype, offset, late in launches:
                tensors = base[dtype][offset:], out[offset // 4 :]
                calls.append(lambda p=prepared, t=tensors, n=late: p(t, (n,)))
        prepared = Launch(small_kernel, (3, 2), numbers[0], dict(T=16, num_warps=1))
        for late in (0, -(2**31), 2**31 - 1, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)):
            calls.append(lambda n=late: prepared((base[torch.float32], out), (n,)))
        compare(calls, records)
        with pytest.raises(OverflowError):
            prepared((base[torch.float32], out), (2**64,))


def test_current_device_and_stream() -> None:
    """Each device has a kernel of its own; the stream is the current one."""
    x = torch.zeros(16)
    prepared = Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(T=16, num_warps=1))
    with recorded_launches(small_kernel) as (records, device):
        for device.number, device.stream in ((0, 5), (0, 6), (1, 6), (0, 7), (1, 8)):
            prepared((x, x), (3,))
        assert [record.stream for record in records] == [5, 6, 7, 7, 9]
        functions = [record.function for record in records]
        assert functions == [functions[0], functions[0], functions[2], functions[0], functions[2]]
        assert functions[0] != functions[2]
        assert [record.hooks == FAST for record in records] == [False, True, False, True, True]


def test_what_watches_launches_sees_them(monkeypatch) -> None:
    """Hooks, debug mode, instrumentation and a replaced JITFunction.run get every launch."""
    x, seen = torch.zeros(16), []
    prepared = Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(T=16, num_warps=1))
    with recorded_launches(small_kernel) as (records, _):

        def fast() -> bool:
            records.clear()
            prepared((x, x), (3,))
            return records[0].hooks == FAST

        fast()
        assert fast()
        for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            chain.add(seen.append)
            assert not fast() and len(seen) == 1
            chain.remove(seen.pop)  # not there: nothing happens
            chain.calls.clear()
            seen.clear()
            assert fast()
        run = JITFunction.run
        for owner, name, value in (
            (knobs.runtime, "launch_enter_hook", seen.append),
            (knobs.runtime, "launch_exit_hook", None),
            (knobs.runtime, "debug", True),
            (knobs.compilation, "instrumentation_mode", "some"),
            (small_kernel, "pre_run_hooks", [lambda *args, **kwargs: seen.append(args)]),
            (JITFunction, "run", lambda self, *args, **kwargs: run(self, *args, **kwargs)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value)
                assert not fast(), name
            assert fast(), name
        assert len(seen) == 2  # the enter hook and the hook before the run


def test_an_unknown_triton_launches_by_itself(monkeypatch) -> None:
    assert fast_launch.supported()
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert not fast_launch.supported()
    monkeypatch.setattr(fast_launch, "_SUPPORTED", False)
    x = torch.zeros(16)
    prepared = Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(T=16, num_warps=1))
    with recorded_launches(small_kernel) as (records, _):
        for _ in range(3):
            prepared((x, x), (3,))
        assert len(records) == 3 and all(record.hooks != FAST for record in records)


def test_kernels_that_it_cannot_serve_are_refused() -> None:
    x = torch.zeros(16)
    with recorded_launches(small_kernel, unmarked_kernel) as (records, _):
        with pytest.raises(TypeError, match="late=3 changes from call to call"):
            Launch(unmarked_kernel, (1,), (), dict(T=16))((x,), (3,))
        with pytest.raises(TypeError, match=r"no constants for \['late', 'T'\]"):
            Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(num_warps=1))((x, x))
        with pytest.raises(TypeError, match="late=True"):
            Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(T=16))((x, x), (True,))
        assert not records


def test_start_keeps_launches() -> None:
    """By kernel, grid, fixed arguments and constants."""
    x = torch.zeros(16)
    with recorded_launches(small_kernel, unmarked_kernel) as (records, _):
        for grid, fixed, T in (
            ((1,), (1,), 16),
            ((2,), (1,), 16),
            ((1,), (16,), 16),
            ((1,), (1,), 8),
        ):
            for attempt in range(2):
                fast_launch.start(unmarked_kernel, grid, (x,), fixed, T=T, num_warps=1)
                assert (records[-1].hooks == FAST) == bool(attempt)
                assert records[-1].grid[0] == grid[0] and records[-1].arguments == (
                    x.data_ptr(),
                    *fixed,
                    T,
                )
        assert (
            len({record.function for record in records}) == 3
        )  # of four launches two differ in the grid
