"""A fast launch must choose the kernel that Triton would choose, and give it the same arguments."""

import itertools
import random as python_random

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from taco_kernels.common import fast_launch
from taco_kernels.common.fast_launch import Launch, plain_launches
from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import CodecConfig, launch
from tests.kernels.recorded_launches import FAST, KNOWN, Record, recorded_launches

pytestmark = pytest.mark.skipif(
    not KNOWN, reason=f"follows the launcher of Triton {fast_launch.KNOWN_TRITON}x (constraints.txt)"
)

CODEC = (
    launch.encode_kernel,
    launch.decode_kernel,
    launch.decode_sum_kernel,
    launch.decode_sum_encode_kernel,
)
COLLECTIVES = (
    collectives.all_reduce_kernel,
    collectives.reduce_scatter_kernel,
    collectives.all_gather_kernel,
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


def masked(records: list[Record], addresses: bool) -> list[Record]:
    """Records without the hooks and, unless wanted, without what can only be an address."""
    hidden = [record._replace(hooks=()) for record in records]
    if addresses:
        return hidden
    big = lambda value: type(value) is int and value > 2**40  # noqa: E731
    return [r._replace(arguments=tuple("address" if big(v) else v for v in r.arguments)) for r in hidden]


def compare(calls, records, addresses: bool = True) -> int:
    """Make every call by Triton, then twice as fast launches in a shuffled order; how many calls there were.

    A call is a function without arguments whose launches take the same arguments each time, if ``addresses``
    then those too.
    """
    expected = []
    for call in calls:
        records.clear()
        with plain_launches():
            call()
        assert records and all(record.hooks != FAST for record in records)
        expected.append(list(records))
    order = list(range(len(calls)))
    for attempt in range(2):
        python_random.Random(attempt).shuffle(order)
        for number in order:
            records.clear()
            calls[number]()
            assert masked(records, addresses) == masked(expected[number], addresses)
            if attempt:
                assert all(record.hooks == FAST for record in records), number
    return len(calls)


def test_every_specialisation_has_a_kernel_of_its_own() -> None:
    """Compiled kernels: addresses, dtypes, sizes of one, multiples of 16 and none, 32 and 64 bits."""
    base = {dtype: torch.zeros(256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    out = torch.zeros(256)
    numbers = [(1, 1, (3, 4)), (16, 1, (3, 4)), (17, 2**31, (1, 16)), (-16, 2**40 + 1, (2**31, 1))]
    calls = []
    with recorded_launches(small_kernel, compiled=True) as (records, _):
        for fixed in numbers:
            prepared = Launch(small_kernel, (3,), fixed, dict(T=16, num_warps=1))
            for dtype, offset, late in (
                (torch.bfloat16, 0, 1),
                (torch.bfloat16, 1, 2**31),
                (torch.float32, 4, -7),
            ):
                tensors = base[dtype][offset:], out[offset // 4 :]
                calls.append(lambda p=prepared, t=tensors, n=late: p(t, (n,)))
        prepared = Launch(small_kernel, (3, 2), numbers[0], dict(T=16, num_warps=1))
        for late in (0, -(2**31), 2**31 - 1, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)):
            calls.append(lambda n=late: prepared((base[torch.float32], out), (n,)))
        compare(calls, records)
        with pytest.raises(OverflowError):
            prepared((base[torch.float32], out), (2**64,))


def tensors_of(numel: int, dtype: torch.dtype, group_size: int) -> list[torch.Tensor]:
    """Contiguous tensors whose addresses divide by 16 and do not, and rows that kernels can walk."""
    base = torch.zeros(numel + 64, dtype=dtype)
    tensors = [base[:numel], base[1 : numel + 1], base[8 : numel + 8].view(4, -1)]
    if numel % (4 * group_size) == 0:
        width = numel // 4
        tensors += [torch.zeros(4, 2, width + extra, dtype=dtype)[:, 0, :width] for extra in (8, 3)]
    return tensors


@pytest.mark.parametrize(
    "config", [CodecConfig("int8"), CodecConfig("int6", 32, "single")], ids=["int8", "int6"]
)
def test_codec_calls(config: CodecConfig) -> None:
    """Each operation over sizes, alignments, strides, dtypes, and given outputs."""
    calls = []
    sizes = (4, 128, 4 * 128, 3 * 128, 4 * 131)
    for numel, dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        for x in tensors_of(numel, dtype, config.group_size):
            for chunks in (1, 3):
                wire = torch.zeros(
                    chunks, config.wire_bytes(config.chunk_numel(numel, chunks)), dtype=torch.uint8
                )
                calls.append(lambda a=(x, config, chunks): launch.encode(*a))
                calls.append(lambda a=(wire, config, x.shape, dtype, x): launch.decode(*a))
            wires = torch.zeros(2, config.wire_bytes(numel), dtype=torch.uint8)
            calls.append(lambda a=(wires, config, x.shape, dtype, x): launch.decode_sum(*a))
            calls.append(lambda a=(wires, config, numel): launch.decode_sum_encode(*a))
    with recorded_launches(*CODEC) as (records, _):
        assert compare(calls, records, addresses=False) > 60


@pytest.mark.parametrize("world_size", [1, 4])
def test_collectives(world_size: int) -> None:
    """All of them, on two channels: their addresses are arguments too."""
    config, other = CodecConfig("int8"), CodecConfig("int6")
    size = channel_bytes(world_size, 8)
    memory = torch.zeros(2, size, dtype=torch.uint8)
    channels = [Channel([one.data_ptr()] * world_size, 0, torch.device("cpu"), 8, 1.0) for one in memory]
    calls = []
    for channel, numel in itertools.product(channels, (4 * 128, 4 * 131, 2**16)):
        for x in tensors_of(numel, torch.bfloat16, config.group_size)[:3]:
            x = x.view(4, -1)
            out, shard = torch.zeros_like(x), x[: 4 // world_size]
            full = torch.zeros(4, x.shape[1], dtype=x.dtype)
            for second in (None, other):
                calls.append(lambda a=(channel, x, config, out, second): collectives.all_reduce(*a))
            scattered = torch.zeros_like(shard)
            calls.append(lambda a=(channel, x, config, scattered): collectives.reduce_scatter(*a))
            wire = torch.zeros(1, other.wire_bytes(shard.numel()), dtype=torch.uint8)
            encoded = (channel, wire, shard.shape, x.dtype, other, full)
            calls.append(lambda a=encoded: collectives.all_gather_encoded(*a))
    with recorded_launches(*COLLECTIVES) as (records, _):
        for call in calls:
            call()  # makes the matrices, by launches of their own
        compare(calls, records)
    collectives._constants.cache_clear()


def jit_functions(*modules) -> list:
    """What modules launch."""
    return list({f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)})


def test_the_other_codecs() -> None:
    """SDP4Bit, TAH-Quant, bitmap-sparse values, over sizes and alignments."""
    from taco_kernels.bitmap_sparse import BitmapLayout
    from taco_kernels.bitmap_sparse import launch as packed
    from taco_kernels.sdp4bit import GroupFormat
    from taco_kernels.sdp4bit import launch as sdp4bit
    from taco_kernels.tah_quant import TahConfig
    from taco_kernels.tah_quant import launch as tah

    def of_sdp4bit(x: torch.Tensor, rotated: bool) -> None:
        rows, numel = x.shape
        format = GroupFormat(8, 128, rotated)
        wires = sdp4bit.quantize(x, format)
        sdp4bit.sum_dequantize(wires[None], format, torch.empty(rows, numel), 0.5)
        sdp4bit.sum_dequantize(wires[None], format, torch.empty(rows, numel), 0.25)
        sdp4bit.sum_requantize(wires[:, None], format, numel, GroupFormat(4, 64, rotated))
        if not rotated:
            sdp4bit.quantize_difference(x[0], x[1], format)
            sdp4bit.add_dequantized(wires, format, x)

    def of_tah(x: torch.Tensor, config) -> None:
        tah.decode(tah.encode(x, config), config, x.shape, x.dtype)

    def of_packed(x: torch.Tensor, remainder) -> None:
        layout = BitmapLayout(x.shape[1], 0.2, 16)
        packed.decode_sum(packed.encode(x, torch.ones(len(x)), layout, remainder), layout)

    calls = []
    for numel in (128, 1000, 4096, 16 * 1001):
        base = torch.zeros(2 * numel + 8)
        for x in (base[: 2 * numel].view(2, numel), base[1 : 2 * numel + 1].view(2, numel)):
            for half in (x, x.bfloat16()):
                calls += [lambda a=(half, r): of_sdp4bit(*a) for r in (False, True)]
                calls += [lambda a=half, c=c: of_tah(a, TahConfig(allocation=c)) for c in ("token", "tile")]
            calls += [lambda a=(x, r): of_packed(*a) for r in (None, x)]
    with recorded_launches(*jit_functions(sdp4bit, tah, packed)) as (records, _):
        compare(calls, records, addresses=False)


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
        for grid, fixed, T in (((1,), (1,), 16), ((2,), (1,), 16), ((1,), (16,), 16), ((1,), (1,), 8)):
            for attempt in range(2):
                fast_launch.start(unmarked_kernel, grid, (x,), fixed, T=T, num_warps=1)
                assert (records[-1].hooks == FAST) == bool(attempt)
                assert records[-1].grid[0] == grid[0] and records[-1].arguments == (x.data_ptr(), *fixed, T)
        assert len({record.function for record in records}) == 3  # of four launches two differ in the grid
