"""Settings of data parallelism: what they mean, and what is refused with which words."""

import re
from argparse import ArgumentParser, Namespace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.training.arguments import add_megatron_arguments

from megatron.compression.codecs import parse_codec
from megatron.compression.data_parallel.codec_gradients import (
    CodecGradientSync,
    parse_gradient_compressor,
)
from megatron.compression.data_parallel.config import _REFUSED, DataParallelConfig
from megatron.compression.errors import CompressionConfigError, spelled
from megatron.compression.names import DDP_FIELDS, PYTHON_NAMES, flag_of_argument

ON = {"compression": "sdp4bit"}
TAGC = {"compression": "tagc"}
TAGC_LINE = "data parallelism: each rank leaves out 0.8 of its gradients of"
FSDP2 = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
POWERSGD = {"compression": "examples.powersgd:PowerSGD"}
WEIGHTS = "sdp4bit:intra=4,group=2048,hadamard=off"
INSTANCES = {"num_distributed_optimizer_instances": 2}
DERIVED = {"use_layer_wise_distributed_optimizer": False, "gtp_weight_remat_size": 1}
"""What Megatron's validation adds to its flags."""


@lru_cache
def _megatron() -> dict:
    """Megatron's flags at their defaults, but for a bf16 run with the distributed optimizer."""
    parser = ArgumentParser()
    add_megatron_arguments(parser)
    return {
        **vars(parser.parse_args([])),
        **DERIVED,
        "use_distributed_optimizer": True,
        "bf16": True,
    }


def _check(settings: dict, **megatron) -> DataParallelConfig:
    assert megatron.keys() <= _megatron().keys(), "not a flag of Megatron's"
    args = Namespace(**{**_megatron(), **megatron})
    config = DataParallelConfig(**settings).resolved(args)
    config.check(args)
    return config


def test_sdp4bit_alone_means_gradients_and_weights() -> None:
    config = _check(ON)
    assert config.weights == WEIGHTS
    assert config.weight_codec == parse_codec("sdp4bit:intra=4,inter=4,group=2048,hadamard=off")


@pytest.mark.parametrize("megatron", [{"use_distributed_optimizer": False}, {"bf16": False}])
def test_without_masters_sdp4bit_leaves_weights_alone(megatron: dict) -> None:
    """There is nothing to send the change of."""
    assert _check(ON, **megatron).weights == "none"


@pytest.mark.parametrize(
    "settings",
    [{**ON, "weights": "none"}, {"compression": "sdp4bit:intra=4"}, {"compression": "int8"}],
    ids=str,
)
def test_any_other_spec_leaves_weights_alone(settings: dict) -> None:
    assert _check(settings).weight_codec is None


def test_weights_may_have_another_codec() -> None:
    config = _check({"compression": "int8", "weights": "taco"})
    assert config.weight_codec == parse_codec("taco")


def test_weights_may_be_compressed_alone() -> None:
    config = _check({"weights": "int8"})
    assert config.enabled
    assert config.compressor is None


def test_under_fsdp2_sdp4bit_gathers_weights_lossless() -> None:
    assert _check(ON, **FSDP2).weights == "lossless"


def test_under_fsdp2_weights_may_have_another_codec() -> None:
    assert _check({"weights": "int8"}, **FSDP2).weights == "int8"


