"""Flags, the config that they resolve to, and what is refused."""

import copy
import json
import re
import shlex

import pytest
import torch

from megatron.compression import CompressionConfig, CompressionConfigError
from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.codecs.grouped import fp8_in_software
from megatron.compression.config import (
    COMMUNICATORS,
    NODE_SIZE,
    changed_settings,
    with_outliers,
)
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import InputError, OneLineParser
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.flags import REMOVED, add_flags, resolve
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from tests.unit.megatron_args import EXPERTS, parsed

DIMENSIONS = ("tp", "pp", "dp", "ep", "cp")
ENGINE = dict(transformer_impl="transformer_engine")


def _config(*flags: str, **megatron) -> CompressionConfig:
    """Return what flags resolve to in a run with these arguments of Megatron."""
    return resolve(parsed(*flags, **megatron))


class TestTaco:
    """--taco is short for --tp-compression taco."""

    def test_it_has_the_papers_settings(self) -> None:
        config = _config("--taco").tensor_parallel
        assert config == TensorParallelConfig(compression="taco")
        codec = config.forward_codec
        assert codec.format == "fp8-e4m3"
        assert codec.group == 128
        assert codec.scales == "dual"
        assert codec.hadamard is True

    def test_it_compresses_from_8_mib_on(self) -> None:
        assert _config("--taco").tensor_parallel.rules(0)["tp.forward"].min_bytes == 8 * 2**20

    @pytest.mark.parametrize("flags", ["--tp-compression taco", "--taco --tp-compression taco"])
    def test_both_flags_mean_the_same(self, flags: str) -> None:
        expected = _config("--taco").tensor_parallel
        assert _config(*flags.split()).tensor_parallel == expected

    def test_it_takes_settings(self) -> None:
        config = _config("--taco", "format=int8,group=64").tensor_parallel
        assert config.forward_codec.name == "taco:format=int8,group=64"


class TestTacoPaper:
    """--compression taco-paper sets three dimensions; a dimension's own flag beside it wins."""

    def test_it_is_three_codecs(self) -> None:
        config = _config("--compression", "taco-paper", use_distributed_optimizer=True)
        assert config.tensor_parallel == TensorParallelConfig(compression="taco:outliers=off")
        assert config.data_parallel.compression == "sdp4bit"
        assert config.data_parallel.weight_codec is not None
        assert config.pipeline_parallel == PipelineParallelConfig(compression="tah-quant")

    def test_a_flag_of_another_codec_wins(self) -> None:
        flags = "--compression taco-paper --pp-compression int8 --taco format=int6"
        config = _config(*flags.split())
        assert config.pipeline_parallel.compression == "int8"
        assert config.tensor_parallel.compression == "taco:format=int6"

    def test_none_and_a_recipe_win(self) -> None:
        flags = "--compression taco-paper --dp-compression none --tp-compression tensor-6bit"
        config = _config(*flags.split())
        assert not config.data_parallel.enabled
        assert config.pipeline_parallel.enabled
        assert config.tensor_parallel == TensorParallelConfig(compression="tensor-6bit")


def test_every_flag_reaches_its_field(monkeypatch) -> None:
    """All of them are here but those that other tests name."""
    monkeypatch.setenv("MEGATRON_COMPRESSION_NODE_SIZE", "2")
    monkeypatch.setenv("MEGATRON_COMPRESSION_COMMUNICATORS", "3")
    flags = """--tp-compression int6 int8:group=64 --compression-min-mb 0.5
        --tp-compression-layers 1-2,output --pp-compression int4:group=32 none
        --cp-compression int8 int6 --ep-compression int8 --dp-compression int8 int5
        --compression-start-iteration 7
        --compression-transport collective --compression-error-bound 0.05
        --validate-uncompressed --compression-report out"""
    config = _config(*flags.split(), use_distributed_optimizer=True, **EXPERTS)
    assert config == CompressionConfig(
        tensor_parallel=TensorParallelConfig(
            compression="int6", backward="int8:group=64", min_mb=0.5, layers="1-2,output"
        ),
        pipeline_parallel=PipelineParallelConfig(
            compression="int4:group=32", backward="none", min_mb=0.5
        ),
        context_parallel=ContextParallelConfig(compression="int8", backward="int6", min_mb=0.5),
        expert_parallel=ExpertParallelConfig(compression="int8", min_mb=0.5),
        data_parallel=DataParallelConfig(
            min_mb=0.5, compression="int8", weights="int5", node_size=2
        ),
        start_iteration=7,
        transport="collective",
        communicators=3,
        error_bound=0.05,
        validate_uncompressed=True,
        report="out",
    )


