"""Pipelines on CUDA devices over NCCL: the Triton kernels and real streams.

Every schedule of the CPU tests, and whole runs with all kinds of parallelism compressed.
"""

import pytest

from tests.distributed import test_pipeline_schedules as schedules
from tests.distributed.spawn import spawned
from tests.gpu.devices import needs

pytestmark = [pytest.mark.multigpu, needs(schedules.WORLD)]


results = spawned(schedules.run_cases, schedules.WORLD, backend="nccl", timeout=420)
"""By rank, as on CPUs."""


@pytest.mark.parametrize("case", schedules.CASES, ids=lambda case: case.name)
def test_exact_codecs_change_no_bit(results, case) -> None:
    """Nor does a payload that is freed or read early; overflows of lossless go over gloo."""
    schedules.test_identity_payloads_change_no_bit(results, case)
    schedules.test_lossless_changes_no_bit(results, case)


@pytest.mark.parametrize("codec", schedules.OTHER_CODECS)
def test_any_codec(results, codec) -> None:
    """Each with its kernels, which send as such what is not finite."""
    schedules.test_any_codec(results, codec)
    schedules.test_overflow_reaches_the_first_stage(results)
