"""Bad input and lost ranks: one clear line, a non-zero status, a prompt end, and nothing overwritten."""

import errno
import importlib.metadata
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron.compression import errors, preflight
from megatron.compression.errors import InputError
from megatron.compression.startup import data_checks
from tests.distributed.launch import REPO, environment, pretrain, ranks_of, start, stop, tiny_flags, torchrun


def write_dataset(
    prefix, lengths=(8, 8, 8), offsets=None, token=1, last_document=None, wrong_offset=None
) -> None:
    """An indexed dataset of int32 tokens, one document a sequence; all are `token`."""
    offsets = list(offsets or [4 * sum(lengths[:i]) for i in range(len(lengths))])
    if wrong_offset is not None:
        offsets[wrong_offset] += 4
    documents = len(lengths) + 1
    borders = [*range(documents - 1), documents - 1 if last_document is None else last_document]
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), documents))
        index.write(struct.pack(f"<{len(lengths)}i", *lengths))
        index.write(struct.pack(f"<{len(lengths)}q", *offsets))
        index.write(struct.pack(f"<{documents}q", *borders))
    with open(f"{prefix}.bin", "wb") as data:
        data.write(struct.pack("<i", token) * sum(lengths))


def assert_one_line(run, text: str) -> None:
    """The run ended with one line that says `text`, and without a trace or a usage."""
    assert run.returncode == 2, run.output[-3000:]
    assert len(run.errors()) == 1 and text in run.errors()[0], run.output[-3000:]
    assert "Traceback" not in run.output and "usage:" not in run.output


def cut(path, size: int) -> None:
    """Shorten a file by `size` bytes."""
    path.write_bytes(path.read_bytes()[:-size])


