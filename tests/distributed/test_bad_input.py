"""Bad input and lost ranks: one clear line, a non-zero status, a prompt end, and nothing overwritten."""

import importlib.util
import struct
import subprocess
import sys
import time
from argparse import Namespace

import psutil
import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron.compression import preflight
from megatron.compression.errors import InputError
from tests.distributed.launch import REPO, environment, pretrain, ranks_of, start, stop, tiny_flags, torchrun


def write_dataset(prefix, lengths=(8, 8, 8)) -> None:
    """An indexed dataset of int32 tokens, one document a sequence."""
    offsets = [4 * sum(lengths[:i]) for i in range(len(lengths))]
    documents = len(lengths) + 1
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), documents))
        index.write(struct.pack(f"<{len(lengths)}i", *lengths))
        index.write(struct.pack(f"<{len(lengths)}q", *offsets))
        index.write(struct.pack(f"<{documents}q", *range(documents)))
    with open(f"{prefix}.bin", "wb") as data:
        data.write(b"\x01\x00\x00\x00" * sum(lengths))


def cut(path, size: int) -> None:
    """Shorten a file by `size` bytes."""
    path.write_bytes(path.read_bytes()[:-size])


class TestDatasets:
    def test_a_whole_dataset_passes(self, tmp_path):
        write_dataset(tmp_path / "data")
        preflight.check_indexed_dataset(str(tmp_path / "data"))

    @pytest.mark.parametrize("missing", [".idx", ".bin"])
    def test_a_missing_file_is_named(self, tmp_path, missing):
        write_dataset(tmp_path / "data")
        (tmp_path / f"data{missing}").unlink()
        with pytest.raises(InputError, match=rf"--data-path .*data\{missing} does not exist"):
            preflight.check_indexed_dataset(str(tmp_path / "data"))

    @pytest.mark.parametrize(("suffix", "whole"), [(".bin", 96), (".idx", 34 + 3 * 12 + 4 * 8)])
    def test_a_truncated_file_is_named_with_both_sizes(self, tmp_path, suffix, whole):
        write_dataset(tmp_path / "data")
        cut(tmp_path / f"data{suffix}", 2)
        with pytest.raises(InputError, match=rf"data\{suffix} is truncated, {whole - 2} of {whole} bytes"):
            preflight.check_indexed_dataset(str(tmp_path / "data"))

    def test_another_file_is_no_index(self, tmp_path):
        write_dataset(tmp_path / "data")
        (tmp_path / "data.idx").write_text("text")
        with pytest.raises(InputError, match="not an index"):
            preflight.check_indexed_dataset(str(tmp_path / "data"))

    def test_a_share_without_a_document_is_refused(self):
        preflight.check_split("data", "90,10,0", 10)
        preflight.check_split("data", "'9,1'", 10)
        with pytest.raises(
            InputError, match=r"--split 949,50,1: the test share of data \(10 documents\) is empty"
        ):
            preflight.check_split("data", "949,50,1", 10)

    def test_an_empty_dataset_is_refused(self, tmp_path):
        write_dataset(tmp_path / "data", lengths=())
        with pytest.raises(InputError, match="empty"):
            preflight.check_indexed_dataset(str(tmp_path / "data"))

    def test_training_stops_before_it_starts(self, tmp_path):
        write_dataset(tmp_path / "data")
        cut(tmp_path / "data.bin", 40)
        run = pretrain(
            *(
                "--data-path",
                str(tmp_path / "data"),
                "--split",
                "8,1,1",
                "--save",
                str(tmp_path / "checkpoints"),
            ),
            *("--save-interval", "2"),
            check=False,
        )
        assert run.returncode == 2
        assert len(run.errors()) == 1
        assert "data.bin is truncated, 56 of 96 bytes" in run.errors()[0]
        assert "Traceback" not in run.output
        assert not (tmp_path / "checkpoints").exists()


class TestVersions:
    def test_the_pinned_version_passes(self):
        preflight.check_megatron_core("0.19.2", "0.19.2")

    @pytest.mark.parametrize("installed", ["0.18.0", None])
    def test_another_version_is_refused(self, installed):
        with pytest.raises(InputError, match=r"pip install megatron-core==0\.19\.2"):
            preflight.check_megatron_core("0.19.2", installed)

    def test_the_installed_version_is_the_pinned_one(self):
        from megatron.compression.versions import MEGATRON_CORE_VERSION

        assert preflight.installed_megatron_core() == MEGATRON_CORE_VERSION

    def test_an_entrypoint_ends_with_one_line(self):
        code = "from megatron import host; host.prepare('0.0.1'); print('went on')"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=REPO, env=environment(), capture_output=True, text=True
        )
        assert run.returncode == 2
        assert run.stdout == ""
        assert [
            line.startswith("error: megatron-core 0.0.1 is required") for line in run.stderr.splitlines()
        ] == [True]


