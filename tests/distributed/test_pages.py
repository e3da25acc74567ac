"""What docs/quickstart.md and docs/extending.md show works: their blocks run in order, on two CPU ranks."""

import re

import pytest

from tests.code_blocks import REPO, clone, code_blocks, run

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]


def test_quickstart(tmp_path):
    folder = clone(tmp_path)
    outputs = [run(block, folder) for block in code_blocks(REPO / "docs" / "quickstart.md")]
    for dimension, output in zip(("tensor", "pipeline", "data"), outputs, strict=True):
        assert f"{dimension}-parallel ratio" in output
    assert "What one GPU sends in one iteration" in (folder / "runs" / "quickstart" / "report.md").read_text()


def test_extending(tmp_path):
    folder, blocks = clone(tmp_path), code_blocks(REPO / "docs" / "extending.md")
    _, tried, _, collective, training, gradients = [run(block, folder) for block in blocks]
    assert "relative error" in tried
    assert collective.count("relative error") == 2
    assert float(re.findall(r"tensor-parallel ratio: ([\d.]+)", training)[-1]) > 1.5
    assert "data-parallel ratio" in gradients
