"""What is checked before training, and what exceptions become one line."""

import errno
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.transformer.enums import AttnBackend

from megatron.compression import megatron_checks  # noqa: F401  (it explains errors)
from megatron.compression.errors import InputError, explain
from megatron.compression.frontends import megatron_lm
from megatron.compression.frontends.megatron_lm import checkpoints, checks, implementation
from tests.distributed.launch import REPO, environment


def raised(function: str, error: Exception) -> Exception:
    """``error`` as it is when it has passed through a function of this name."""
    scope: dict = {"error": error}
    exec(f"def {function}():\n    raise error", scope)
    with pytest.raises(type(error)) as caught:
        scope[function]()
    return caught.value


def write_dataset(prefix: Path, lengths=(8, 8, 8), token: int = 1) -> None:
    """An indexed dataset of int32 tokens, one document a sequence; all are ``token``."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for length in lengths:
        builder.add_document(torch.full((length,), token), [length])
    builder.finalize(f"{prefix}.idx")


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "error", "line"),
        [
            (
                "save_checkpoint_and_time",
                TypeError("not NoneType"),
                "a loss or a gradient is NaN or infini",
            ),
            (
                "build_pretraining_data_loader",
                AssertionError("no sample to cons"),
                "no sample to cons",
            ),
            ("validate_args", AssertionError("kv_channels"), "kv_channels"),
            (
                "forward",
                ModuleNotFoundError("", name="emerging_x"),
                "emerging_x is not installed: pip",
            ),
            (
                "forward",
                RuntimeError("[tcp] Connection closed by peer"),
                "lost the connection to another",
            ),
            ("forward", RuntimeError("Timed out waiting 60 ms"), "another rank did not answer"),
        ],
    )
    def test_what_the_command_line_caused(self, function: str, error: Exception, line: str) -> None:
        assert explain(raised(function, error), Namespace(save=None)).startswith(line)

    def test_a_fault_keeps_its_trace(self) -> None:
        """The same exceptions from elsewhere, and a failing save that has a folder."""
        for error in (
            TypeError("not NoneType"),
            ValueError("kv_channels"),
            AssertionError("6 == 4"),
        ):
            assert explain(raised("forward", error), Namespace(save=None)) is None
        assert (
            explain(raised("save_checkpoint_and_time", TypeError("x")), Namespace(save="here"))
            is None
        )

    def test_a_full_disk(self, tmp_path: Path, monkeypatch) -> None:
        """As the system says it, and as torch does, who leaves out why."""
        args = Namespace(save=str(tmp_path), load=None)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for error in (full, RuntimeError(f"Worker failure: {full}")):
            line = explain(raised("save_checkpoint", error), args)
            assert line is not None and line.startswith(f"--save {tmp_path}: no space left")
        error = raised("save_checkpoint", RuntimeError("basic_ios::clear: iostream error"))
        for free, explained in ((2**20, True), (2**40, False)):
            monkeypatch.setattr(
                checkpoints.shutil, "disk_usage", lambda _, free=free: Namespace(free=free)
            )
            assert (explain(error, args) is not None) == explained


class TestDatasets:
    @pytest.mark.parametrize(
        ("damage", "line"),
        [
            (lambda path: Path(f"{path}.idx").unlink(), r"--data-path .*data\.idx does not exist"),
            (
                lambda path: os.truncate(f"{path}.bin", 94),
                r"data\.bin is truncated, 94 of 96 bytes",
            ),
            (
                lambda path: os.truncate(f"{path}.idx", 100),
                r"data\.idx is damaged \(buffer is smaller",
            ),
            (
                lambda path: Path(f"{path}.idx").write_text("text"),
                r"data\.idx is damaged \(bad header",
            ),
            (lambda path: write_dataset(path, lengths=()), "the dataset is empty"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, damage, line: str) -> None:
        prefix = tmp_path / "data"
        write_dataset(prefix)
        assert checks.read_index(str(prefix)).sequence_count == 3
        damage(prefix)
        with pytest.raises(InputError, match=line):
            checks.read_index(str(prefix))

    def test_a_share_without_a_document_is_refused(self) -> None:
        checks.check_split("data", "90,10,0", 10)
        line = r"--split 949,50,1: the test share of data \(10 documents\) is empty"
        with pytest.raises(InputError, match=line):
            checks.check_split("data", "949,50,1", 10)

    @pytest.mark.parametrize("token", [127, 50_256, -1])
    def test_ids_of_another_tokenizer_are_refused(
        self, tmp_path: Path, monkeypatch, token: int
    ) -> None:
        write_dataset(tmp_path / "data", token=token)
        args = Namespace(mock_data=False, vocab_size=None)
        monkeypatch.setattr(checks, "_prefixes", lambda args: ([str(tmp_path / "data")], True))
        checks.check_vocabulary(args, 2**32)
        with pytest.raises(InputError, match="but the tokenizer has 127 ids"):
            checks.check_vocabulary(args, 127)
        if token == 127:
            args.vocab_size = 128  # what --vocab-size says counts where it is more
            checks.check_vocabulary(args, 127)

    def test_a_list_of_data_needs_its_shares(self, tmp_path: Path) -> None:
        (tmp_path / "list.txt").write_text("1.0 data")
        args = Namespace(mock_data=False, data_args_path=str(tmp_path / "list.txt"), split=None)
        with pytest.raises(InputError, match="--data-args-path needs --split"):
            checks.check_datasets(args)
        args.data_args_path = str(tmp_path / "absent")
        with pytest.raises(InputError, match=r"--data-args-path .*absent: no such file"):
            checks.check_datasets(args)


NO_TOKENIZER = dict(
    tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None, vocab_size=None
)


class TestTokenizers:
    @pytest.mark.parametrize(
        ("given", "line"),
        [
            ({}, "no tokenizer: give --tokenizer-type"),
            (
                {"vocab_file": "/absent", "merge_file": "/absent"},
                "--vocab-file /absent: no such file",
            ),
            ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer needs --vocab-size"),
            (
                {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/models/absent"},
                "--tokenizer-model /models/absent: no such file",
            ),
        ],
    )
    def test_what_is_missing_is_named(self, given: dict, line: str) -> None:
        with pytest.raises(InputError, match=line):
            checks.check_tokenizer(Namespace(**NO_TOKENIZER | given))

    def test_what_is_there_passes(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").touch()
        for kind, model in (
            *(("NullTokenizer", None), ("HuggingFaceTokenizer", "Qwen/Qwen2.5-7B")),
            ("SentencePieceTokenizer", str(tmp_path / "tokenizer.model")),
        ):
            given = {"tokenizer_type": kind, "tokenizer_model": model, "vocab_size": 127}
            checks.check_tokenizer(Namespace(**NO_TOKENIZER | given))


class TestCheckpoints:
    def check(self, **given) -> None:
        none = dict(load=None, save=None, pretrained_checkpoint=None, async_save=False)
        checks.check_folders(Namespace(**none | given))

    def test_a_folder_to_load_from_has_to_be_there(self, tmp_path: Path) -> None:
        absent = str(tmp_path / "absent")
        with pytest.raises(InputError, match=f"--load {absent}: no such folder"):
            self.check(load=absent)
        with pytest.raises(InputError, match="the folder is empty"):
            self.check(load=str(tmp_path))
        self.check(
            load=absent, save=absent
        )  # a first run names the folder that it is going to save to

    def test_a_folder_to_save_to_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            InputError, match=r"--save .*file/here cannot be written \(Not a directory\)"
        ):
            self.check(save=str(tmp_path / "file" / "here"))


class TestLayers:
    @pytest.mark.parametrize(
        ("given", "line"),
        [
            ({"fp8": "hybrid"}, "--fp8-format needs Transformer Engine"),
            (
                {"context_parallel_size": 2, "attention_backend": AttnBackend.local},
                "--context-parallel-size is not covered by --attention-backend local",
            ),
        ],
    )
    def test_what_torch_native_layers_do_not_serve(self, given: dict, line: str) -> None:
        checks.check_local_layers(Namespace(transformer_impl="local"))
        with pytest.raises(InputError, match=line):
            checks.check_local_layers(Namespace(transformer_impl="local", **given))
        checks.check_local_layers(Namespace(transformer_impl="transformer_engine", **given))

    @pytest.mark.parametrize("installed", [False, True])
    def test_fusions_without_their_extension_are_switched_off_and_said(
        self, monkeypatch, installed
    ) -> None:
        """What was off already is silent; Transformer Engine's layers keep theirs."""
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: object() if installed else None
        )
        before = dict(
            masked_softmax_fusion=True, apply_rope_fusion=False, no_persist_layer_norm=False
        )
        args = SimpleNamespace(transformer_impl="local", **before)
        lines = implementation.missing_extension_overrides(args)
        assert len(lines) == (0 if installed else 2)
        assert args.masked_softmax_fusion == installed != args.no_persist_layer_norm
        args = SimpleNamespace(transformer_impl="transformer_engine", **before)
        assert implementation.missing_extension_overrides(args) == []

    def test_evaluation(self) -> None:
        one = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, eval_interval=10)
        one |= dict(log_interval=1)
        checks.check_evaluation(Namespace(**one, full_validation=True))
        with pytest.raises(
            InputError, match="--full-validation fails with tensor or pipeline parallelism"
        ):
            checks.check_evaluation(
                Namespace(**one | {"pipeline_model_parallel_size": 2}, full_validation=True)
            )
        for name, value, said in (("eval", None, "is missing"), ("log", 0, "0 must be a number")):
            with pytest.raises(InputError, match=f"--{name}-interval {said}"):
                checks.check_evaluation(Namespace(**one | {f"{name}_interval": value}))


class TestVersions:
    def test_any_version_of_the_series_passes_and_another_is_refused(self) -> None:
        megatron_lm.check_megatron_core(("0.19.7", Path("somewhere")))
        for found in (("0.18.0", Path("/a/core")), None):
            with pytest.raises(
                InputError, match=r"pip install 'megatron-core==0\.19\.\*'"
            ) as refused:
                megatron_lm.check_megatron_core(found)
            assert found is None or f"{found[0]} is in /a/core" in str(refused.value)

    def test_a_checkout_on_the_path_is_what_counts(self, tmp_path: Path) -> None:
        """It has no metadata of a distribution, and it comes before an installed wheel."""
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 5\n")
        code = (
            "from megatron.compression import errors\n"
            "from megatron.compression.frontends import megatron_lm\n"
            "with errors.one_line_errors(): megatron_lm.check_megatron_core(megatron_lm.find_megatron_core())"
        )
        env = environment() | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
        command = [sys.executable, "-P", "-c", code]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.startswith(
            f"error: megatron-core 0.19 is required, 0.18.5 is in {core}: "
        )