@pytest.mark.parametrize(
    ("spec", "inner", "outer"),
    [
        ("sdp4bit", "sdp4bit", "sdp4bit:intra=4"),
        ("gradients-4bit:outer=none", "sdp4bit", None),
        (
            "int8:group=64,outer=int4:group=32,scales=single",
            "int8:group=64",
            "int4:group=32,scales=single",
        ),
        ("int6/int5:outer=gradients-4bit", "int6/int5", "sdp4bit"),
        ("none:outer=int8", None, "int8"),
        ("tagc", "tagc", None),
    ],
)
def test_the_outer_hop_has_a_codec_of_its_own(
    spec: str, inner: str | None, outer: str | None
) -> None:
    """The setting outer= of any spec; else a codec's second hop, which is the one between nodes."""
    config = _check({"compression": spec}, **INSTANCES)
    rules = config.rules(None)
    codecs = (rules["dp.gradient"].codec, rules["dp.outer"].codec)
    assert [codec and codec.name for codec in codecs] == [inner, outer]
    assert (config.weights == WEIGHTS) == (inner == "sdp4bit")
    args = Namespace(
        **{**_megatron(), **INSTANCES, "data_parallel_size": 4, "context_parallel_size": 1}
    )
    codec = outer or "uncompressed"
    line = f"sums of gradients between the 2 optimizer instances: {codec} (outer=CODEC"
    assert line in config.lines(args)[-1]
    args.use_torch_fsdp2 = True  # which has no such hop
    assert line not in "".join(config.lines(args))


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("sdp4bit", f"; weight updates {WEIGHTS}$"),
        ("sdp4bit", "gradients sdp4bit, 8.25 bits a value inside a node, 4.25 between nodes"),
        ("tagc", f"{TAGC_LINE} .*16 bits each; weights uncompressed$"),
        ("tagc:wire=sketch", f"{TAGC_LINE} .*sent as sketches; weights uncompressed$"),
    ],
)
def test_what_the_log_says(spec: str, line: str) -> None:
    assert re.search(line, _check({"compression": spec}).describe())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"compression": "powersgd"},
            "DataParallelConfig.compression: codec 'powersgd' is unknown; choose",
        ),
        (
            {"compression": "examples.nothing:At"},
            "DataParallelConfig.compression: .*examples.nothing:At",
        ),
        ({"compression": "os:getcwd"}, "os:getcwd"),
        (
            {"compression": "int8:outer=tagc"},
            "outer=tagc: tagc compresses gradients of weights only",
        ),
        ({"compression": "int8:outer=tah-quant"}, "needs tokens and channels"),
        ({"compression": "int6:group=100"}, "DataParallelConfig.compression: int6:group=100"),
        (
            {**ON, "weights": "tagc"},
            "DataParallelConfig.weights tagc: tagc compresses gradients of weights",
        ),
        ({**ON, "weights": "sdp4bit:intra=6"}, "sdp4bit:intra=6"),
        ({**ON, "node_size": 0}, "DataParallelConfig.node_size 0 must be"),
        *(
            ({field: text}, f"^DataParallelConfig.{field} .*needs tokens and channels")
            for text in ("tah-quant", "int4:normalize=standardize,group=32")
            for field in ("compression", "weights")
        ),
    ],
)
def test_impossible_settings(settings: dict, message: str) -> None:
    """Refused by the settings themselves."""
    with pytest.raises(CompressionConfigError, match=message):
        DataParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "megatron", "message"),
    [
        (ON, {"use_megatron_fsdp": True}, r"its own buffers \(--use-torch-fsdp2 is supported\)"),
        (
            {"weights": "sdp4bit"},
            FSDP2,
            "WEIGHTS sdp4bit: SDP4Bit sends differences to the last weights",
        ),
        (
            {"compression": "lossless"},
            FSDP2,
            "lossless: under FSDP2 the host would wait in each layer",
        ),
        (TAGC, {**FSDP2, "save": "here"}, "tagc is not saved under --use-torch-fsdp2"),
        (
            ON,
            {"use_layer_wise_distributed_optimizer": True, "optimizer": "muon"},
            "--optimizer muon with --use-distributed-optimizer",
        ),
        (ON, {"optimizer_cuda_graph": True}, "--optimizer-cuda-graph replays the optimizer's step"),
        (
            TAGC,
            {"rerun_mode": "report_stats"},
            "--rerun-mode report_stats runs every iteration twice",
        ),
        (
            {"compression": "none:outer=int8"},
            {},
            "--dp-compression outer=int8 is for the sums .*; add "
            "--num-distributed-optimizer-instances N, or",
        ),
        ({"compression": "none:outer=lossless"}, {"fp16": True, **INSTANCES}, "has 5; use --bf16"),
        (ON, {"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({**ON, "weights": "int8"}, {"bf16": False}, "add --bf16 or --fp16"),
        (
            {"weights": "int8"},
            {"use_distributed_optimizer": False},
            "--dp-compression WEIGHTS compresses the distributed optimizer's",
        ),
        (TAGC, {"fp16": True}, "--fp16 changes the loss scale; tagc adds"),
        (
            POWERSGD,
            {"calculate_per_token_loss": True},
            "--calculate-per-token-loss divides gradients by",
        ),
        (TAGC, {"save": "x", "ckpt_format": "torch"}, "--ckpt-format torch_dist, not torch"),
    ],
)
def test_impossible_combinations(settings: dict, megatron: dict, message: str) -> None:
    """Refused together with Megatron's flags."""
    with pytest.raises(CompressionConfigError, match=message):
        _check(settings, **megatron)


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_flags_exist(name: str) -> None:
    """Under the name that Megatron gives them: another one would refuse nothing."""
    flag = flag_of_argument(name)
    parser = ArgumentParser()
    add_megatron_arguments(parser)
    assert flag in parser._option_string_actions
    with pytest.raises(CompressionConfigError, match=f"{flag} "):
        _check(ON, **{name: 2})


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_flags_are_on_the_page(name: str) -> None:
    page = Path(__file__).parents[2] / "docs/data_parallel.md"
    refused = page.read_text().partition("## Refused")[2].partition("\n## ")[0]
    assert f"`{flag_of_argument(name)}`" in refused


@pytest.mark.parametrize("argument", DDP_FIELDS)
def test_a_loop_of_ones_own_is_refused_by_its_ddp_config(argument: str) -> None:
    """It has no flags that could have been refused before the model was wrapped."""
    field = DDP_FIELDS[argument]
    line = f"DistributedDataParallelConfig.{field} .*; drop it or DataParallelConfig"
    wrapped = DistributedDataParallelConfig()
    setattr(wrapped, field, True)
    with pytest.raises(CompressionConfigError, match=line), spelled(PYTHON_NAMES):
        DataParallelConfig(**ON).check_wrapped(wrapped)


def test_a_usual_ddp_config_is_not_refused() -> None:
    DataParallelConfig(**ON).check_wrapped(DistributedDataParallelConfig())


def test_one_of_another_package_has_its_module_for_a_name() -> None:
    made = parse_gradient_compressor("examples.powersgd:PowerSGD:rank=2")
    assert made.rank == 2 and made.name == "examples.powersgd:PowerSGD:rank=2"
    with pytest.raises(CompressionConfigError, match="rank=0 must be"):
        parse_gradient_compressor("examples.powersgd:PowerSGD:rank=0")
    with pytest.raises(CompressionConfigError, match="no setting 'ranks'; choose among rank"):
        parse_gradient_compressor("examples.powersgd:PowerSGD:ranks=2")


@pytest.mark.parametrize(("nodes", "local", "pieces"), [(2, 2, 8), (1, 4, 1), (4, 1, 1)])
def test_pieces_of_a_bucket(nodes: int, local: int, pieces: int) -> None:
    """There are several where one hop's exchange can overlap with the other's."""
    topology = SimpleNamespace(
        nodes=nodes,
        local=local,
        world_size=nodes * local,
        two_hops=nodes > 1 and local > 1,
    )
    numel = 4 * 24 * 4096
    bucket = SimpleNamespace(
        topology=topology, numel=numel, sharded=False, gradients=torch.empty(numel)
    )
    assert len(CodecGradientSync(bucket, parse_codec("sdp4bit")).pieces) == pieces