class TestDatasets:
    def test_a_whole_dataset_passes(self, tmp_path):
        write_dataset(tmp_path / "data")
        data_checks.check_indexed_dataset(str(tmp_path / "data"))

    @pytest.mark.parametrize("missing", [".idx", ".bin"])
    def test_a_missing_file_is_named(self, tmp_path, missing):
        write_dataset(tmp_path / "data")
        (tmp_path / f"data{missing}").unlink()
        with pytest.raises(InputError, match=rf"--data-path .*data\{missing} does not exist"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    @pytest.mark.parametrize(("suffix", "whole"), [(".bin", 96), (".idx", 34 + 3 * 12 + 4 * 8)])
    def test_a_truncated_file_is_named_with_both_sizes(self, tmp_path, suffix, whole):
        write_dataset(tmp_path / "data")
        cut(tmp_path / f"data{suffix}", 2)
        with pytest.raises(InputError, match=rf"data\{suffix} is truncated, {whole - 2} of {whole} bytes"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    def test_another_file_is_no_index(self, tmp_path):
        write_dataset(tmp_path / "data")
        (tmp_path / "data.idx").write_text("text")
        with pytest.raises(InputError, match="not an index"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    def test_a_share_without_a_document_is_refused(self):
        data_checks.check_split("data", "90,10,0", 10)
        data_checks.check_split("data", "'9,1'", 10)
        with pytest.raises(
            InputError, match=r"--split 949,50,1: the test share of data \(10 documents\) is empty"
        ):
            data_checks.check_split("data", "949,50,1", 10)

    def test_an_empty_dataset_is_refused(self, tmp_path):
        write_dataset(tmp_path / "data", lengths=())
        with pytest.raises(InputError, match="empty"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    def test_lengths_that_are_not_the_offsets_are_refused(self, tmp_path):
        write_dataset(tmp_path / "data", lengths=(8, 3, 8), offsets=(0, 32, 64))
        with pytest.raises(InputError, match=r"the lengths and the offsets in .*data\.idx do not agree"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    def test_of_a_large_index_both_ends_are_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(data_checks, "SAMPLE_BLOCK", 4)
        monkeypatch.setattr(data_checks, "SAMPLE_BLOCKS", 3)
        lengths = [8] * 40
        write_dataset(tmp_path / "data", lengths=lengths)
        assert data_checks.check_indexed_dataset(str(tmp_path / "data")) == 40
        for wrong in (0, 39):
            write_dataset(tmp_path / "data", lengths=lengths, wrong_offset=wrong)
            with pytest.raises(InputError):
                data_checks.check_indexed_dataset(str(tmp_path / "data"))

    def test_documents_that_do_not_cover_the_sequences_are_refused(self, tmp_path):
        write_dataset(tmp_path / "data", last_document=2)
        with pytest.raises(InputError, match="do not cover its 3 sequences"):
            data_checks.check_indexed_dataset(str(tmp_path / "data"))

    @pytest.mark.parametrize("token", [127, 50_256, -1])
    def test_ids_of_another_tokenizer_are_refused(self, tmp_path, monkeypatch, token):
        write_dataset(tmp_path / "data", token=token)
        args = Namespace(mock_data=False, vocab_size=None)
        monkeypatch.setattr(data_checks, "_prefixes", lambda args: ([str(tmp_path / "data")], True))
        data_checks.check_vocabulary(args, 2**31)
        with pytest.raises(InputError, match="but the tokenizer has 127 ids"):
            data_checks.check_vocabulary(args, 127)
        if token == 127:
            args.vocab_size = 128  # what --vocab-size says counts where it is more
            data_checks.check_vocabulary(args, 127)

    def test_a_run_on_them_does_not_start(self, tmp_path):
        write_dataset(tmp_path / "data", token=200)
        data = ("--data-path", str(tmp_path / "data"), "--split", "1,1,1")
        assert_one_line(pretrain(*data, check=False), "holds token id 200, but the tokenizer has 127 ids")

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
    @pytest.mark.parametrize("version", ["0.19.2", "0.19.0", "0.19.7"])
    def test_any_version_of_the_series_passes(self, version):
        preflight.check_megatron_core((version, Path("somewhere")))

    @pytest.mark.parametrize("found", [("0.18.0", Path("/a/core")), ("0.20.0", Path("/a/core")), None])
    def test_another_series_is_refused(self, found):
        with pytest.raises(InputError, match=r"pip install 'megatron-core==0\.19\.\*'") as refused:
            preflight.check_megatron_core(found)
        assert found is None or f"{found[0]} is in /a/core" in str(refused.value)

    def test_the_installed_one_is_found(self):
        version, folder = preflight.find_megatron_core()
        assert version == importlib.metadata.version("megatron-core")
        assert (folder / "package_info.py").is_file()

    @pytest.mark.parametrize(("minor", "status"), [(19, 0), (18, 2)])
    def test_a_checkout_on_the_path_is_what_counts(self, tmp_path, minor, status):
        """It has no metadata of a distribution, and it comes before an installed wheel."""
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 5\n")
        code = (
            "from megatron.compression import errors, preflight\n"
            "with errors.one_line_errors(): preflight.check_megatron_core(preflight.find_megatron_core())"
        )
        env = environment() | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
        command = [sys.executable, "-P", "-c", code]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == status, run.stderr
        found = f"error: megatron-core 0.19 is required, 0.18.5 is in {core}: "
        assert run.stderr == "" if status == 0 else run.stderr.startswith(found)


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

    @pytest.mark.parametrize("name", ["context_parallel_size", "multi_latent_attention"])
    def test_what_needs_the_torch_native_attention(self, name):
        args = Namespace(transformer_impl="local", attention_backend=AttnBackend.auto, **{name: 2})
        preflight.check_local_layers(args)
        args.attention_backend = AttnBackend.local
        flag = "--" + name.replace("_", "-")
        with pytest.raises(InputError, match=f"{flag} is not covered by --attention-backend"):
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
        with pytest.raises(InputError, match="--sequence-parallel needs Transformer Engine"):
            preflight.check_local_layers(args)


def test_megatrons_own_checks_are_one_line_too():
    run = pretrain("--overlap-param-gather", check=False, processes=1)
    assert run.returncode == 2
    assert run.errors() == [
        "error: --overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon"
    ]


def test_an_unknown_flag_is_one_line_with_the_one_meant():
    run = pretrain("--tensor-model-paralel-size", "2", check=False)
    assert_one_line(
        run, "unrecognized arguments: --tensor-model-paralel-size 2; did you mean --tensor-model-"
    )


def test_a_value_that_is_none_is_one_line():
    run = pretrain("--normalization", "BatchNorm", check=False)
    assert_one_line(run, "argument --normalization: invalid choice: 'BatchNorm'")


NO_TOKENIZER = dict(tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None)


class TestTokenizers:
    @pytest.mark.parametrize(
        ("given", "line"),
        [
            ({}, "no tokenizer: give --tokenizer-type"),
            ({"tokenizer_type": "GPT2BPETokenizer"}, "GPT2BPETokenizer: --vocab-file and --merge-file"),
            ({"vocab_file": "/absent", "merge_file": "/absent"}, "--vocab-file /absent: no such file"),
            ({"tokenizer_type": "Llama2Tokenizer"}, "Llama2Tokenizer needs --tokenizer-model"),
            (
                {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "a/b"},
                "--tokenizer-model a/b: no such file",
            ),
            (
                {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/models/absent"},
                "--tokenizer-model /models/absent: no such file",
            ),
        ],
    )
    def test_what_is_missing_is_named(self, given, line):
        with pytest.raises(InputError, match=line):
            preflight.check_tokenizer(Namespace(**NO_TOKENIZER | given))

    def test_what_is_there_passes(self, tmp_path):
        (tmp_path / "tokenizer.model").touch()
        for kind, model in (
            *(("NullTokenizer", None), ("HuggingFaceTokenizer", "Qwen/Qwen2.5-7B")),
            ("SentencePieceTokenizer", str(tmp_path / "tokenizer.model")),
        ):
            given = {"tokenizer_type": kind, "tokenizer_model": model}
            preflight.check_tokenizer(Namespace(**NO_TOKENIZER | given))

    def test_an_extra_that_is_not_installed_is_named(self, monkeypatch):
        monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
        given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "Qwen/Qwen2.5-7B"}
        with pytest.raises(InputError, match=r"pip install 'megatron-taco\[tokenizers\]'"):
            preflight.check_tokenizer(Namespace(**NO_TOKENIZER | given))

    def test_a_run_without_any_says_so(self):
        words = tiny_flags()
        at = words.index("--tokenizer-type")
        run = start("pretrain_gpt.py", *words[:at], *words[at + 2 :], processes=2).finish(60)
        assert_one_line(run, "no tokenizer: give --tokenizer-type and --tokenizer-model")


NO_CHECKPOINT = dict(load=None, save=None, pretrained_checkpoint=None, async_save=False)


class TestCheckpoints:
    def test_a_folder_to_load_from_has_to_be_there(self, tmp_path):
        absent = str(tmp_path / "absent")
        with pytest.raises(InputError, match=f"--load {absent}: no such folder"):
            preflight.check_checkpoints(Namespace(**NO_CHECKPOINT | {"load": absent}))
        with pytest.raises(InputError, match="the folder is empty"):
            preflight.check_checkpoints(Namespace(**NO_CHECKPOINT | {"load": str(tmp_path)}))
        # A first run names the folder that it is going to save to.
        preflight.check_checkpoints(Namespace(**NO_CHECKPOINT | {"load": absent, "save": absent}))

    @pytest.mark.skipif(
        importlib.util.find_spec("nvidia_resiliency_ext") is not None, reason="it is installed"
    )
    def test_saving_in_the_background_needs_a_package(self, tmp_path):
        folder = ("--save", str(tmp_path / "new"), "--save-interval", "2")
        run = pretrain("--async-save", "--use-persistent-ckpt-worker", *folder, check=False)
        assert_one_line(run, "--async-save needs nvidia_resiliency_ext, which is not installed: pip install")

    def test_a_full_disk_is_one_line(self, tmp_path, monkeypatch):
        """As the system says it, and as torch does, who leaves out why."""
        args = Namespace(save=str(tmp_path), load=None)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for error in (full, RuntimeError(f"Worker failure: {full}")):
            assert errors.explain(error, args).startswith(f"--save {tmp_path}: no space left")
        assert errors.explain(OSError(errno.EACCES, "no"), args) is None

        def save_checkpoint():
            raise RuntimeError("basic_ios::clear: iostream error")

        for free, explained in ((2**20, True), (2**40, False)):
            monkeypatch.setattr(errors.shutil, "disk_usage", lambda folder, free=free: Namespace(free=free))
            with pytest.raises(RuntimeError) as raised:
                save_checkpoint()
            assert (errors.explain(raised.value, args) is not None) == explained


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = start("pretrain_gpt.py", *tiny_flags(), processes=1, MASTER_PORT=port)
        assert_one_line(started.finish(120), f"port {port} of this machine is in use: set MASTER_PORT")


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
