"""What docs/quickstart.md shows works: its bash blocks run in their order, on two CPU ranks."""

import pytest

from tests.code_blocks import REPO, clone, code_blocks, run

PAGE = REPO / "docs" / "quickstart.md"


@pytest.mark.timeout(1500)
@pytest.mark.thorough
def test_the_page_runs(tmp_path):
    folder = clone(tmp_path)
    outputs = [run(block, folder) for block in code_blocks(PAGE)]
    for dimension, output in zip(("tensor", "pipeline", "data"), outputs, strict=True):
        assert f"{dimension}-parallel ratio" in output
    assert "What one GPU sends in one iteration" in (folder / "runs" / "quickstart" / "report.md").read_text()
