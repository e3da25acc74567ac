"""scripts/accuracy/sums: orders of addition in bf16, errors of sums, gradients of simulated ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.accuracy import run, sums


def normal(ranks: int, values: int = 4096) -> Tensor:
    return torch.randn(ranks, values, generator=torch.Generator().manual_seed(0))


def test_a_ring_adds_in_the_order_of_its_ranks() -> None:
    """Chunk 1 of four begins at rank 2, and every rank rounds its sum to bf16."""
    rows = normal(4, 8).bfloat16()
    expected = rows[2, 2:4]
    for rank in (3, 0, 1):
        expected = (expected.float() + rows[rank, 2:4].float()).bfloat16()
    assert torch.equal(sums.ring(rows.float())[2:4], expected)


def test_a_tree_adds_by_pairs() -> None:
    rows = normal(4, 8).bfloat16()
    left = (rows[0].float() + rows[1].float()).bfloat16()
    right = (rows[2].float() + rows[3].float()).bfloat16()
    assert torch.equal(sums.tree(rows.float()), (left.float() + right.float()).bfloat16())


def test_errors_of_normal_values() -> None:
    """A ring's error grows with the ranks, a tree's little, fp32 sums' and one exchange's not."""
    few = sums.errors(normal(8, 32768))
    many = sums.errors(normal(64, 32768))
    assert 2 < many["bf16 ring"] / few["bf16 ring"] < 3.5
    assert 1 < many["bf16 tree"] / few["bf16 tree"] < 1.6
    for name in ("bf16, fp32 sums", "`int8`, one exchange"):
        assert many[name] == pytest.approx(few[name], rel=0.05)
    # Two exchanges, one inside the nodes and one between them, are two roundings.
    assert many["`int8`"] == pytest.approx(2**0.5 * few["`int8`"], rel=0.05)
    assert few["`int8`"] == few["`int8`, one exchange"]
    assert few["`sdp4bit`"] < 0.01
    assert 0.1 < many["`sdp4bit`"] < 0.15


def test_agreement_of_gradients() -> None:
    assert sums.errors(normal(1).expand(8, -1))["agreement"] == pytest.approx(1.0)
    assert sums.errors(normal(8))["agreement"] == pytest.approx(1 / 8, rel=0.05)


def test_samples_are_whole_blocks_of_all_parameters() -> None:
    parameters = [torch.zeros(3 * sums.BLOCK), torch.zeros(2, sums.BLOCK), torch.zeros(7)]
    gradients = [torch.full_like(tensor, number) for number, tensor in enumerate(parameters)]
    sample = sums.sampled(parameters, gradients, 2 * sums.BLOCK + 5)
    assert sample.tolist() == [0.0] * sums.BLOCK + [1.0] * sums.BLOCK


@pytest.fixture
def text(tmp_path: Path, monkeypatch) -> None:
    """A text of 512 random tokens' patterns in the place of the corpus."""
    words = np.random.default_rng(0).integers(0, 512, (40, 8))
    paths = {}
    for split in ("train", "valid"):
        order = np.random.default_rng(1).integers(0, 40, 800)
        words[order].reshape(-1).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
        paths[split] = str(tmp_path / split)
    monkeypatch.setattr(run, "prepare", lambda args: paths)


def test_gradients_of_a_trained_model(text, tmp_path: Path, capsys) -> None:
    """Micro-batches of one model are the ranks; a second call takes the weights that it left."""
    words = ["--work-dir", str(tmp_path), "--size", "tiny", "--steps", "8", "--train-steps", "4"]
    words += ["--micro-batch", "1", "--ranks", "8", "16", "--values", str(4 * sums.BLOCK)]
    sums.main(words)
    first = (tmp_path / "sums.json").read_text()
    records = json.loads(first)
    assert [record["ranks"] for record in records] == [8, 16]
    for record in records:
        # Gradients of one model have something in common.
        assert 1 / record["ranks"] < record["agreement"] < 1
        assert 1e-3 < record["bf16 ring"] < 0.02
        assert record["bf16, fp32 sums"] < record["bf16 tree"] < record["`sdp4bit`"]
    assert "| 16 | 0.0" in capsys.readouterr().out
    sums.main(words)
    assert (tmp_path / "sums.json").read_text() == first


@pytest.mark.parametrize("ranks", ["12", "4", "512"])
def test_numbers_of_ranks_that_are_refused(tmp_path: Path, ranks: str, capsys) -> None:
    with pytest.raises(SystemExit):
        sums.parse(["--work-dir", str(tmp_path), "--ranks", ranks])
    assert f"--ranks {ranks} must be a power of two from 8 to 256" in capsys.readouterr().err
