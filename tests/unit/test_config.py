"""Flags, their dataclasses, and what is refused."""

import argparse
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from megatron.compression.codecs import hop_codecs
from megatron.compression.config import (
    RECOMMENDED,
    CompressionConfigError,
    PipelineParallelCompression,
    TensorParallelCompression,
)
from megatron.compression.pipeline_parallel.codecs import describe_pipeline
from megatron.compression.pipeline_parallel.config import RECOMMENDED_PIPELINE
from megatron.compression.resumed import say_changed_settings
from megatron.compression.runtime import tensor_parallel_codec


@pytest.fixture(scope="module")
def arguments():
    """The module that needs megatron.training, imported the way the entrypoint does."""
    from megatron import host

    host.install()
    from megatron.compression import arguments

    return arguments


def _parse(arguments, *flags: str, **megatron) -> argparse.Namespace:
    parser = arguments.add_compression_arguments(argparse.ArgumentParser())
    defaults = dict(
        transformer_impl="local",
        sequence_parallel=False,
        tensor_model_parallel_size=2,
        num_experts=None,
        num_layers=4,
        te_rng_tracker=False,
        cuda_graph_impl="none",
    )
    return parser.parse_args(flags, SimpleNamespace(**{**defaults, **megatron}))


def test_taco_is_the_papers_settings(arguments) -> None:
    """--taco = --tp-compression taco with the defaults of the paper."""
    config = arguments.compression_config_from_args(_parse(arguments, "--taco")).tensor_parallel
    assert config == TensorParallelCompression(tp_compression="taco")
    assert (config.taco_format, config.taco_group_size, config.taco_scales) == ("fp8-e4m3", 128, "dual")
    assert config.min_message_bytes == 8 * 2**20
    same = arguments.compression_config_from_args(_parse(arguments, "--tp-compression", "taco"))
    assert same.tensor_parallel == config


def test_compression_3d_is_three_codecs(arguments) -> None:
    """One flag for all dimensions; a dimension's own flag beside it wins."""
    parse = lambda *flags: arguments.compression_config_from_args(  # noqa: E731
        _parse(arguments, "--compression-3d", *flags, num_distributed_optimizer_instances=1)
    )
    config = parse()
    assert config.tensor_parallel == TensorParallelCompression(tp_compression="taco")
    assert config.data_parallel.dp_compression == "sdp4bit" and config.data_parallel.quantized_gradients
    assert config.pipeline_parallel == PipelineParallelCompression(pp_compression="tah-quant")
    mixed = parse("--pp-compression", "int8", "--taco-format", "int6")
    assert mixed.pipeline_parallel.pp_compression == "int8" and mixed.tensor_parallel.taco_format == "int6"
    without = parse("--dp-compression", "none", "--tp-compression", "auto")
    assert not without.data_parallel.enabled and without.pipeline_parallel.enabled
    assert without.tensor_parallel == TensorParallelCompression(tp_compression="auto")


def test_none_beside_what_compresses_is_refused(arguments) -> None:
    """An explicit none is never overridden in silence."""
    for flags, reason in (
        ("--taco --tp-compression none", "--taco contradicts --tp-compression none"),
        ("--quantized-gradients --dp-compression none", "--quantized-gradients given, but data-parallel"),
        ("--compression-3d --tp-compression none --taco-format int8", "--taco-format given, but"),
    ):
        args = _parse(arguments, *flags.split(), num_distributed_optimizer_instances=1)
        with pytest.raises(CompressionConfigError, match=reason):
            arguments.compression_config_from_args(args)


def test_every_field_is_a_flag(arguments) -> None:
    """Each flag reaches its field."""
    flags = {
        "--taco-format": "int8",
        "--taco-group-size": "64",
        "--taco-scales": "single",
        "--taco-rounding": "dither",
        "--taco-transport": "auto",
        "--taco-min-message-mb": "0.5",
        "--taco-start-iteration": "7",
    }
    args = _parse(arguments, "--taco", *(word for pair in flags.items() for word in pair))
    config = arguments.compression_config_from_args(args).tensor_parallel
    assert config == TensorParallelCompression(
        tp_compression="taco",
        taco_format="int8",
        taco_group_size=64,
        taco_scales="single",
        taco_rounding="dither",
        taco_transport="auto",
        taco_min_message_mb=0.5,
        taco_start_iteration=7,
    )


def test_auto_is_the_recommended_setting(arguments) -> None:
    """It says what it stands for, and takes no setting that contradicts it."""
    args = _parse(arguments, "--tp-compression", "auto", "--taco-min-message-mb", "0")
    config = arguments.compression_config_from_args(args).tensor_parallel
    chosen = {name: getattr(config, name) for name in RECOMMENDED}
    assert config.enabled and chosen == RECOMMENDED != {}
    assert {name: getattr(args, name) for name in RECOMMENDED} == RECOMMENDED, "for the report"
    assert config.taco_min_message_mb == 0
    assert replace(config, taco_layers="0") == replace(config, taco_layers="0")
    with pytest.raises(CompressionConfigError, match="drop one"):
        arguments.compression_config_from_args(_parse(arguments, "--taco", "--tp-compression", "auto"))


