"""Bad input and lost ranks: one clear line, a non-zero status, a prompt end, and nothing overwritten."""

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
    """The run ended with one line that says `text`, and without a trace or a usage."""
    assert run.returncode == 2, run.output[-3000:]
    assert len(run.errors) == 1 and text in run.errors[0], run.output[-3000:]
    assert "Traceback" not in run.output and "usage:" not in run.output


def test_a_command_line_that_cannot_be_is_one_line() -> None:
    line = "--overlap-param-gather only supported with distributed optimizer, megatron fsdp"
    assert_one_line(tiny("--overlap-param-gather"), line)


def test_a_part_of_a_spec_that_meets_no_site_is_named() -> None:
    flags = "--tensor-model-parallel-size 2 --tp-compression none;fc2@output=int8"
    line = "--tp-compression fc2@output=int8 names nothing that this model sends over tensor parallelism"
    assert_one_line(tiny(*flags.split(), ranks=2), line)


def test_a_part_of_a_spec_may_be_for_another_stage() -> None:
    stages = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    run = tiny(*stages, "--tp-compression", "none;fc2@1=int8", ranks=4, train_iters="1")
    assert run.returncode == 0 and "tensor parallelism: none;fc2@1=int8" in run.output, run.output[
        -3000:
    ]


def test_data_of_another_tokenizer_and_damaged_data_do_not_train(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", token=200)
    data = ("--data-path", str(tmp_path / "data"), "--split", "1,1,1")
    assert_one_line(tiny(*data, ranks=2), "holds token id 200, but the tokenizer has 127 ids")
    os.truncate(tmp_path / "data.bin", 56)
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    assert_one_line(tiny(*data, *save, ranks=2), "data.bin is truncated, 56 of 96 bytes")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = start("pretrain_gpt.py", *tiny_flags(), processes=1, MASTER_PORT=port)
        assert_one_line(
            started.finish(120), f"port {port} of this machine is in use: set MASTER_PORT"
        )


def test_torchrun_ends_with_the_line() -> None:
    """From the file that it names for this; what its own summary adds is a frame."""
    run = torchrun("pretrain_gpt.py", *tiny_flags("--taco"), "--compression-3d").finish(120)
    last = [line.strip() for line in run.output.splitlines() if line.strip(" =")][-1]
    assert last.endswith("error: --compression-3d is gone; give --compression taco-paper"), (
        run.output[-3000:]
    )


class TestCheckpoints:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("checkpoints")
        assert tiny("--save", str(folder), "--save-interval", "1", train_iters="1").returncode == 0
        return folder

    def files(self, folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def test_one_of_another_shape_is_refused_and_kept(self, folder: Path) -> None:
        before = self.files(folder)
        again = ("--load", str(folder), "--save", str(folder), "--save-interval", "2")
        run = tiny(*again, hidden_size="64")
        line = f"--load {folder}: it was saved with --hidden-size 32, with --ffn-hidden-size 128, with "
        assert_one_line(run, line)
        assert "this run is with --hidden-size 64, " in run.errors[0]
        assert self.files(folder) == before

    def test_one_with_other_tensors_is_refused(self, folder: Path) -> None:
        run = tiny("--untie-embeddings-and-output-weights", "--load", str(folder), train_iters="1")
        line = "it was saved without --untie-embeddings-and-output-weights, and this run is with --untie"
        assert_one_line(run, line)

    def test_one_of_another_optimizer_gives_its_weights(self, folder: Path) -> None:
        again = ("--use-distributed-optimizer", "--load", str(folder))
        line = "it was saved without --use-distributed-optimizer: drop --use-distributed-optimizer, or add "
        assert_one_line(tiny(*again, train_iters="1"), f"{line}--no-load-optim (weights only)")
        assert tiny(*again, "--no-load-optim", "--no-load-rng", train_iters="2").returncode == 0

    def test_an_optimizer_of_another_kind_is_named(self, folder: Path) -> None:
        run = tiny("--optimizer", "sgd", "--load", str(folder), train_iters="1")
        line = "it was saved with --optimizer adam: give --optimizer adam, or add --no-load-optim"
        assert_one_line(run, line)

    def test_an_iteration_that_was_not_saved_is_named(self, folder: Path) -> None:
        run = tiny("--ckpt-step", "7", "--load", str(folder), train_iters="1")
        assert_one_line(
            run, f"--load {folder} has no iteration 7: give --ckpt-step one of those it has (1)"
        )

    def test_another_schedule_names_the_flag(self, folder: Path) -> None:
        run = tiny("--load", str(folder), train_iters="3")
        assert_one_line(run, "add --override-opt-param-scheduler to follow this run's")

    @pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
    def test_a_damaged_file_is_named(self, folder: Path, name: str) -> None:
        file = folder / "iter_0000001" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        try:
            run = tiny("--load", str(folder), train_iters="2")
        finally:
            file.write_bytes(whole)
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
