"""Bad input and lost ranks: one clear line, a non-zero status, an end, nothing overwritten."""

import os
import socket
from pathlib import Path

import pytest

from tests.distributed.launch import Run, pretrain, start, tiny_flags, torchrun
from tests.unit.test_startup import write_dataset


def tiny(*flags: str, ranks: int = 1, **replaced: str) -> Run:
    """A tiny run, which may fail."""
    return pretrain(*tiny_flags(*flags, **replaced), ranks=ranks, check=False)


def assert_one_line(run: Run, text: str) -> None:
    """Assert that the run ended with one line that has `text`, without a trace or a usage."""
    end = run.output[-3000:]
    assert run.returncode == 2, end
    assert len(run.errors) == 1, end
    assert text in run.errors[0], end
    assert "Traceback" not in run.output
    assert "usage:" not in run.output


def test_a_command_line_that_cannot_be_is_one_line() -> None:
    line = "--overlap-param-gather only supported with distributed optimizer, megatron fsdp"
    assert_one_line(tiny("--overlap-param-gather"), line)


def test_a_part_of_a_spec_that_meets_no_site_is_named() -> None:
    flags = "--tensor-model-parallel-size 2 --tp-compression none;fc2@output=int8"
    line = (
        "--tp-compression fc2@output=int8 names nothing that this model sends "
        "over tensor parallelism"
    )
    assert_one_line(tiny(*flags.split(), ranks=2), line)


def test_a_part_of_a_spec_may_be_for_another_stage() -> None:
    stages = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    run = tiny(*stages, "--tp-compression", "none;fc2@1=int8", ranks=4, train_iters="1")
    assert run.returncode == 0, run.output[-3000:]
    assert "tensor parallelism: none;fc2@1=int8" in run.output, run.output[-3000:]


def write_foreign_dataset(folder: Path) -> tuple[str, ...]:
    """Write data of another tokenizer, and return its flags: token 200 of the tiny runs' 127."""
    write_dataset(folder / "data", token=200)
    return "--data-path", str(folder / "data"), "--split", "1,1,1"


def test_data_of_another_tokenizer_does_not_train(tmp_path: Path) -> None:
    data = write_foreign_dataset(tmp_path)
    assert_one_line(tiny(*data, ranks=2), "holds token id 200, but the tokenizer has 127 ids")


def test_damaged_data_does_not_train(tmp_path: Path) -> None:
    data = write_foreign_dataset(tmp_path)
    os.truncate(tmp_path / "data.bin", 56)
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    assert_one_line(tiny(*data, *save, ranks=2), "data.bin is truncated, 56 of 96 bytes")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = start("pretrain_gpt.py", *tiny_flags(), processes=1, MASTER_PORT=port)
        run = started.finish(120)
    assert_one_line(run, f"port {port} of this machine is in use: set MASTER_PORT")


def test_torchrun_ends_with_the_line() -> None:
    """The error is the last line of torchrun's own summary, which reads it from the error file."""
    run = torchrun("pretrain_gpt.py", *tiny_flags("--taco"), "--compression-3d").finish(120)
    lines = [line.strip() for line in run.output.splitlines() if line.strip(" =")]
    error = "error: --compression-3d is gone; give --compression taco-paper"
    assert lines[-1].endswith(error), run.output[-3000:]


class TestCheckpoints:
    """Checkpoints that do not fit the run are refused in one line that names the flag to change."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("checkpoints")
        assert tiny("--save", str(folder), "--save-interval", "1", train_iters="1").returncode == 0
        return folder

    def contents(self, folder: Path) -> dict[Path, bytes]:
        """Return the bytes of every file."""
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def test_another_shape_is_refused_and_nothing_overwritten(self, folder: Path) -> None:
        before = self.contents(folder)
        again = ("--load", str(folder), "--save", str(folder), "--save-interval", "2")
        run = tiny(*again, hidden_size="64")
        line = f"--load {folder}: it was saved with --hidden-size 32, with --ffn-hidden-size 128, "
        assert_one_line(run, line + "with ")
        assert "this run is with --hidden-size 64, " in run.errors[0]
        assert self.contents(folder) == before

    def test_other_tensors_are_refused(self, folder: Path) -> None:
        run = tiny("--untie-embeddings-and-output-weights", "--load", str(folder), train_iters="1")
        line = "it was saved without --untie-embeddings-and-output-weights, and this run is with "
        assert_one_line(run, line + "--untie")

    def test_another_layout_of_the_optimizer_is_refused(self, folder: Path) -> None:
        run = tiny("--use-distributed-optimizer", "--load", str(folder), train_iters="1")
        line = (
            "it was saved without --use-distributed-optimizer: drop --use-distributed-optimizer, "
            "or add --no-load-optim (weights only)"
        )
        assert_one_line(run, line)

    def test_weights_load_without_the_optimizer(self, folder: Path) -> None:
        weights_only = ("--no-load-optim", "--no-load-rng")
        flags = ("--use-distributed-optimizer", "--load", str(folder), *weights_only)
        assert tiny(*flags, train_iters="2").returncode == 0

    def test_an_optimizer_of_another_kind_is_named(self, folder: Path) -> None:
        run = tiny("--optimizer", "sgd", "--load", str(folder), train_iters="1")
        line = "it was saved with --optimizer adam: give --optimizer adam, or add --no-load-optim"
        assert_one_line(run, line)

    def test_an_iteration_that_was_not_saved_is_named(self, folder: Path) -> None:
        run = tiny("--ckpt-step", "7", "--load", str(folder), train_iters="1")
        line = f"--load {folder} has no iteration 7: give --ckpt-step one of those it has (1)"
        assert_one_line(run, line)

    def test_another_schedule_names_the_flag(self, folder: Path) -> None:
        run = tiny("--load", str(folder), train_iters="3")
        assert_one_line(run, "add --override-opt-param-scheduler to follow this run's")

    @pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
    def test_a_damaged_file_is_named(self, folder: Path, name: str) -> None:
        file = folder / "iter_0000001" / name
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        try:
            run = tiny("--load", str(folder), train_iters="2")
        finally:
            file.write_bytes(content)
        assert_one_line(run, name)


def test_when_a_rank_is_lost_the_others_end_by_themselves() -> None:
    flags = tiny_flags(
        "--use-distributed-optimizer", "--overlap-grad-reduce", train_iters="1000000"
    )
    run = start("pretrain_gpt.py", *flags, processes=2)
    try:
        run.wait_for("iteration        3/", timeout=200)
        run.processes[0].kill()  # as a lost machine would end
        assert run.processes[1].wait(timeout=60) != 0
    finally:
        run.kill()
    assert any("lost the connection to another rank" in line for line in run.lines)