def test_auto_between_stages_is_the_recommended_setting(arguments) -> None:
    """It says what it stands for, to the log and the report, and takes no setting that contradicts it."""
    args = _parse(arguments, "--pp-compression", "auto")
    config = arguments.compression_config_from_args(args).pipeline_parallel
    assert (config.enabled, config.forward, config.backward) == (True, "int4", "tah-quant")
    assert {name: getattr(args, name) for name in RECOMMENDED_PIPELINE} == RECOMMENDED_PIPELINE
    assert describe_pipeline(config) == (
        "pipeline stages send fixed point int4 tile 32, signed scales, standardized channels "
        "(--pp-compression auto), back fixed point int6 tile 32"
    )
    assert replace(config, tah_backward_bits=8).backward == "tah-quant"
    with pytest.raises(CompressionConfigError, match="--pp-group-size 64 contradicts --pp-compression auto"):
        PipelineParallelCompression(pp_compression="auto", pp_group_size=64)
    with pytest.raises(CompressionConfigError, match="--tah-tile-size given, but nothing"):
        PipelineParallelCompression(pp_compression="auto", tah_tile_size=32)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--pp-compression auto --pp-normalize none",
            "--pp-normalize none contradicts --pp-compression auto",
        ),
        (
            "--pp-compression auto --pp-scales single",
            "change --pp-compression int4 --pp-backward-compression",
        ),
        ("--tp-compression auto --taco-scales dual", "--taco-scales dual contradicts .* chooses signed"),
        ("--tp-compression auto --taco-backward-format int8", "auto, which leaves it out"),
    ],
)
def test_auto_refuses_a_contradiction_that_is_the_default(arguments, flags: str, reason: str) -> None:
    """What was asked for is not quietly another thing; the message spells auto out."""
    with pytest.raises(CompressionConfigError, match=reason):
        arguments.compression_config_from_args(_parse(arguments, *flags.split()))


def test_settings_that_auto_may_choose_have_their_defaults_without_it(arguments) -> None:
    args = _parse(arguments, "--taco")
    config = arguments.compression_config_from_args(args)
    for part, names in (
        (config.tensor_parallel, RECOMMENDED),
        (config.pipeline_parallel, RECOMMENDED_PIPELINE),
    ):
        for one in fields(part):
            if one.name in names:
                assert getattr(part, one.name) == getattr(args, one.name) == one.default, one.name


def test_a_resumed_run_says_what_it_does_otherwise(arguments) -> None:
    """What auto stood for when the checkpoint was written may be another setting; transports do not count."""
    saved, args = (
        _parse(arguments, "--tp-compression", "auto", *flags) for flags in ((), ("--taco-layers", "0"))
    )
    for one in (saved, args):
        arguments.compression_config_from_args(one)
    saved.taco_scales, saved.taco_rounding, saved.taco_transport = "single", "dither", "collective"
    lines = []
    say_changed_settings(saved, args, lines.append)
    assert lines == [
        "compression: other settings than the checkpoint's: --taco-scales single -> signed, "
        "--taco-rounding dither -> nearest, --taco-layers all -> 0"
    ]
    say_changed_settings(args, args, lines.append)
    say_changed_settings(SimpleNamespace(seed=1), args, lines.append)  # of Megatron without this overlay
    assert len(lines) == 1


def test_two_names_are_for_the_hops() -> None:
    """Codec and name say both formats, both roundings; one format written twice is one."""
    settings = TensorParallelCompression(tp_compression="taco", taco_format="int6,int8")
    codec = tensor_parallel_codec(settings, settings.taco_format)
    first, second = hop_codecs(codec)
    assert (first.config.format, second.config.format) == ("int6", "int8")
    assert "int6 then int8" in codec.name
    settings = TensorParallelCompression(
        tp_compression="taco", taco_format="fp8-e4m3,int6", taco_rounding="nearest,dither"
    )
    codec = tensor_parallel_codec(settings, settings.taco_format)
    first, second = hop_codecs(codec)
    assert (first.config.rounding, second.config.rounding) == ("nearest", "dither")
    assert codec.rounds_randomly and second.rounds_randomly and not first.rounds_randomly
    assert "nearest then dither rounding" in codec.name
    settings = TensorParallelCompression(tp_compression="taco", taco_format="int6,int6")
    codec = tensor_parallel_codec(settings, settings.taco_format)
    assert hop_codecs(codec) == (codec, codec) and codec.second is None