def test_min_mb_is_the_threshold_of_every_message() -> None:
    flags = """--tp-compression int6 --pp-compression int8 --cp-compression int8
        --ep-compression int8 --dp-compression int8 --compression-min-mb 0.5"""
    config = _config(*flags.split(), **EXPERTS)
    assert {rule.min_bytes for rule in config.rules().values()} == {2**19}


def test_the_fraction_of_caat_net_reaches_its_field() -> None:
    config = _config("--caat-net-sync-fraction", "0.5")
    assert config.caat_net == CaatNetConfig(sync_fraction=0.5)


GONE = [(f"{flag} 1", f"{flag} is gone; {instead}") for flag, instead in REMOVED.items()]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        *GONE,
        ("--tp-backward-compression=int6", "second value: --tp-compression SPEC BACKWARD"),
        ("--compression-3d", "give --compression taco-paper"),
        ("--compression int6:group=64", "--tp-compression int6:group=64"),
        ("--compression everything", "choose none, auto or taco-paper"),
        ("--tp-compression int8 --ep-compression int8 int6 int4", "--ep-compression: takes SPEC"),
        ("--ep-compression int8 int6 int4", "takes SPEC [BACKWARD], not 3 values"),
    ],
)
def test_a_flag_or_value_that_is_gone_or_wrong_names_the_right_one(flags: str, line: str) -> None:
    """The error is one line, wherever the flag is on the command line."""
    parser = OneLineParser()
    add_flags(parser)
    with pytest.raises(InputError) as error:
        parser.parse_args(["--taco", *flags.split()])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


class TestEnvironment:
    @pytest.fixture
    def both(self, monkeypatch) -> None:
        monkeypatch.setenv(NODE_SIZE, "2")
        monkeypatch.setenv(COMMUNICATORS, "3")

    def test_each_variable_is_a_line_of_the_log(self, both) -> None:
        args = parsed("--dp-compression", "int8", data_parallel_size=4)
        lines = resolve(args).describe(args)
        assert lines[-2:] == [f"{COMMUNICATORS}=3", f"{NODE_SIZE}=2"]

    def test_a_resumed_run_names_variables_that_have_changed(self, monkeypatch) -> None:
        saved = _config("--dp-compression", "int8").asdict()
        monkeypatch.setenv(NODE_SIZE, "2")
        monkeypatch.setenv(COMMUNICATORS, "3")
        resumed = _config(
            "--dp-compression", "int8", "--compression-min-mb", "0.5", data_parallel_size=4
        )
        assert changed_settings(saved, resumed.asdict()) == [
            "--compression-min-mb default -> 0.5",
            f"{COMMUNICATORS} 0 -> 3",
            f"{NODE_SIZE} default -> 2",
        ]

    def test_a_value_that_is_no_number_is_refused(self, monkeypatch) -> None:
        monkeypatch.setenv(NODE_SIZE, "two")
        message = f"{NODE_SIZE}=two must be a number >= 1; unset it"
        with pytest.raises(CompressionConfigError, match=message):
            _config("--dp-compression", "int8")

    def test_an_unknown_variable_is_refused_with_the_nearest_name(self, monkeypatch) -> None:
        monkeypatch.setenv("MEGATRON_COMPRESSION_NODES", "2")
        message = f"_NODES is unknown; did you mean {NODE_SIZE}"
        with pytest.raises(CompressionConfigError, match=message):
            _config("--dp-compression", "int8")


FLAGS = pytest.mark.parametrize(
    "flags",
    ["--compression taco-paper", "--pp-compression pipeline-6bit", "--compression auto --taco"],
)


@FLAGS
def test_resolve_writes_nothing_into_megatrons_arguments(flags: str) -> None:
    args = parsed(*flags.split(), use_distributed_optimizer=True)
    before = copy.deepcopy(vars(args))
    resolve(args)
    assert vars(args) == before


@FLAGS
def test_the_same_arguments_resolve_to_the_same_config(flags: str) -> None:
    args = parsed(*flags.split(), use_distributed_optimizer=True)
    assert resolve(args) == resolve(args)


@FLAGS
def test_a_config_is_plain_values(flags: str) -> None:
    """It goes through JSON unchanged, as into reports and checkpoints."""
    config = _config(*flags.split(), use_distributed_optimizer=True)
    assert json.loads(json.dumps(config.asdict())) == config.asdict()


