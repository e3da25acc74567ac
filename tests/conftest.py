"""What `-n auto` means here, which scripts/test.sh gives to pytest-xdist."""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process more than cores, at most four; where there is a GPU, none but this one, as tests share it.

    A test's own ranks mostly wait for one another: from two processes they leave half of two cores idle.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, 4)
