"""The warps that add packed values up, on the CPU: their assembly lane by lane, and their layout."""

import re

import numpy as np
import pytest
import torch

from taco_kernels import packed
from taco_kernels.count_sketch.selection import share_threshold
from taco_kernels.bitmap_sparse import reference
from tests.unit import ptx_warp

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.bitmap_sparse import kernels, launch, pack_kernels, sum_kernels

LANES = np.arange(32)
ONE_EACH = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"


@pytest.mark.parametrize(("numel", "share"), [(1024, 0.2), (1024, 1.0), (700, 0.3), (1021, 0.6)])
def test_sum_of_a_row(numel: int, share: float) -> None:
    """Scan, look-up, loads and sums of a row of three senders, as sum_kernel puts them together."""
    layout = packed.BitmapLayout(numel, share)
    x = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    x[1] *= 2.0**-120  # below the smallest exponent
    wires = reference.encode(x, share_threshold(x, share), layout)
    senders, shift = len(wires), (LANES & 3) * 4
    out_at = wires.numel()
    memory = np.concatenate([wires.numpy().reshape(-1).view(np.uint32), np.full(1024, 7, np.uint32)])
    words = wires[:, layout.words_at :][:, :128].contiguous().numpy().view(np.uint32)
    steps = 2.0 ** (np.maximum(wires[:, layout.exponents_at].numpy(), 32).astype(np.float64) + 2 - 16 - 127)
    bases = [w * layout.wire_bytes for w in range(senders)]

    def run(text: str, **registers: np.ndarray) -> dict[str, np.ndarray]:
        each = {"$" + name[1:]: np.broadcast_to(x, 32).astype(np.uint32) for name, x in registers.items()}
        return ptx_warp.run(text, each, memory)

    places = [run(sum_kernels.scan_assembly.fn(), r1=word, r2=0)["$0"] for word in words]
    text = sum_kernels.sum_assembly.fn(senders, numel % 4 == 0)
    for step in range(4):
        inputs = {}
        for w in range(senders):
            found = run(kernels.LOOK_UP.value, r2=words[w], r3=places[w], r4=8 * step + (LANES >> 2))
            inputs |= {f"r{7 + w}": found["$0"], f"r{7 + senders + w}": bases[w] + 2 * found["$1"]}
            inputs[f"r{7 + 2 * senders + w}"] = np.float32(steps[w]).view(np.uint32)
        for half in range(2):
            at = shift + 16 * half
            offset = 256 * step + (LANES >> 2) * 32 + at
            below = (1 << at) - 1
            run(
                text,
                r1=out_at + 4 * offset,
                r2=numel - offset,
                r3=below,
                r4=below << 2 | 3,
                r5=at,
                r6=0,
                **inputs,
            )
    found = memory[out_at // 4 :].view(np.float32)
    assert np.array_equal(found[:numel], reference.decode_sum(wires, layout).numpy())
    assert (memory[out_at // 4 + numel :] == 7).all(), "nothing is written behind the last value"


def compiled(kernel, warps: int, constants: dict, registers: int | None = None):
    """``kernel`` for 16 bits, whole rows and 1024 values a row, for sm_90."""
    pointers = dict.fromkeys(("words", "starts"), "*i32") | {"values": "*i16", "exponents": "*u8"}
    pointers |= dict.fromkeys(("x", "remainder", "thresholds", "total"), "*fp32") | {"status": "*i64"}
    constants = dict(BITS=16, FLOOR=32, WIDTH=1024, INTERPRET=False) | constants
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if name in constants:
            values[i,] = constants[name]
        else:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options = dict(num_warps=warps, maxnreg=registers)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("senders", [1, 4, 8])
def test_sum_has_one_element_a_thread(senders: int) -> None:
    """What the assembly takes for granted: thread i of a program has element i of a tensor."""
    rows = launch.SUM_ROWS
    kernel = compiled(sum_kernels.sum_kernel, rows, dict(W=senders, WHOLE=True, R=rows))
    layouts = set(re.findall(r"#ttg\.\w+<{.*?}>", kernel.asm["ttgir"]))
    assert layouts == {ONE_EACH} and kernel.metadata.shared == 0
    assert kernel.asm["ptx"].count("ld.global.nc.s16") == 32 * senders


def test_pack_tells_its_count_first() -> None:
    """A word a thread, too; the count is published before anything is stored, and read each time anew."""
    rows, registers = launch.PACK_ROWS, launch.PACK_REGISTERS
    constants = dict(KEEP_REMAINDER=True, R=rows, Z=launch.ZEROS)
    kernel = compiled(pack_kernels.pack_kernel, rows, constants, registers)
    ttgir, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
    inputs = re.findall(r"tt\.elementwise_inline_asm.*-> (?:tensor<\d+x\w+, )?.*?#(\w+)>", ttgir)
    layouts = {re.search(rf"#{name} = (#ttg.*?}}>)", ttgir)[1] for name in inputs}
    assert layouts == {ONE_EACH.replace("[4]", f"[{rows}]")}
    told = ptx.index("atom.global.gpu.relaxed.exch.b64")
    assert "st.global" not in ptx[ptx.index("redux.sync.max") : told]
    assert ptx.count("ld.volatile.global.b64") == 2, "a loop of tiles, and one of what is behind them"
    assert ptx.count("atom.global.gpu.relaxed.exch.b64") == 2


@pytest.mark.parametrize("numel", [1024, 700, 40])
def test_loads_and_stores_of_a_row(numel: int) -> None:
    """A lane's values of each word as far as there are any; and stores of those it is told to."""
    memory = np.arange(1, 2049, dtype=np.uint32)
    before = memory.copy()
    at = {"$32": (4 * LANES).astype(np.uint32), "$33": (numel - LANES).astype(np.uint32)}
    found = ptx_warp.run(pack_kernels.load_assembly.fn(32), at, memory)
    values = np.array([found[f"${w}"] for w in range(32)]).reshape(-1)
    assert (values[:numel] == before[:numel]).all() and (values[numel:] == 0).all()
    for bits in (16, 32):
        begin, size = 4 * 1024, bits // 8
        registers = {"$1": begin + size * LANES, "$2": 70_000 + LANES, "$3": 20 - LANES, "$4": 0 * LANES}
        registers = {name: value.astype(np.uint32) for name, value in registers.items()}
        ptx_warp.run(pack_kernels.put_assembly.fn(bits), registers, memory)
        stored = memory.view(np.uint16 if bits == 16 else np.uint32)[begin // size :]
        assert (stored[:20] == (70_000 + LANES[:20]) % 2**bits).all()
        assert (memory[1024 + 20 * size // 4 :] == before[1024 + 20 * size // 4 :]).all()


@pytest.mark.parametrize("limit", [0.0, 1e-42, 0.7, float("nan")])
def test_votes_and_codes_of_a_row(limit: float) -> None:
    """The words of a row's magnitudes above a limit, in their lanes; and its codes, end to end."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).numpy()
    x[3, 4], x[5], x[6, 7], x[8, 9] = np.float32(-1e-41), 0.0, np.float32(limit), np.float32("nan")
    bits = x.view(np.uint32)
    registers = {f"${w + 1}": bits[w] for w in range(32)}
    registers |= {"$33": np.full(32, limit, np.float32).view(np.uint32), "$34": LANES.astype(np.uint32)}
    memory = np.zeros(1024, np.uint32)
    words = ptx_warp.run(pack_kernels.vote_assembly.fn(32), registers, memory)["$0"]
    with np.errstate(invalid="ignore"):
        more = np.abs(x) > np.float32(limit)
    assert (words == (more.astype(np.uint64) << LANES.astype(np.uint64)).sum(1)).all()
    lane = {"$5": (1 << LANES) - 1, "$6": 1 << LANES}
    begins = more.sum(1).cumsum() - more.sum(1)
    for w in range(32):
        registers = {
            "$1": 64 + 0 * LANES,
            "$2": bits[w],
            "$3": words[w] + 0 * LANES,
            "$4": begins[w] + 0 * LANES,
        }
        registers = {name: value.astype(np.uint32) for name, value in (registers | lane).items()}
        ptx_warp.run(pack_kernels.put_code_assembly.fn(16), registers, memory)
    stored = memory.view(np.uint16)[32:]
    assert (stored[: more.sum()] == bits[more].astype(np.uint16)).all() and not stored[more.sum() :].any()


@pytest.mark.parametrize("bits", [16, 32])
def test_what_has_no_room_is_put_back(bits: int) -> None:
    step, flag = np.float32(2.0**-20), (LANES % 3 == 0)
    codes = (LANES * 2000 - 32000).astype(np.int32)
    rest = (LANES * 2.0**-27).astype(np.float32)
    value = rest + codes.astype(np.float32) * step
    code = codes + 0x4B400000 if bits < 32 else value.view(np.int32)
    memory = rest.view(np.uint32).copy()
    registers = {"$1": 4 * LANES, "$2": code, "$4": flag.astype(np.uint32)}
    registers = {name: x.astype(np.uint32) for name, x in registers.items()}
    registers["$3"] = np.full(32, step, np.float32).view(np.uint32)
    ptx_warp.run(pack_kernels.put_back_assembly.fn(bits), registers, memory)
    assert (memory.view(np.float32) == np.where(flag, value, rest)).all()
