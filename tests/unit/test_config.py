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
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, changed_settings
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
    return resolve(parsed(*flags, **megatron))


def test_taco_is_the_papers_settings() -> None:
    """--taco = --tp-compression taco, with settings or without."""
    config = _config("--taco").tensor_parallel
    assert config == TensorParallelConfig(compression="taco")
    codec = config.forward_codec
    assert (codec.format, codec.group, codec.scales, codec.hadamard) == (
        "fp8-e4m3",
        128,
        "dual",
        True,
    )
    assert config.rules(0)["tp.forward"].min_bytes == 8 * 2**20
    assert _config("--tp-compression", "taco").tensor_parallel == config
    assert _config("--taco", "--tp-compression", "taco").tensor_parallel == config
    settings = _config("--taco", "format=int8,group=64").tensor_parallel
    assert settings.forward_codec.name == "taco:format=int8,group=64"


def test_taco_paper_is_three_codecs() -> None:
    """One flag for all dimensions; a dimension's own flag beside it wins."""
    config = _config("--compression", "taco-paper", use_distributed_optimizer=True)
    assert config.tensor_parallel == TensorParallelConfig(compression="taco")
    assert (
        config.data_parallel.compression == "sdp4bit"
        and config.data_parallel.weight_codec is not None
    )
    assert config.pipeline_parallel == PipelineParallelConfig(compression="tah-quant")
    mixed = _config(
        "--compression", "taco-paper", "--pp-compression", "int8", "--taco", "format=int6"
    )
    assert mixed.pipeline_parallel.compression == "int8"
    assert mixed.tensor_parallel.compression == "taco:format=int6"
    without = _config(
        "--compression", "taco-paper", "--dp-compression", "none", "--tp-compression", "tensor-6bit"
    )
    assert not without.data_parallel.enabled and without.pipeline_parallel.enabled
    assert without.tensor_parallel == TensorParallelConfig(compression="tensor-6bit")


def test_every_flag_reaches_its_field(monkeypatch) -> None:
    """All of them but those that other tests name."""
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
    assert {rule.min_bytes for rule in config.rules().values()} == {2**19}
    assert _config("--caat-net-sync-fraction", "0.5").caat_net == CaatNetConfig(sync_fraction=0.5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *((f"{flag} 1", f"{flag} is gone; {instead}") for flag, instead in REMOVED.items()),
        ("--tp-backward-compression=int6", "second value: --tp-compression SPEC BACKWARD"),
        ("--compression-3d", "give --compression taco-paper"),
        ("--compression int6:group=64", "--tp-compression int6:group=64"),
        ("--compression everything", "choose none, auto or taco-paper"),
        ("--tp-compression int8 --ep-compression int8 int6 int4", "--ep-compression: takes SPEC"),
        ("--ep-compression int8 int6 int4", "takes SPEC [BACKWARD], not 3 values"),
    ],
)
def test_a_flag_or_value_that_is_gone_or_wrong_names_the_right_one(flags: str, said: str) -> None:
    """In one line, wherever it stands on the command line."""
    parser = OneLineParser()
    add_flags(parser)
    with pytest.raises(InputError) as error:
        parser.parse_args(["--taco", *flags.split()])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_environment_is_checked_and_said(monkeypatch) -> None:
    """Numbers from 1; a line of the log for each that is set; a resume says what has changed."""
    now = _config("--dp-compression", "int8").asdict()
    monkeypatch.setenv(NODE_SIZE, "2")
    monkeypatch.setenv(COMMUNICATORS, "3")
    args = parsed("--dp-compression", "int8", "--compression-min-mb", "0.5", data_parallel_size=4)
    config = resolve(args)
    assert config.describe(args)[-2:] == [f"{COMMUNICATORS}=3", f"{NODE_SIZE}=2"]
    assert changed_settings(now, config.asdict()) == [
        "--compression-min-mb default -> 0.5",
        f"{COMMUNICATORS} 0 -> 3",
        f"{NODE_SIZE} default -> 2",
    ]
    monkeypatch.setenv(NODE_SIZE, "two")
    with pytest.raises(
        CompressionConfigError, match=f"{NODE_SIZE}=two must be a number >= 1; unset it"
    ):
        _config("--dp-compression", "int8")
    monkeypatch.setenv("MEGATRON_COMPRESSION_NODES", "2")
    with pytest.raises(
        CompressionConfigError, match=f"_NODES is unknown; did you mean {NODE_SIZE}"
    ):
        _config("--dp-compression", "int8")


@pytest.mark.parametrize(
    "flags",
    ["--compression taco-paper", "--pp-compression pipeline-6bit", "--compression auto --taco"],
)
def test_resolve_is_pure(flags: str) -> None:
    """Nothing is written into Megatron's arguments; twice is the same; the result is plain values."""
    args = parsed(*flags.split(), use_distributed_optimizer=True)
    before = copy.deepcopy(vars(args))
    config = resolve(args)
    assert vars(args) == before
    assert resolve(args) == config
    assert json.loads(json.dumps(config.asdict())) == config.asdict()