class TestWithoutFlags:
    def test_nothing_is_compressed(self) -> None:
        config = _config()
        assert not config.enabled
        assert not config.caat_net.enabled
        assert config.report is None
        assert all(rule.codec is None for rule in config.rules().values())

    def test_nothing_is_logged(self) -> None:
        assert _config().describe(parsed()) == []


class TestChangedSettings:
    """What a resumed run logs: settings that decide results and differ from the saved ones."""

    def test_settings_that_decide_results_are_named(self) -> None:
        """Transports, reports and overlap leave results alone."""
        saved = _config("--tp-compression", "tensor-6bit", "--tp-compression-overlap", "halves")
        flags = "--taco --tp-compression-layers 0 --compression-transport collective"
        resumed = _config(*flags.split())
        assert changed_settings(saved.asdict(), resumed.asdict()) == [
            "--tp-compression int6:outliers=on -> taco",
            "--tp-compression-layers all -> 0",
        ]

    def test_the_same_settings_are_no_change(self) -> None:
        settings = _config("--taco").asdict()
        assert changed_settings(settings, settings) == []

    def test_a_default_that_is_spelled_out_is_no_change(self) -> None:
        saved = _config("--taco", "group=64").asdict()
        resumed = _config("--tp-compression", "taco:group=64,outliers=on").asdict()
        assert changed_settings(saved, resumed) == []

    def test_the_papers_codec_is_that_of_earlier_checkpoints(self) -> None:
        """taco had no outliers there, and taco-paper was taco."""
        saved = _config("--taco", "group=64").asdict()
        del saved["taco_outliers"]
        resumed = _config("--tp-compression", "taco:group=64,outliers=off").asdict()
        assert changed_settings(saved, resumed) == []

    def test_a_default_that_has_moved_is_a_change(self) -> None:
        saved = _config("--taco").asdict()
        del saved["taco_outliers"]
        assert changed_settings(saved, _config("--taco").asdict()) == [
            "--tp-compression taco:outliers=off -> taco:outliers=on"
        ]

    def test_outliers_are_a_change(self) -> None:
        resumed = _config("--taco", "outliers=off").asdict()
        assert changed_settings(_config("--taco").asdict(), resumed) == [
            "--tp-compression taco -> taco:outliers=off"
        ]

    @pytest.mark.parametrize(
        ("spec", "spelled"),
        [
            ("taco", "taco:outliers=off"),
            ("taco:group=64", "taco:group=64,outliers=off"),
            ("taco:outliers=on", "taco:outliers=on"),
            ("taco/int8", "taco:outliers=off/int8"),
            (
                "int8;fc2@0=taco;qkv=taco:group=64",
                "int8;fc2@0=taco:outliers=off;qkv=taco:group=64,outliers=off",
            ),
            ("int8 taco", "int8 taco:outliers=off"),
            ("int6:group=64", "int6:group=64"),
            ("my.taco:Codec", "my.taco:Codec"),
            ("none", "none"),
            ("", ""),
        ],
    )
    def test_specs_with_their_outliers(self, spec: str, spelled: str) -> None:
        assert with_outliers(spec, "off") == spelled

    def test_a_checkpoint_without_settings_is_no_change(self) -> None:
        assert changed_settings({}, _config("--taco").asdict()) == []


NO_LAYERS = [
    ({"layers": text}, "TensorParallelConfig.layers", "is not a layer; give")
    for text in ("", "a", "4-2", "1,,2", "0x1", "99999", "all,1")
]


@pytest.mark.parametrize(
    ("settings", "argument", "fix"),
    [
        (
            {"compression": "int6/int8/int8:group=64"},
            "int8/int8:group=64",
            "give them the same group size",
        ),
        (
            {"compression": "fp8"},
            "TensorParallelConfig.compression: codec 'fp8' is unknown",
            "choose one of",
        ),
        (
            {"backward": "fp8"},
            "TensorParallelConfig.backward: codec 'fp8' is unknown",
            "choose one of",
        ),
        ({"min_mb": -1.0}, "min_mb -1.0", ">= 0"),
        (
            {"compression": "none", "layers": "0"},
            "layers given",
            "add TensorParallelConfig.compression",
        ),
        *NO_LAYERS,
        (
            {"compression": "int6;fc3=int5"},
            "'fc3=int5' must be SITE=SPEC, @LAYERS=SPEC",
            "SITE one of qkv",
        ),
        ({"compression": "int6;=int5"}, "'=int5' must be", "SITE=SPEC"),
        ({"compression": "int6;@0-x=int5"}, "'0-x' is not a layer", "give"),
        (
            {"compression": "int6;fc2=int7"},
            "TensorParallelConfig.compression: codec 'int7'",
            "choose one of",
        ),
    ],
)
def test_impossible_settings_name_argument_and_fix(settings, argument, fix) -> None:
    """A config that is made in an own loop names its field; ``resolve`` names the flag."""
    with pytest.raises(CompressionConfigError) as error:
        TensorParallelConfig(**{"compression": "taco", **settings})
    message = str(error.value)
    assert argument in message
    assert fix in message
    assert "\n" not in message


