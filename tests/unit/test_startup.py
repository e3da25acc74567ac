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
        """The system names the disk; torch's error does not give the reason."""
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
        ("arguments", "line"),
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
    def test_what_is_missing_is_named(self, arguments: dict, line: str) -> None:
        with pytest.raises(InputError, match=line):
            checks.check_tokenizer(Namespace(**NO_TOKENIZER | arguments))

    @staticmethod
    def check(kind: str, model: str | None) -> None:
        """Check a tokenizer of a type, whose model is a path, a name or nothing."""
        arguments = {"tokenizer_type": kind, "tokenizer_model": model, "vocab_size": 127}
        checks.check_tokenizer(Namespace(**NO_TOKENIZER | arguments))

    def test_a_tokenizer_without_a_model_passes(self) -> None:
        self.check("NullTokenizer", None)

    def test_a_name_of_hugging_face_passes(self) -> None:
        self.check("HuggingFaceTokenizer", "Qwen/Qwen2.5-7B")

    def test_a_file_that_is_there_passes(self, tmp_path: Path) -> None:
        model = tmp_path / "tokenizer.model"
        model.touch()
        self.check("SentencePieceTokenizer", str(model))


class TestCheckpoints:
    def check(self, **arguments) -> None:
        none = dict(load=None, save=None, pretrained_checkpoint=None, async_save=False)
        checks.check_folders(Namespace(**none | arguments))

    def test_a_folder_to_load_from_has_to_be_there(self, tmp_path: Path) -> None:
        absent = str(tmp_path / "absent")
        with pytest.raises(InputError, match=f"--load {absent}: no such folder"):
            self.check(load=absent)

    def test_a_folder_to_load_from_has_files(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="the folder is empty"):
            self.check(load=str(tmp_path))

    def test_a_first_run_may_load_from_the_folder_that_it_will_save_to(self, tmp_path) -> None:
        absent = str(tmp_path / "absent")
        self.check(load=absent, save=absent)

    def test_a_folder_to_save_to_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            InputError, match=r"--save .*file/here cannot be written \(Not a directory\)"
        ):
            self.check(save=str(tmp_path / "file" / "here"))


class TestLayers:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ({"fp8": "hybrid"}, "--fp8-format needs Transformer Engine"),
            (
                {"context_parallel_size": 2, "attention_backend": AttnBackend.local},
                "--context-parallel-size is not covered by --attention-backend local",
            ),
        ],
    )
    def test_what_torch_native_layers_do_not_serve(self, arguments: dict, line: str) -> None:
        """The same arguments pass with Transformer Engine's layers."""
        with pytest.raises(InputError, match=line):
            checks.check_local_layers(Namespace(transformer_impl="local", **arguments))
        checks.check_local_layers(Namespace(transformer_impl="transformer_engine", **arguments))

    def test_torch_native_layers_pass(self) -> None:
        checks.check_local_layers(Namespace(transformer_impl="local"))

    @staticmethod
    def fusions(monkeypatch, installed: bool, transformer_impl: str) -> tuple[Namespace, list]:
        """Return the arguments after the check, and the lines of the log.

        Args:
            monkeypatch: puts the stand-in for Python's search of packages in place.
            installed: whether the extensions are there.
            transformer_impl: the layers.
        """
        extension = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: extension)
        args = SimpleNamespace(
            transformer_impl=transformer_impl,
            masked_softmax_fusion=True,
            apply_rope_fusion=False,
            no_persist_layer_norm=False,
        )
        return args, implementation.missing_extension_overrides(args)

    def test_fusions_without_their_extension_are_switched_off_and_logged(self, monkeypatch):
        """A fusion that was off already is no line."""
        args, lines = self.fusions(monkeypatch, False, "local")
        assert not args.masked_softmax_fusion
        assert args.no_persist_layer_norm
        assert len(lines) == 2

    def test_fusions_with_their_extension_stay(self, monkeypatch) -> None:
        args, lines = self.fusions(monkeypatch, True, "local")
        assert args.masked_softmax_fusion
        assert not args.no_persist_layer_norm
        assert not lines

    @pytest.mark.parametrize("installed", [False, True])
    def test_transformer_engines_layers_keep_their_fusions(self, monkeypatch, installed) -> None:
        _, lines = self.fusions(monkeypatch, installed, "transformer_engine")
        assert lines == []


class TestEvaluation:
    ONE_RANK = Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        eval_interval=10,
        log_interval=1,
        full_validation=False,
    )

    def check(self, **changes) -> None:
        checks.check_evaluation(Namespace(**vars(self.ONE_RANK) | changes))

    def test_a_full_validation_of_one_rank_passes(self) -> None:
        self.check(full_validation=True)

    def test_a_full_validation_of_stages_is_refused(self) -> None:
        message = "--full-validation fails with tensor or pipeline parallelism"
        with pytest.raises(InputError, match=message):
            self.check(full_validation=True, pipeline_model_parallel_size=2)

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [("eval", None, "is missing"), ("log", 0, "0 must be a number")],
    )
    def test_intervals_are_numbers(self, name: str, value: int | None, reason: str) -> None:
        with pytest.raises(InputError, match=f"--{name}-interval {reason}"):
            self.check(**{f"{name}_interval": value})


class TestVersions:
    FIX = r"pip install 'megatron-core==0\.19\.\*'"

    def test_any_version_of_the_series_passes(self) -> None:
        megatron_lm.check_megatron_core(("0.19.7", Path("somewhere")))

    def test_another_series_is_refused_with_its_folder(self) -> None:
        with pytest.raises(InputError, match=self.FIX) as error:
            megatron_lm.check_megatron_core(("0.18.0", Path("/a/core")))
        assert "0.18.0 is in /a/core" in str(error.value)

    def test_no_megatron_core_is_refused(self) -> None:
        with pytest.raises(InputError, match=self.FIX):
            megatron_lm.check_megatron_core(None)

    def test_a_checkout_on_the_path_is_what_counts(self, tmp_path: Path) -> None:
        """It has no metadata of a distribution, and it comes before an installed wheel."""
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 5\n")
        code = (
            "from megatron.compression import errors\n"
            "from megatron.compression.frontends import megatron_lm\n"
            "with errors.one_line_errors():\n"
            "    megatron_lm.check_megatron_core(megatron_lm.find_megatron_core())"
        )
        env = environment() | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
        command = [sys.executable, "-P", "-c", code]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.startswith(
            f"error: megatron-core 0.19 is required, 0.18.5 is in {core}: "
        )
