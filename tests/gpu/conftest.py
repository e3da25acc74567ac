"""Tests of this folder need a CUDA device; elsewhere they are skipped, with the reason."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests ``gpu``, and skip them where there is no device.

    The hook of a folder's conftest.py is given the whole session's items.
    """
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def filled_outputs():
    """New tensors begin as 255 or NaN: kernels must write all of them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
