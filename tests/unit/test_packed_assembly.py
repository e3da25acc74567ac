"""The warps that add packed values up, on the CPU: their assembly lane by lane, and their layout."""

import re

import numpy as np
import pytest
import torch

from taco_kernels import packed
from taco_kernels.homomorphic.selection import share_threshold
from taco_kernels.packed import reference
from tests.unit import ptx_warp

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.packed import pack_kernels, sum_kernels

LANES = np.arange(32)
ONE_EACH = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"


@pytest.mark.parametrize(("numel", "share"), [(1024, 0.2), (1024, 1.0), (700, 0.3), (1021, 0.6)])
def test_sum_of_a_row(numel: int, share: float) -> None:
    """Scan, look-up, loads and sums of a row of three senders, as sum_kernel puts them together."""
    layout = packed.PackedLayout(numel, share)
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
    text = sum_kernels.sum_assembly.fn(senders, numel % 4 == 0, False)
    for step in range(4):
        inputs = {}
        for w in range(senders):
            found = run(sum_kernels.LOOK_UP.value, r2=words[w], r3=places[w], r4=8 * step + (LANES >> 2))
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


def compiled(kernel, warps: int, constants: dict):
    """``kernel`` for 16 bits, whole rows and 1024 values a row, for sm_90."""
    pointers = dict.fromkeys(("words", "before", "counts", "sums"), "*i32")
    pointers |= dict.fromkeys(("x", "remainder", "thresholds", "total"), "*fp32")
    pointers |= {"values": "*i16", "codes_of_rows": "*i16", "exponents": "*u8"}
    constants = dict(BITS=16, FLOOR=32, WIDTH=1024, INTERPRET=False) | constants
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if name in constants:
            values[i,] = constants[name]
        else:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))


@pytest.mark.parametrize("senders", [1, 4, 8])
def test_sum_has_one_element_a_thread(senders: int) -> None:
    """What the assembly takes for granted: thread i of a program has element i of a tensor."""
    constants = dict(W=senders, WHOLE=True, N=128, R=4, PREFETCH=True, STREAM=False)
    kernel = compiled(sum_kernels.sum_kernel, 4, constants)
    layouts = set(re.findall(r"#ttg\.\w+<{.*?}>", kernel.asm["ttgir"]))
    assert layouts == {ONE_EACH} and kernel.metadata.shared == 0
    assert kernel.asm["ptx"].count("ld.global.nc.s16") == 32 * senders


def test_squeeze_has_one_element_a_thread() -> None:
    """As above; words of the bitmap are votes of a warp."""
    kernel = compiled(pack_kernels.squeeze_kernel, 4, dict(KEEP_REMAINDER=True, R=4, STREAM=True))
    assert set(re.findall(r"#ttg\.\w+<{.*?}>", kernel.asm["ttgir"])) == {ONE_EACH}
    assert kernel.asm["ptx"].count("vote.sync.ballot") == 32
    words = {"$1": (LANES % 3 == 0).astype(np.uint32)}
    found = ptx_warp.run(pack_kernels.BALLOT.value, words, np.zeros(1, np.uint32))["$0"]
    assert (found == sum(1 << lane for lane in range(0, 32, 3))).all()


@pytest.mark.parametrize("numel", [1024, 700, 40])
def test_squeeze_loads_and_stores(numel: int) -> None:
    """A lane's values of each word as far as there are any; and stores of those it is told to."""
    memory = np.arange(1, 2049, dtype=np.uint32)
    before = memory.copy()
    at = {"$32": (4 * LANES).astype(np.uint32), "$33": (numel - LANES).astype(np.uint32)}
    found = ptx_warp.run(pack_kernels.load_assembly.fn(32, False), at, memory)
    values = np.array([found[f"${w}"] for w in range(32)]).reshape(-1)
    assert (values[:numel] == before[:numel]).all() and (values[numel:] == 0).all()
    for bits in (16, 32):
        begin, size = 4 * 1024, bits // 8
        registers = {"$1": begin + size * LANES, "$2": 70_000 + LANES, "$3": 20 - LANES, "$4": 0 * LANES}
        registers = {name: value.astype(np.uint32) for name, value in registers.items()}
        ptx_warp.run(pack_kernels.put_assembly.fn(bits, False), registers, memory)
        stored = memory.view(np.uint16 if bits == 16 else np.uint32)[begin // size :]
        assert (stored[:20] == (70_000 + LANES[:20]) % 2**bits).all()
        assert (memory[1024 + 20 * size // 4 :] == before[1024 + 20 * size // 4 :]).all()


def test_codes_move_side_by_side() -> None:
    """Lanes store consecutive codes: a code a thread, none of the vectors that masks would break up."""
    kernel = compiled(pack_kernels.move_kernel, 8, dict(KEEP_REMAINDER=False, R=8, K=8, Z=16, N=2048))
    moves = re.findall(r"tt\.store.*tensor<256x!tt\.ptr<i16>, #(\w+)>", kernel.asm["ttgir"])
    assert len(moves) == 8 and len(set(moves)) == 1
    layout = re.search(rf"#{moves[0]} = (#ttg.*?}}>)", kernel.asm["ttgir"])[1]
    assert layout == ONE_EACH.replace("[4]", "[8]")
