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
from tests.gpu.devices import DEVICES

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(DEVICES < WORLD, reason=f"needs {WORLD} CUDA devices"),
]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """By rank, as on CPUs."""
    return spawn(run_cases, WORLD, backend="nccl", timeout=420)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_identity_payloads_change_no_bit(results, case) -> None:
    """A payload freed or read too early would change gradients."""
    check_identity(results, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lossless_changes_no_bit(results, case) -> None:
    """The kernels, and the rests of cut payloads over gloo beside NCCL."""
    check_lossless(results, case)


@pytest.mark.parametrize("case", THOROUGH, ids=lambda case: case.name)
def test_tah_quant_sends_few_bits(results, case) -> None:
    """The bytes of the kernels, and losses near the exact ones."""
    check_bits(results, case)


@pytest.mark.parametrize("codec", OTHER_CODECS)
def test_any_codec(results, codec) -> None:
    """Each with its kernels."""
    check_codec(results, codec)


def test_overflow_reaches_the_first_stage(results) -> None:
    """The kernels send what is not finite as such."""
    check_overflow(results)
