"""The number of processes that ``-n auto`` starts; scripts/test.sh gives it to pytest-xdist."""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a process a core, at most four; none but this one where there is a GPU.

    Tests share the GPU. Three processes on two cores took a tenth longer than two.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # no worker: pytest-xdist runs all tests in this process
    return min(len(os.sched_getaffinity(0)), 4)
