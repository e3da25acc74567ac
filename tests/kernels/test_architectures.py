"""Kernels compiled for GPUs that are not here: they launch, and spill nothing or little in their loops."""

import re
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.compiler import ASTSource

from taco_kernels.common.packing import nearest_fp8
from taco_kernels.symmetric_memory.channel import slot_bytes, tile_bytes, tile_of
from taco_kernels.symmetric_memory.group import resident_programs
from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig, launch
from taco_kernels.taco.spec import TUNING, architecture_of, make_spec, tuning_for, tuning_in
from tests.kernels.architectures import ARCHITECTURES, GPUTarget, device_of, pretended, usages
from tests.kernels.settings import SETTINGS

SAMPLE = (  # settings that once failed; and one of each other family
    (80, "taco decode_sum fp8-e4m3"),
    (80, "taco encode fp8-e4m3 outliers tail"),
    (86, "taco encode fp8-e4m3 256"),
    (120, "taco decode int6 signed outliers tail"),
    pytest.param(120, "sdp4bit", marks=pytest.mark.thorough),
    pytest.param(86, "tah_quant", marks=pytest.mark.thorough),
    pytest.param(80, "bitmap_sparse", marks=pytest.mark.thorough),
    (100, "channel_norm"),
    (90, "residual_norm"),
    pytest.param(89, "lossless", marks=pytest.mark.thorough),
)


