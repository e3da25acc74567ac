"""A fast launch must choose the kernel that Triton would choose, and give it the same arguments."""

import random
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime.jit import JITFunction

from taco_kernels.common import fast_launch
from taco_kernels.common.fast_launch import Launch
from tests.kernels.recorded_launches import FAST, Record, Recorder, recorded_launches

needs_fast_launches = pytest.mark.skipif(
    fast_launch.unsupported() is not None,
    reason=f"no fast launches here: {fast_launch.unsupported()}",
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


def is_fast(record: Record) -> bool:
    """Return True if Triton had no part in a launch."""
    return record.hooks == FAST


def without_hooks(records: list[Record]) -> list[Record]:
    """Return launches as the kernel sees them: by Triton and fast they must be equal."""
    return [record._replace(hooks=()) for record in records]


def compare(calls, records: list[Record]) -> None:
    """Make every call by Triton, then twice as fast launches in a shuffled order.

    A call is a function without arguments whose launches take the same arguments each time. ``records`` is the
    list that launches are recorded in.
    """
    expected = []
    for call in calls:
        records.clear()
        with mock.patch.object(fast_launch, "_always_triton", True):
            call()
        assert records and not any(is_fast(record) for record in records)
        expected.append(without_hooks(records))
    order = list(range(len(calls)))
    for attempt in range(2):
        random.Random(attempt).shuffle(order)
        for number in order:
            records.clear()
            calls[number]()
            assert without_hooks(records) == expected[number]
            # The first call of each kind goes through Triton, to learn which kernel it chooses.
            if attempt > 0:
                assert all(is_fast(record) for record in records), number


SIZES = [(1, 1, (3, 4)), (16, 1, (3, 4)), (17, 2**31, (1, 16)), (-16, 2**40 + 1, (2**31, 1))]
"""numel, stride and pair of small_kernel: ones, multiples of 16 and none, of 32 and 64 bits."""
CONSTANTS = dict(T=16, num_warps=1)


@needs_fast_launches
def test_tensors_and_sizes_have_kernels_of_their_own() -> None:
    """Compiled kernels: addresses that divide by 16 and that do not, dtypes, and SIZES."""
    base = {dtype: torch.zeros(256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    out = torch.zeros(256)
    calls = []
    with recorded_launches(small_kernel, compiled=True) as (records, _):
        for fixed in SIZES:
            prepared = Launch(small_kernel, (3,), fixed, CONSTANTS)
            launches = ((torch.bfloat16, 0, 1), (torch.bfloat16, 1, 2**31), (torch.float32, 4, -7))
            for dtype, offset, late in launches:
                tensors = base[dtype][offset:], out[offset // 4 :]
                calls.append(lambda p=prepared, t=tensors, n=late: p(t, (n,)))
        compare(calls, records)


@needs_fast_launches
def test_late_integers_have_kernels_by_their_width() -> None:
    """At both ends of int32, int64 and uint64; beyond is an error of the launcher."""
    tensors = torch.zeros(256), torch.zeros(256)
    calls = []
    with recorded_launches(small_kernel, compiled=True) as (records, _):
        prepared = Launch(small_kernel, (3, 2), SIZES[0], CONSTANTS)
        for late in (0, -(2**31), 2**31 - 1, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)):
            calls.append(lambda n=late: prepared(tensors, (n,)))
        compare(calls, records)
        with pytest.raises(OverflowError):
            prepared(tensors, (2**64,))


def small_launch() -> Launch:
    """Return a launch of small_kernel for two tensors of 16 values and an integer."""
    return Launch(small_kernel, (1,), (16, 1, (1, 1)), CONSTANTS)


@needs_fast_launches
def test_the_stream_is_the_current_one() -> None:
    x = torch.zeros(16)
    prepared = small_launch()
    with recorded_launches(small_kernel) as (records, device):
        for device.stream in (5, 6, 7):
            prepared((x, x), (3,))
        assert [record.stream for record in records] == [5, 6, 7]
        assert [is_fast(record) for record in records] == [False, True, True]


@needs_fast_launches
def test_each_device_has_a_kernel_of_its_own() -> None:
    """A kernel that was chosen on one device does not serve another."""
    x = torch.zeros(16)
    prepared = small_launch()
    with recorded_launches(small_kernel) as (records, device):
        for device.number in (0, 0, 1, 0, 1):
            prepared((x, x), (3,))
        functions = [record.function for record in records]
        first = functions[0]
        second = functions[2]
        assert first != second
        assert functions == [first, first, second, first, second]
        assert [is_fast(record) for record in records] == [False, True, False, True, True]


@pytest.fixture
def launches_fast():
    """A function that launches once more and returns whether Triton had no part in it."""
    x = torch.zeros(16)
    prepared = small_launch()
    with recorded_launches(small_kernel) as (records, _):

        def fast() -> bool:
            records.clear()
            prepared((x, x), (3,))
            return is_fast(records[0])

        fast()  # learns the kernel
        assert fast()
        yield fast


@needs_fast_launches
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_every_launch(name: str, launches_fast) -> None:
    """While it is in Triton's chain."""
    seen = []
    chain = getattr(knobs.runtime, name)
    chain.add(seen.append)
    try:
        assert not launches_fast()
        assert len(seen) == 1
    finally:
        chain.calls.clear()
    assert launches_fast()


SEEN = []
"""What the watchers below were told."""


def noting_hook(*args, **kwargs) -> None:
    """Hook that notes its call."""
    SEEN.append(args)


def stages_hook(*_) -> tuple[str, str]:
    """Return a key and a hash of stages that somebody adds to the compiler."""
    return "key", "hash"


def another_run(self, *args, run=JITFunction.run, **kwargs):
    """Replace JITFunction.run, as a profiler may."""
    return run(self, *args, **kwargs)


WATCHERS = {
    "a hook in place of Triton's chain": (knobs.runtime, "launch_enter_hook", noting_hook, 1),
    "no exit hook": (knobs.runtime, "launch_exit_hook", None, 0),
    "a stage of the compiler's": (knobs.runtime, "add_stages_inspection_hook", stages_hook, 0),
    "debug mode": (knobs.runtime, "debug", True, 0),
    "instrumentation": (knobs.compilation, "instrumentation_mode", "some", 0),
    "a hook before the run": (small_kernel, "pre_run_hooks", [noting_hook], 1),
    "another run": (JITFunction, "run", another_run, 0),
}
"""Owner, attribute and value of what watches launches, and how often it notes one."""


@needs_fast_launches
@pytest.mark.parametrize("watcher", WATCHERS)
def test_what_watches_launches_gets_them(watcher: str, launches_fast, monkeypatch) -> None:
    owner, name, value, notes = WATCHERS[watcher]
    SEEN.clear()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert not launches_fast()
    assert len(SEEN) == notes
    assert launches_fast()


@needs_fast_launches
def test_an_integer_that_would_be_specialised_on_is_refused() -> None:
    x = torch.zeros(16)
    with recorded_launches(unmarked_kernel) as (records, _):
        with pytest.raises(TypeError, match="late=3 changes from call to call"):
            Launch(unmarked_kernel, (1,), (), dict(T=16))((x,), (3,))
        assert not records


@needs_fast_launches
def test_a_late_bool_is_refused() -> None:
    """Triton specialises on it."""
    x = torch.zeros(16)
    with recorded_launches(small_kernel) as (records, _):
        with pytest.raises(TypeError, match="late=True"):
            small_launch()((x, x), (True,))
        assert not records


@needs_fast_launches
def test_missing_constants_are_named() -> None:
    x = torch.zeros(16)
    with recorded_launches(small_kernel) as (records, _):
        with pytest.raises(TypeError, match=r"no constants for \['late', 'T'\]"):
            Launch(small_kernel, (1,), (16, 1, (1, 1)), dict(num_warps=1))((x, x))
        assert not records


@needs_fast_launches
def test_start_keeps_launches() -> None:
    """They are kept by kernel, grid, fixed arguments and constants: the second call of each is fast."""
    x = torch.zeros(16)
    calls = (((1,), (1,), 16), ((2,), (1,), 16), ((1,), (16,), 16), ((1,), (1,), 8))
    with recorded_launches(unmarked_kernel) as (records, _):
        for grid, fixed, T in calls:
            for repeated in (False, True):
                fast_launch.start(unmarked_kernel, grid, (x,), fixed, T=T, num_warps=1)
                assert is_fast(records[-1]) == repeated
                assert records[-1].grid[0] == grid[0]
                assert records[-1].arguments == (x.data_ptr(), *fixed, T)
        # Of four launches two differ in the grid alone, and have one kernel.
        assert len({record.function for record in records}) == 3


@pytest.mark.parametrize("version", ["3.10.0", "3.5.1", "4.0.0+git1", "unknown"])
def test_an_unknown_triton_launches_by_itself_and_says_so(version: str, monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fast_launch.unsupported() == f"Triton {version} is none of 3.6 to 3.9"
    assert fast_launch.slow_launches().startswith(
        f"fast kernel launches are off, since Triton {version} is none of 3.6 to 3.9: each launch takes "
    )
    monkeypatch.setattr(fast_launch, "_SUPPORTED", False)
    x = torch.zeros(16)
    prepared = small_launch()
    with recorded_launches(small_kernel) as (records, _):
        for _ in range(3):
            prepared((x, x), (3,))
        assert len(records) == 3
        assert not any(is_fast(record) for record in records)


def by_32_bytes(specialise, backend, value, *options):
    """Specialise on addresses that divide by 32."""
    if hasattr(value, "data_ptr"):
        return "*bf16", "D" if value.data_ptr() % 32 == 0 else ""
    return specialise(backend, value, *options)


def without_unsigned(specialise, backend, value, *options):
    """Pass large integers as signed ones."""
    type_, key = specialise(backend, value, *options)
    return type_.replace("u64", "i64"), key


@needs_fast_launches
@pytest.mark.parametrize("other", [by_32_bytes, without_unsigned])
def test_another_specialisation_is_noticed(other, monkeypatch) -> None:
    module = fast_launch.jit
    other = partial(other, module.native_specialize_impl)
    assert fast_launch.unsupported() is None
    monkeypatch.setattr(module, "native_specialize_impl", other)
    assert "specialises kernels on something else" in fast_launch.unsupported()


class OtherLauncher(Recorder):
    """A launcher that passes something else on; ``rest`` says what after grid and stream."""

    calls = 0

    def __call__(self, x, y, z, stream, function, metadata, called_with, enter, leave, *args):
        if enter is not None:
            OtherLauncher.calls += 1
            return
        self.launch(x, y, z, stream, *self.rest(function, args))


OTHERS = {
    "arguments reversed": lambda self, function, args: (function, *reversed(args)),
    "an address computed": lambda self, function, args: (function, args[0].data_ptr(), args),
    "an argument more": lambda self, function, args: (function, (*args, 0)),
    "an argument twice": lambda self, function, args: (function, args[0], args),
    "arguments left out": lambda self, function, args: (function, args[1:]),
}


@needs_fast_launches
@pytest.mark.parametrize("other", OTHERS)
def test_a_launcher_of_another_form_launches_by_itself(other: str, monkeypatch) -> None:
    monkeypatch.setattr(OtherLauncher, "rest", OTHERS[other], raising=False)
    monkeypatch.setattr(OtherLauncher, "calls", 0)
    x = torch.zeros(16)
    prepared = small_launch()
    with recorded_launches(small_kernel) as (records, device):
        device.launcher_cls = lambda src, metadata: OtherLauncher(records)
        for _ in range(3):
            prepared((x, x), (3,))
        assert OtherLauncher.calls == 3
        monkeypatch.setattr(nvidia_driver, "CudaLauncher", OtherLauncher)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert "has another form: each launch takes the host" in fast_launch.slow_launches()


@needs_fast_launches
def test_nothing_is_said_where_launches_are_fast(monkeypatch) -> None:
    assert fast_launch.slow_launches() is None  # no GPU: no kernel runs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with recorded_launches():
        assert fast_launch.slow_launches() is None