def test_off_by_default() -> None:
    """Without our flags nothing is compressed, and nothing is said."""
    config = _config()
    assert not config.enabled and config.report is None and not config.caat_net.enabled
    assert all(rule.codec is None for rule in config.rules().values())
    assert config.describe(parsed()) == []


def test_a_resumed_run_says_what_it_does_otherwise() -> None:
    """What decides results and differs; transports, reports and overlap do not."""
    saved = _config(
        "--tp-compression", "tensor-6bit", "--tp-compression-overlap", "halves"
    ).asdict()
    now = _config(
        "--taco", "--tp-compression-layers", "0", "--compression-transport", "collective"
    ).asdict()
    assert changed_settings(saved, now) == [
        "--tp-compression int6:outliers=on -> taco",
        "--tp-compression-layers all -> 0",
    ]
    assert changed_settings(now, now) == changed_settings({}, now) == []


@pytest.mark.parametrize(
    ("settings", "flag", "fix"),
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
        *(
            ({"layers": text}, "TensorParallelConfig.layers", "is not a layer; give")
            for text in ("", "a", "4-2", "1,,2", "0x1", "99999", "all,1")
        ),
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
def test_impossible_settings_name_argument_and_fix(settings, flag, fix) -> None:
    """One line with the argument of a loop of one's own, and what to do; flags are named by ``resolve``."""
    with pytest.raises(CompressionConfigError) as error:
        TensorParallelConfig(**{"compression": "taco", **settings})
    message = str(error.value)
    assert flag in message and fix in message and "\n" not in message


@pytest.mark.parametrize(
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
def test_traffic_that_would_stay_uncompressed_is_refused(megatron, fix) -> None:
    """--taco is refused, never silently ignored; without --taco the same flags pass."""
    with pytest.raises(CompressionConfigError, match=fix):
        _config("--taco", "--tp-compression-layers", "0,2", **megatron)
    _config(**megatron)


def test_what_the_ledger_does_not_see_is_said() -> None:
    """Without --taco the same flags run; the log says what is missing from the bytes."""
    args = parsed(distribute_saved_activations=True)
    config = resolve(args)
    (saved,) = config.describe(args)
    assert saved.startswith("--distribute-saved-activations gathers the input")
    args.tensor_model_parallel_size = 1
    assert config.describe(args) == []


def test_dimensions_without_ranks_are_said() -> None:
    """Not an error, and never silent: compression that has nothing to do on one rank, or without training."""
    evaluates = parsed("--dp-compression", "int8", data_parallel_size=2, skip_train=True)
    assert "--skip-train sends no gradients" in resolve(evaluates).describe(evaluates)[-1]
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    flags = ("--tp-compression", "--pp-compression", "--cp-compression", "--dp-compression")
    idle = parsed("--taco", tensor_model_parallel_size=1)
    assert re.search("^--taco has no effect .* or drop --taco$", resolve(idle).describe(idle)[0])
    for flag, size in zip(flags, (*sizes, "data_parallel_size"), strict=True):
        for ranks in (1, 2):
            args = parsed(flag, "int8", **{size: ranks})
            (line,) = resolve(args).describe(args)
            assert line.startswith(f"{flag} has no effect here") == (ranks == 1)


def test_fp8_in_software_is_said(monkeypatch) -> None:
    """Of the GPUs before sm_89, where int8 sends as many bytes; by sites and hops, too."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    for gpu, capability in ((False, (8, 0)), (True, (8, 9)), (True, (8, 0))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        said = []
        for flags in ("--taco", "--tp-compression int6;fc2=int5/taco", "--dp-compression tagc"):
            rules = _config(*flags.split()).rules().values()
            said.append(fp8_in_software(codec for rule in rules for codec in rule.codecs))
        if (gpu, capability) == (True, (8, 0)):
            assert all(
                line.startswith("taco: A100 converts to fp8 in software") for line in said[:2]
            )
            assert said[2:] == [None]
        else:
            assert said == [None] * 3


CONTEXT = dict(context_parallel_size=2)
UNUSED = "given, but nothing uses it; add --tp-compression"


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
        # "$CODEC" of a script that has not set CODEC
        *(
            (f"--{one}-compression ''", {}, f"--{one}-compression.* is unknown")
            for one in DIMENSIONS
        ),
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
def test_on_the_command_line_flags_are_named(flags: str, megatron: dict, line: str) -> None:
    """In one line."""
    with pytest.raises(CompressionConfigError, match=line) as refusal:
        _config(*shlex.split(flags), **megatron)
    assert "\n" not in str(refusal.value)


def test_context_compression() -> None:
    """A bound of these sites, without tensor parallelism; on one rank nothing is exchanged, whatever the
    layers."""
    assert (
        _config("--cp-compression", "int8", "--compression-error-bound", "0.05").error_bound == 0.05
    )
    assert _config("--cp-compression", "int8", **ENGINE).context_parallel.enabled