def test_off_by_default(arguments) -> None:
    """Without our flags nothing is compressed."""
    config = arguments.compression_config_from_args(_parse(arguments))
    assert not config.tensor_parallel.enabled
    assert config.report.compression_report is None


@pytest.mark.parametrize(
    ("settings", "flag", "fix"),
    [
        ({"taco_format": "fp9"}, "--taco-format fp9", "fp8-e4m3"),
        ({"taco_format": "int6,fp9"}, "--taco-format int6,fp9", "fp8-e4m3"),
        ({"taco_format": "int6,int8,int8"}, "--taco-format int6,int8,int8", "give one, or two"),
        ({"taco_format": "int6,fp8-e4m3", "taco_rounding": "dither"}, "--taco-format fp8-e4m3", "stochastic"),
        ({"taco_rounding": "up"}, "--taco-rounding up", "stochastic"),
        ({"taco_rounding": "nearest,dither"}, "--taco-rounding dither", "not --taco-format fp8-e4m3"),
        ({"tp_compression": "auto", "taco_format": "int4"}, "--taco-format int4", "--tp-compression taco"),
        ({"taco_group_size": 100}, "--taco-group-size 100", "power of two"),
        ({"taco_group_size": 1024}, "--taco-group-size 1024", "512"),
        ({"taco_rounding": "dither"}, "--taco-rounding dither", "stochastic"),
        (
            {"taco_format": "int6", "taco_backward_format": "fp8-e5m2", "taco_scales": "signed"},
            "--taco-scales signed",
            "not --taco-backward-format fp8-e5m2",
        ),
        ({"taco_format": "int6,fp8-e4m3", "taco_scales": "signed"}, "--taco-scales signed", "int6,fp8-e4m3"),
        ({"tp_compression": "none", "taco_scales": "signed"}, "--taco-scales given", "add --taco"),
        ({"taco_scales": "signed"}, "--taco-scales signed", "not --taco-format fp8-e4m3; choose an int"),
        ({"taco_min_message_mb": -1.0}, "--taco-min-message-mb", ">= 0"),
        ({"taco_min_message_mb": float("nan")}, "--taco-min-message-mb", ">= 0"),
        ({"taco_overlap_chunks": 0}, "--taco-overlap-chunks", ">= 1"),
        ({"taco_start_iteration": -1}, "--taco-start-iteration", ">= 0"),
        ({"tp_compression": "none", "taco_format": "int8"}, "--taco-format", "add --taco"),
    ],
)
def test_impossible_settings_name_flag_and_fix(settings, flag, fix) -> None:
    """One line with the flag and what to do."""
    with pytest.raises(CompressionConfigError) as error:
        TensorParallelCompression(**{"tp_compression": "taco", **settings})
    message = str(error.value)
    assert flag in message and fix in message and "\n" not in message


