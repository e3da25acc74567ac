"""Kernels compiled for GPUs that are not here: they launch, and spill nothing in their loops.

A sample; ``python -m tests.kernels.architectures`` takes every setting.
"""

import pytest

pytest.importorskip("triton")

from taco_kernels.common.device import Device
from taco_kernels.symmetric_memory.lane import tile_bytes, tile_of
from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES, CodecConfig
from taco_kernels.taco.launch import tuning_for, tuning_of
from tests.kernels.architectures import ARCHITECTURES, Usage, device_of, spills, usages
from tests.kernels.every_setting import every_setting

CASES = (
    (80, "taco decode_sum fp8-e4m3 128 dual bfloat16"),
    (80, "taco encode fp8-e4m3 128 dual outliers bfloat16"),
    (86, "taco encode fp8-e4m3 512 dual float32"),
    (89, "sdp4bit add_dequantized int4 64 float32"),
    (90, "taco encode int6 128 signed bfloat16"),
    (90, "taco decode_rows int8 128 signed bfloat16"),
    (100, "taco decode_sum_encode fp8-e4m3 128 dual of 16"),
    (120, "taco decode_sum_encode int6 128 dual outliers of 8"),
)


@pytest.fixture(scope="module")
def settings() -> dict:
    return {f"{setting.family} {setting.name}": setting for setting in every_setting()}


@pytest.mark.parametrize(("architecture", "name"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_it_launches_and_spills_nothing_in_a_loop(
    architecture: int, name: str, settings, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = usages(settings[name], architecture)
    assert found
    for usage in found:
        assert usage.programs >= 1 and usage.registers <= 255 and usage.looped == 0, usage


def test_spills_are_told_from_the_code() -> None:
    sass = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   LDL R3, [R1] ;
        /*0030*/              @P3 BRA 0x10 ;
        /*0040*/                   BRA 0x60 ;
        /*0050*/                   LDL.64 R4, [R1+0x8] ;
    """
    assert spills(sass) == (3, 1)


def test_programs_of_a_multiprocessor() -> None:
    usage = Usage("kernel", 86, registers=168, shared=49152, warps=4, spilled=0, looped=0)
    assert usage.programs == 2  # by shared memory; registers would allow three
    assert usage._replace(architecture=80).programs == 3
    assert usage._replace(shared=114688).programs == 0
    assert usage._replace(shared=0, registers=16, warps=1).programs == 16


def test_what_an_h200_runs_is_what_was_measured() -> None:
    """Where tensor cores read shared memory, tuning is the measured one, and transforms have 128 points."""
    for values in ((f, g, s) for f in FORMATS for g in GROUP_SIZES for s in SCALES):
        if values[2] == "signed" and values[0].startswith("fp8"):
            continue
        config = CodecConfig(*values)
        for operation in ("encode", "decode", "decode_sum", "decode_sum_encode"):
            assert tuning_for(operation, config, device_of(90)) == tuning_of(operation, config)
    assert [device_of(architecture).point for architecture in ARCHITECTURES] == [64, 64, 64, 128, 128, 64]
    assert Device(4, (0, 0), True).point == 128


def test_slots_hold_the_tiles_of_any_device() -> None:
    """Ranks of a host share memory: a slot is as large on each, whatever tiles it takes."""
    from taco_kernels.symmetric_memory.lane import slot_bytes

    for architecture in ARCHITECTURES:
        for config in (CodecConfig(f, g) for f in FORMATS for g in GROUP_SIZES):
            tile = tile_of(config, device_of(architecture))
            assert tile_bytes(config, tile) <= slot_bytes()
