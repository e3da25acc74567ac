"""What docs/extending.md shows works: its blocks run in their order, on two CPU ranks."""

import re

import pytest

from tests.code_blocks import REPO, clone, code_blocks, run

PAGE = REPO / "docs" / "extending.md"


@pytest.mark.timeout(1500)
@pytest.mark.thorough
def test_the_page_runs(tmp_path):
    folder = clone(tmp_path)
    _, tried, _, collective, training, gradients = [run(block, folder) for block in code_blocks(PAGE)]
    assert "relative error" in tried
    assert collective.count("relative error") == 2
    assert float(re.findall(r"tensor-parallel ratio: ([\d.]+)", training)[-1]) > 1.5
    assert "data-parallel ratio" in gradients