TRAFFIC_OF_OTHERS = pytest.mark.parametrize(
    ("megatron", "fix"),
    [
        ({"transformer_impl": "inference_optimized"}, "use transformer_engine or local"),
        (
            ENGINE | {"symmetric_ar_type": "two_shot"},
            "--symmetric-ar-type sums in symmetric memory",
        ),
        (
            ENGINE | {"use_transformer_engine_op_fuser": True},
            "--use-transformer-engine-op-fuser builds",
        ),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant"),
        (
            {"distribute_saved_activations": True},
            "--distribute-saved-activations gathers the inputs",
        ),
        ({"num_layers": 2}, "with --num-layers 2 layers are 0 to 1"),
    ],
)
"""Arguments of Megatron under which messages would not be compressed, and a part of the error."""


@TRAFFIC_OF_OTHERS
def test_traffic_that_would_stay_uncompressed_is_refused(megatron, fix) -> None:
    with pytest.raises(CompressionConfigError, match=fix):
        _config("--taco", "--tp-compression-layers", "0,2", **megatron)


@TRAFFIC_OF_OTHERS
def test_without_compression_the_same_arguments_are_accepted(megatron, fix) -> None:
    _config(**megatron)


class TestUncountedTraffic:
    """Saved activations are distributed by Megatron; the ledger does not see their gathers."""

    def test_the_log_says_what_is_missing_from_the_bytes(self) -> None:
        args = parsed(distribute_saved_activations=True)
        (line,) = resolve(args).describe(args)
        assert line.startswith("--distribute-saved-activations gathers the input")

    def test_one_rank_gathers_nothing(self) -> None:
        args = parsed(distribute_saved_activations=True, tensor_model_parallel_size=1)
        assert resolve(args).describe(args) == []


SIZES = pytest.mark.parametrize(
    ("flag", "size"),
    [
        ("--tp-compression", "tensor_model_parallel_size"),
        ("--pp-compression", "pipeline_model_parallel_size"),
        ("--cp-compression", "context_parallel_size"),
        ("--dp-compression", "data_parallel_size"),
    ],
)


class TestNoEffect:
    """Compression with nothing to do is no error, and never silent."""

    @SIZES
    def test_a_flag_of_a_dimension_with_one_rank(self, flag: str, size: str) -> None:
        args = parsed(flag, "int8", **{size: 1})
        (line,) = resolve(args).describe(args)
        assert line.startswith(f"{flag} has no effect here")

    @SIZES
    def test_a_flag_of_a_dimension_with_two_ranks_has_an_effect(self, flag, size) -> None:
        args = parsed(flag, "int8", **{size: 2})
        (line,) = resolve(args).describe(args)
        assert not line.startswith(f"{flag} has no effect here")

    def test_taco_is_named_as_it_was_typed(self) -> None:
        args = parsed("--taco", tensor_model_parallel_size=1)
        line = resolve(args).describe(args)[0]
        assert re.search("^--taco has no effect .* or drop --taco$", line)

    def test_without_training_there_are_no_gradients(self) -> None:
        args = parsed("--dp-compression", "int8", data_parallel_size=2, skip_train=True)
        assert "--skip-train sends no gradients" in resolve(args).describe(args)[-1]