class TestTransformerEngine:
    def test_absent_and_asked_for(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        preflight.check_transformer_engine("local")
        with pytest.raises(
            InputError, match="--transformer-impl transformer_engine needs Transformer Engine"
        ):
            preflight.check_transformer_engine("transformer_engine")

    def test_present(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        preflight.check_transformer_engine("transformer_engine")

    @pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
    )
    def test_the_entrypoint_says_so(self):
        run = pretrain("--transformer-impl", "transformer_engine", check=False, processes=1)
        assert run.returncode == 2
        assert len(run.errors()) == 1
        assert "--transformer-impl local" in run.errors()[0]
        assert "Traceback" not in run.output


class TestLocalLayers:
    @pytest.mark.parametrize(
        ("name", "value", "flag"),
        [
            ("fp8", "hybrid", "--fp8-format"),
            ("tp_comm_overlap", True, "--tp-comm-overlap"),
        ],
    )
    def test_what_needs_transformer_engine_is_refused(self, name, value, flag):
        args = Namespace(transformer_impl="local", fp8=None, context_parallel_size=1, tp_comm_overlap=False)
        preflight.check_local_layers(args)
        setattr(args, name, value)
        with pytest.raises(InputError, match=f"{flag} needs Transformer Engine"):
            preflight.check_local_layers(args)

    def test_context_parallelism_needs_the_torch_native_attention(self):
        args = Namespace(
            transformer_impl="local", context_parallel_size=2, attention_backend=AttnBackend.auto
        )
        preflight.check_local_layers(args)
        args.attention_backend = AttnBackend.local
        with pytest.raises(InputError, match="--context-parallel-size is not covered by --attention-backend"):
            preflight.check_local_layers(args)
        args.transformer_impl = "transformer_engine"
        preflight.check_local_layers(args)

    def test_recomputed_norms_need_it_too(self, monkeypatch):
        args = Namespace(transformer_impl="local", recompute_modules=["core_attn", "layernorm"])
        monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(InputError, match="leave layernorm out"):
            preflight.check_local_layers(args)
        args.recompute_modules = ["core_attn", "mlp"]
        preflight.check_local_layers(args)
        args.mtp_num_layers, args.sequence_parallel = 1, False
        preflight.check_local_layers(args)
        args.sequence_parallel = True
        with pytest.raises(InputError, match="--mtp-num-layers with --sequence-parallel needs apex"):
            preflight.check_local_layers(args)


def test_megatrons_own_checks_are_one_line_too():
    run = pretrain("--overlap-param-gather", check=False, processes=1)
    assert run.returncode == 2
    assert run.errors() == [
        "error: --overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon"
    ]


def test_a_checkpoint_of_another_shape_is_refused_and_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    pretrain("--save", str(folder), "--save-interval", "1", processes=1, train_iters="1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before
    run = pretrain(
        *("--load", str(folder), "--save", str(folder), "--save-interval", "2"), hidden_size="64", check=False
    )
    assert run.returncode == 2
    assert len(run.errors()) == 1
    assert run.errors()[0].startswith(
        f"error: --load {folder}: --hidden-size is 32 in the checkpoint, 64 here;"
    )
    assert "Traceback" not in run.output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


class TestLostRank:
    LONG = (*tiny_flags(train_iters="1000000"), "--use-distributed-optimizer", "--overlap-grad-reduce")

    def test_the_others_end_by_themselves(self):
        run = start("pretrain_gpt.py", *self.LONG, processes=2)
        try:
            run.wait_for("iteration        3/", timeout=200)
            stop(psutil.Process(run.processes[0].pid))
            killed = time.monotonic()
            assert run.processes[1].wait(timeout=60) != 0
            assert time.monotonic() - killed < 30
        finally:
            run.kill()
        assert any("lost the connection to another rank" in line for line in run.lines)

    def test_the_launcher_ends_the_run(self):
        run = torchrun("pretrain_gpt.py", *self.LONG, processes=2)
        try:
            run.wait_for("iteration        3/", timeout=200)
            ranks = ranks_of(run.processes[0])
            assert len(ranks) == 2
            stop(ranks[1])
            killed = time.monotonic()
            assert run.processes[0].wait(timeout=60) != 0
            assert time.monotonic() - killed < 40
        finally:
            run.kill()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
