"""Pipelines on CUDA devices over NCCL: the Triton kernels and real streams.

Every schedule of the CPU tests, and whole runs with all kinds of parallelism compressed.
"""

import pytest

from tests.distributed import test_pipeline_schedules as schedules
from tests.distributed.spawn import spawned
from tests.gpu.devices import needs

pytestmark = [pytest.mark.multigpu, needs(schedules.WORLD)]


results = spawned(schedules.run_cases, schedules.WORLD, backend="nccl", timeout=420)
"""Results by rank, as on CPUs."""


@pytest.mark.parametrize("case", schedules.CASES, ids=lambda case: case.name)
def test_identity_payloads_change_no_bit(results, case) -> None:
    """No payload is freed too early or read too early."""
    schedules.test_uncompressed_messages_are_counted_as_off(results, case)
    schedules.test_identity_payloads_change_no_bit(results, case)


@pytest.mark.parametrize("case", schedules.THOROUGH_CASES, ids=lambda case: case.name)
def test_exact_payloads_one_way_and_after_a_warm_up_change_no_bit(results, case) -> None:
    schedules.test_payloads_forward_alone_change_no_bit(results, case)
    schedules.test_nothing_is_compressed_before_the_start_iteration(results, case)


@pytest.mark.parametrize("case", schedules.THOROUGH_CASES, ids=lambda case: case.name)
def test_lossless_payloads_that_fit_change_no_bit(results, case) -> None:
    schedules.test_lossless_payloads_that_fit_change_no_bit(results, case)


@pytest.mark.parametrize("case", schedules.CASES, ids=lambda case: case.name)
def test_lossless_payloads_that_overflow_change_no_bit(results, case) -> None:
    """The ranks agree on overflows over gloo."""
    schedules.test_lossless_payloads_that_overflow_change_no_bit(results, case)


@pytest.mark.parametrize("codec", schedules.LOSSY)
def test_lossy_codec(results, codec) -> None:
    schedules.test_lossy_codec_sends_fewer_bytes(results, codec)
    schedules.test_lossy_codec_has_losses_near_the_exact_ones(results, codec)


def test_overflow_reaches_the_first_stage(results) -> None:
    """The codecs' kernels pass on what is not finite."""
    schedules.test_overflow_reaches_the_first_stage(results)
