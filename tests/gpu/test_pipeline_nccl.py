"""Pipelines on CUDA devices over NCCL: the Triton kernels and real streams.

Every schedule of the CPU tests, and whole runs with all kinds of parallelism compressed.
"""

import shutil
from pathlib import Path

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_pipeline_schedules import (
    CASES,
    OTHER_CODECS,
    THOROUGH,
    WORLD,
    check_bits,
    check_codec,
    check_identity,
    check_lossless,
    check_overflow,
    run_cases,
)
from tests.gpu.devices import DEVICES
from tests.gpu.training import losses, train

THREE_DIMENSIONS = """--hidden-size 256 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16
    --use-distributed-optimizer --compression taco-paper --compression-min-mb 0"""

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lossless_changes_no_bit(results, case) -> None:
    """The kernels, and the rests of cut payloads over gloo beside NCCL."""
    check_lossless(results, case)


@pytest.mark.parametrize("case", THOROUGH, ids=lambda case: case.name)
def test_tah_quant_sends_few_bits(results, case) -> None:
    """The bytes of the kernels, and losses near the exact ones."""
    check_bits(results, case)


@pytest.mark.parametrize("codec", OTHER_CODECS)
def test_any_codec(results, codec) -> None:
    """Each with its kernels."""
    check_codec(results, codec)


def test_overflow_reaches_the_first_stage(results) -> None:
    """The kernels send what is not finite as such."""
    check_overflow(results)


def test_three_dimensions_train_save_and_resume(tmp_path: Path) -> None:
    """TP 2 x PP 2 with --compression taco-paper: activations and gradients compressed in both dimensions (one
    data-parallel rank has nobody to send to); a resumed run takes the same course."""
    saved = tmp_path / "saved"
    flags = THREE_DIMENSIONS.split()
    interval = ("--save", str(saved), "--save-interval", "2")
    whole = train(*flags, *interval, processes=WORLD, report=tmp_path / "whole")
    found = losses(whole)
    assert sorted(found) == [1, 2, 3, 4] and found[4] < found[1]
    for channel in ("tp.forward", "tp.backward", "pp.forward", "pp.backward"):
        pair = whole["summary"]["bytes_per_iteration"][channel]
        assert 0 < pair["sent"] < 0.6 * pair["uncompressed"], channel
    shutil.rmtree(saved / "iter_0000004")
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = losses(train(*flags, "--load", str(saved), processes=WORLD, report=tmp_path / "resumed"))
    assert resumed == pytest.approx({iteration: found[iteration] for iteration in (3, 4)}, rel=1e-3)
