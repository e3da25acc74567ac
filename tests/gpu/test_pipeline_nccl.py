"""Pipelines on CUDA devices over NCCL: the Triton kernels and real streams.

Every schedule of the CPU tests, and whole runs with all kinds of parallelism compressed.
"""

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_pipeline_schedules import (
    CASES,
    OTHER_CODECS,
    THOROUGH,
    WORLD,
    check_bits,
    check_codec,
    check_identity,
    check_lossless,
    check_overflow,
    run_cases,
)
from tests.gpu.devices import needs

pytestmark = [pytest.mark.multigpu, needs(WORLD)]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """By rank, as on CPUs."""
    return spawn(run_cases, WORLD, backend="nccl", timeout=420)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_codecs_change_no_bit(results, case) -> None:
    """Nor does a payload that is freed or read early; overflows of lossless go over gloo."""
    check_identity(results, case)
    check_lossless(results, case)


@pytest.mark.parametrize("case", THOROUGH, ids=lambda case: case.name)
def test_tah_quant_sends_few_bits(results, case) -> None:
    """The bytes of the kernels, and losses near the exact ones."""
    check_bits(results, case)


@pytest.mark.parametrize("codec", OTHER_CODECS)
def test_any_codec(results, codec) -> None:
    """Each with its kernels, which send as such what is not finite."""
    check_codec(results, codec)
    check_overflow(results)