class TestFp8InSoftware:
    """GPUs before sm_89 convert to fp8 in software; there int8 sends as many bytes faster."""

    @staticmethod
    def line(flags: str) -> str | None:
        """Return the line of the log about the codecs of flags."""
        rules = _config(*flags.split()).rules().values()
        return fp8_in_software(codec for rule in rules for codec in rule.codecs)

    @pytest.fixture
    def gpu(self, monkeypatch):
        """A function that puts a GPU of a compute capability in place; None: there is none."""

        def gpu(capability: tuple[int, int] | None) -> None:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
            monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

        return gpu

    @pytest.mark.parametrize("flags", ["--taco", "--tp-compression int6;fc2=int5/taco"])
    def test_an_older_gpu_is_named(self, gpu, flags: str) -> None:
        """A codec of a single site, or of the second hop, counts as well."""
        gpu((8, 0))
        assert self.line(flags).startswith("taco: A100 converts to fp8 in software")

    def test_a_codec_without_fp8_is_silent(self, gpu) -> None:
        gpu((8, 0))
        assert self.line("--dp-compression tagc") is None

    @pytest.mark.parametrize("capability", [None, (8, 9)], ids=["no GPU", "sm_89"])
    @pytest.mark.parametrize(
        "flags", ["--taco", "--tp-compression int6;fc2=int5/taco", "--dp-compression tagc"]
    )
    def test_without_an_older_gpu_nothing_is_logged(self, gpu, flags: str, capability) -> None:
        gpu(capability)
        assert self.line(flags) is None


CONTEXT = dict(context_parallel_size=2)
UNUSED = "given, but nothing uses it; add --tp-compression"
EMPTY_CODECS = [
    (f"--{dimension}-compression ''", {}, f"--{dimension}-compression.* is unknown")
    for dimension in DIMENSIONS
]
"""``"$CODEC"`` of a script that has not set CODEC."""


@pytest.mark.parametrize(
    ("flags", "megatron", "line"),
    [
        ("--taco --tp-compression int6", {}, "drop one of the two"),
        ("--taco --tp-compression none", {}, "--taco is --tp-compression taco, not none"),
        ("--taco group=48", {}, "^--taco: taco:group=48: group=48 is not"),
        ("--taco fp8-e4m3", {}, "^--taco: taco: .*; did you mean format=fp8-e4m3?"),
        # what would silently do nothing
        ("--validate-uncompressed --dp-compression sdp4bit", {}, UNUSED),
        ("--compression-error-bound 0.1 --pp-compression int8", {}, UNUSED),
        ("--compression-start-iteration 3", {}, UNUSED),
        ("--compression-transport collective --pp-compression int8", {}, UNUSED),
        ("--compression-min-mb 0", {}, UNUSED),
        (
            "--tp-compression-layers 1",
            {},
            "--tp-compression-layers given, .*; add --tp-compression, or drop it$",
        ),
        *EMPTY_CODECS,
        (
            "--tp-compression int9",
            {},
            "int9.*tah-quant, tensor-6bit, tensor-8bit, or MODULE",
        ),
        ("--ep-compression int9", {}, "int8, sdp4bit, taco, experts-8bit, or MODULE"),
        (
            "--dp-compression powersgd",
            {},
            "lossless, sdp4bit, taco, tagc, gradients-4bit, or MODULE",
        ),
        (
            "--compression-report ''",
            {},
            "--compression-report  must be a folder; name one, or drop the flag",
        ),
        (
            "--tp-compression tagc",
            {},
            "--tp-compression tagc: tagc compresses gradients of weights only",
        ),
        (
            "--taco --compression-error-bound 0",
            {},
            "--compression-error-bound 0.0 must be a relative error",
        ),
        (
            "--dp-compression int8 --compression-start-iteration 100",
            {},
            "not before the last of 100",
        ),
        (
            "--cp-compression int8/int6",
            CONTEXT,
            "--cp-compression int8/int6: what attention gathers is sent",
        ),
        (
            "--cp-compression int8 int9",
            CONTEXT,
            "--cp-compression BACKWARD: codec 'int9' is unknown",
        ),
        (
            "--cp-compression lossless",
            CONTEXT | dict(fp16=True),
            "--cp-compression lossless shortens",
        ),
        ("--cp-compression int8", CONTEXT | ENGINE, "needs --transformer-impl local"),
    ],
)
def test_a_refusal_names_the_flag_in_one_line(flags: str, megatron: dict, line: str) -> None:
    with pytest.raises(CompressionConfigError, match=line) as error:
        _config(*shlex.split(flags), **megatron)
    assert "\n" not in str(error.value)


def test_an_error_bound_serves_context_parallelism_alone() -> None:
    config = _config("--cp-compression", "int8", "--compression-error-bound", "0.05")
    assert config.error_bound == 0.05


def test_one_rank_accepts_context_compression_with_any_layers() -> None:
    """Nothing is exchanged there, so Transformer Engine's layers do no harm."""
    assert _config("--cp-compression", "int8", **ENGINE).context_parallel.enabled
