"""Every pipeline schedule again, on CUDA devices over NCCL: the Triton kernels and real streams."""

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.test_pipeline_schedules import (
    CASES,
    LOSSY,
    WORLD,
    check_bits,
    check_identity,
    run_cases,
)

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
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


@pytest.mark.parametrize("case", LOSSY, ids=lambda case: case.name)
def test_tah_quant_sends_few_bits(results, case) -> None:
    """The bytes of the kernels, and losses near the exact ones."""
    check_bits(results, case)