@pytest.mark.parametrize(
    ("architecture", "name"), SAMPLE, ids=lambda value: str(value).replace(" ", "-")
)
def test_it_launches_and_spills_little_in_a_loop(
    architecture: int, name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = usages(name, architecture)
    assert kernels
    most_in_loops = 10 if name == "channel_norm" else 0
    for usage in kernels:
        assert usage.programs >= 1, usage
        assert usage.registers <= 255, usage
        assert usage.looped <= most_in_loops, usage


@triton.jit
def codes_kernel(x, codes, C: tl.constexpr):
    """codes = fp8 codes of 128 values."""
    i = tl.arange(0, 128)
    tl.store(codes + i, nearest_fp8(tl.load(x + i), C))


@pytest.mark.parametrize("format", [f for f in FORMATS if f.startswith("fp8")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8_is_rounded_once(architecture: int, format: str, tmp_path, monkeypatch) -> None:
    """One instruction rounds it, or integers do: on sm_89 Triton's own conversion takes fp16 on the way."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = make_spec(CodecConfig(format), 128, device_of(architecture))
    source = ASTSource(
        codes_kernel, {"x": "*fp32", "codes": "*u8", "C": "constexpr"}, constexprs={"C": spec}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["ptx"]
    conversions = set(re.findall(r"cvt\.\S*f\d\S*", ptx))
    expected = set()
    if architecture >= 89:
        expected = {f"cvt.rn.satfinite.{format.removeprefix('fp8-')}x2.f32"}
    assert conversions == expected


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("reduce_scatter", "all_reduce int6 signed two ranks"),
        ("all_reduce_kernel", "all_reduce int6 signed outliers"),
        pytest.param(
            "reduce_scatter", "reduce_scatter int8 256 signed", marks=pytest.mark.thorough
        ),
    ],
)
def test_programs_that_wait_for_peers_are_resident(
    kernel: str, name: str, tmp_path, monkeypatch
) -> None:
    """Two a multiprocessor, as many as a channel starts on sm_90, fit by what the compiled kernels take."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    [usage] = usages(f"symmetric_memory {name}", 90, kernel)
    assert usage.programs >= 2, usage
    assert usage.spilled == 0, usage


def test_programs_that_a_channel_starts() -> None:
    """Two a multiprocessor on sm_80 and sm_90, one elsewhere: two do not always fit into 99 KiB."""
    programs = {name: resident_programs(device_of(name)) // 132 for name in ARCHITECTURES}
    assert programs == {80: 2, 86: 1, 89: 1, 90: 2, 100: 1, 120: 1}


OPERATIONS = ("encode", "decode", "decode_sum", "decode_sum_encode")


def every_config() -> list[CodecConfig]:
    """Return every format with every group size, transform and setting of outliers."""
    choices = product(FORMATS, GROUP_SIZES, (True, False), (True, False))
    return [
        CodecConfig(format, group_size, hadamard=hadamard, outliers=outliers)
        for format, group_size, hadamard, outliers in choices
    ]


def test_every_row_of_tunings_is_used() -> None:
    """And every operation has one, on every architecture; the first that covers counts."""
    unused = set(TUNING)
    for architecture, operation in product(ARCHITECTURES, OPERATIONS):
        name = architecture_of(device_of(architecture))
        for config in every_config():
            rows = [case for case in TUNING if case.covers(operation, config, name)]
            unused.discard(rows[0])
            assert tuning_for(operation, config, device_of(architecture)) == TUNING[rows[0]]
    assert not unused


TILED = (CodecConfig("int6"), CodecConfig("fp8-e4m3", 256), CodecConfig("int4", 32, "signed"))


@pytest.mark.parametrize("config", TILED, ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 8, 16])
def test_chunks_of_a_collective_have_the_tile_of_its_fused_kernel(
    config: CodecConfig, chunks: int
) -> None:
    """On a smaller one products may sum in another order, and a code may be another."""
    device = device_of(90)
    for groups in (1, 5, 16, 100):
        tile = tuning_in("encode", config, device, groups, chunks).tile
        assert tile == tile_of(config, device)


@pytest.mark.parametrize("config", TILED, ids=str)
def test_more_chunks_have_smaller_tiles(config: CodecConfig) -> None:
    """More than a collective has, of five groups each."""
    device = device_of(90)
    assert tuning_in("encode", config, device, 5, 17).tile < tile_of(config, device)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("format", ["int4", "int5", "int6"])
def test_what_triton_cannot_compile_for_sm_100_is_avoided(format: str, group_size: int) -> None:
    """Codes of 4 to 6 bits in 128 rows of 32 or 64 values: in one long chunk, and in chunks of many sizes."""
    device = device_of(100)
    config = CodecConfig(format, group_size)
    for groups, chunks in ((2**14, 1), *((2**n, 32) for n in range(9))):
        for operation in ("decode", "decode_sum"):
            tile = tuning_in(operation, config, device, groups, chunks).tile
            assert tile // group_size != 128, (operation, groups)
    assert tile_of(config, device) // group_size != 128


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slots_hold_the_tiles_of_any_device(architecture: int) -> None:
    """Ranks of a host share memory: a slot is as large on each, whatever tiles it takes."""
    for format, group_size, outliers in product(FORMATS, GROUP_SIZES, (False, True)):
        config = CodecConfig(format, group_size, outliers=outliers)
        tile = tile_of(config, device_of(architecture))
        assert tile_bytes(config, tile) <= slot_bytes(), config


@pytest.mark.parametrize(
    "config",
    [CodecConfig("fp8-e4m3", 64, "single", False), CodecConfig("int5", 64, "signed", False)],
    ids=lambda config: config.format,
)
def test_steps_are_not_rounded_to_fp16(config: CodecConfig) -> None:
    """LLVM takes a product of an fp16 and a bf16 that is rounded to fp16 for one of two fp16."""
    x = torch.zeros(2**16, dtype=torch.float16)
    with pretended(90) as compiled:
        launch.decode(
            torch.zeros((1, config.wire_bytes(2**16)), dtype=torch.uint8), config, x.shape, x.dtype
        )
    [(source, options)] = compiled
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["llir"]
    assert "fptrunc" in code
    assert not re.search(r"fmul .*half", code)


@pytest.mark.parametrize("name", SETTINGS)
def test_products_and_sums_are_rounded_apart(name: str) -> None:
    """Whatever Triton's default is: each launch says so. Kernels ask for a fused multiply-add by name."""
    with pretended(90) as compiled:
        SETTINGS[name]()
    assert compiled
    for source, options in compiled:
        assert options["enable_fp_fusion"] is False, source.fn.__name__