@pytest.mark.parametrize(
    ("megatron", "fix"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        ({"num_experts": 8}, "--num-experts"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant"),
        ({"mtp_num_layers": 1}, "drop one of the two"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations gathers the inputs"),
        ({"cuda_graph_impl": "local"}, "drop --cuda-graph-impl or --taco"),
    ],
)
def test_traffic_that_would_stay_uncompressed_is_refused(arguments, megatron, fix) -> None:
    """--taco is refused, never silently ignored; without --taco the same flags pass."""
    with pytest.raises(CompressionConfigError, match=fix):
        arguments.compression_config_from_args(_parse(arguments, "--taco", **megatron))
    arguments.compression_config_from_args(_parse(arguments, **megatron))


def test_what_the_ledger_does_not_see_is_said(arguments) -> None:
    """Without --taco the same flags run; the log says what is missing from the bytes."""
    assert arguments.uncounted(_parse(arguments)) == []
    args = _parse(arguments, mtp_num_layers=1, cuda_graph_impl="local")
    mtp, graphs = arguments.uncounted(args)
    assert mtp.startswith("--mtp-num-layers gathers the input") and graphs.startswith(
        "--cuda-graph-impl local:"
    )
    args.tensor_model_parallel_size = 1
    assert arguments.uncounted(args) == []


def test_random_rounding_needs_megatrons_random_state(arguments) -> None:
    """Its seeds come from there."""
    flags = ("--taco", "--taco-rounding", "stochastic")
    with pytest.raises(CompressionConfigError, match="--te-rng-tracker"):
        arguments.compression_config_from_args(_parse(arguments, *flags, te_rng_tracker=True))
    arguments.compression_config_from_args(_parse(arguments, *flags))


def test_tp_1_is_said(arguments) -> None:
    """--taco without tensor parallelism has nothing to do, and says so."""
    config = arguments.compression_config_from_args(_parse(arguments, "--taco"))
    assert "no tensor-parallel traffic" in arguments.idle_reason(config, 1)
    assert arguments.idle_reason(config, 2) is None


def test_pipeline_compression_of_one_stage_is_said(arguments) -> None:
    """Nothing goes from stage to stage."""
    config = arguments.compression_config_from_args(_parse(arguments, "--pp-compression", "tah-quant"))
    assert "--pp-compression has no effect here" in arguments.pipeline_idle_reason(config, 1)
    assert arguments.pipeline_idle_reason(config, 2) is None
    without = arguments.compression_config_from_args(_parse(arguments))
    assert arguments.pipeline_idle_reason(without, 1) is None


def test_pipeline_compression_refuses_graphs_of_whole_iterations(arguments) -> None:
    """What a replayed graph sends is neither counted nor chosen; graphs of single layers send nothing."""
    parse = lambda implementation: _parse(  # noqa: E731
        arguments, "--pp-compression", "tah-quant", cuda_graph_impl=implementation
    )
    with pytest.raises(CompressionConfigError, match="drop --cuda-graph-impl full_iteration or --pp-"):
        arguments.compression_config_from_args(parse("full_iteration"))
    assert arguments.compression_config_from_args(parse("local")).pipeline_parallel.enabled


def test_uncompressed_validation_needs_compressed_training(arguments) -> None:
    """Refused without a codec of activations; with one that has nothing to do, said."""
    parse = lambda *flags: arguments.compression_config_from_args(  # noqa: E731
        _parse(arguments, "--validate-uncompressed", *flags, num_distributed_optimizer_instances=1)
    )
    for flags in ((), ("--dp-compression", "sdp4bit")):
        with pytest.raises(CompressionConfigError, match="no activations are compressed; add --taco or"):
            parse(*flags)
    config = parse("--taco")
    assert "has no effect here" in arguments.validation_line(config, 1, 2)
    assert "evaluation sends activations uncompressed" in arguments.validation_line(config, 2, 1)
    assert "has no effect here" in arguments.validation_line(parse("--pp-compression", "int8"), 2, 1)
    without = arguments.compression_config_from_args(_parse(arguments, "--taco"))
    assert arguments.validation_line(without, 2, 2) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tah_tile_size": 32}, "--tah-tile-size given, but nothing between pipeline stages uses it; add"),
        ({"pp_compression": "tah-quant", "tah_low_bits": 5}, "low_bits=5 and high_bits=4 must lie between"),
        ({"pp_compression": "taco", "tah_high_bits": 5}, "--tah-high-bits given, but nothing between"),
        ({"pp_compression": "int8", "pp_taco_group_size": 64}, "uses it; add --pp-compression taco"),
        ({"pp_compression": "tah-quant", "pp_scales": "signed"}, "uses it; add --pp-compression int8, int6"),
        ({"pp_compression": "tah-quant", "pp_group_size": 64}, "uses it; add --pp-compression int8, int6"),
        ({"pp_compression": "int4", "pp_group_size": 48}, "flags do not fit: group_size=48"),
        ({"pp_compression": "int4", "pp_group_size": 0}, "flags do not fit: group_size=0"),
        ({"pp_compression": "taco", "pp_taco_format": "fp7"}, "format='fp7' is not supported"),
        ({"pp_compression": "tah-quant", "tah_backward_bits": 7}, "--tah-backward-bits 7 is not possible"),
        ({"pp_compression": "tah-quant", "tah_start_iteration": -1}, "must be an iteration >= 0"),
        ({"pp_backward_compression": "int8"}, "pipeline compression is off; add --pp-compression"),
        ({"pp_compression": "taco", "pp_backward_compression": "fp8"}, "fp8 is unknown; choose one of none"),
        ({"pp_normalize": "center"}, "--pp-normalize given, but nothing between pipeline stages uses it"),
        ({"pp_rounding": "dither"}, "--pp-rounding given, but nothing between pipeline stages uses it"),
        (
            {
                "pp_compression": "int4",
                "pp_backward_compression": "none",
                "pp_backward_rounding": "stochastic",
            },
            "--pp-backward-rounding given, but nothing between",
        ),
        (
            {"pp_compression": "tah-quant", "tah_low_bits": 4, "tah_high_ratio": 0.5},
            "--tah-high-ratio given, but all activations get 4 bits",
        ),
        (
            {"pp_compression": "tah-quant", "tah_high_bits": 3, "tah_allocation": "tile"},
            "--tah-allocation given, but all activations get 3 bits",
        ),
        ({"pp_compression": "tah-quant", "pp_rounding": "dither"}, "tah-quant, rounds to nearest; choose"),
        ({"pp_compression": "taco", "pp_rounding": "dither"}, "flags do not fit: rounding='dither' needs"),
    ],
)
def test_impossible_pipeline_settings(settings: dict, reason: str) -> None:
    """Each refusal names the flag, and the fix."""
    with pytest.raises(CompressionConfigError, match=reason):
        PipelineParallelCompression(**settings)
