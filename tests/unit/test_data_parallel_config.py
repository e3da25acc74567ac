"""Flags of data-parallel compression: what they mean, and what is refused with which words."""

from argparse import ArgumentParser, Namespace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from megatron.training.argument_utils import ArgumentGroupFactory, _default_config_from_args
from megatron.training.arguments import add_megatron_arguments

from megatron.compression.arguments import add_compression_arguments, compression_config_from_args
from megatron.compression.config import CompressionConfigError, DataParallelCompression
from megatron.compression.data_parallel.bucket import ParameterSpan
from megatron.compression.data_parallel.checks import _REFUSED, check_data_parallel, idle_reason
from megatron.compression.data_parallel.codecs import data_parallel_codecs
from megatron.compression.data_parallel.tagc_config import parse_tagc_layers
from megatron.compression.data_parallel.tagc_layers import is_compressed
from megatron.compression.data_parallel.topology import group_by_node, nodes_by_size, nodes_by_views

ON = {"dp_compression": "sdp4bit"}
TAGC = {"dp_compression": "tagc"}
DERIVED = {"use_layer_wise_distributed_optimizer": False, "gtp_weight_remat_size": 1}
"""What Megatron's validation adds to its flags."""


@lru_cache
def _megatron() -> dict:
    """Megatron's flags at their defaults, but for a bf16 run with the distributed optimizer."""
    parser = ArgumentParser()
    add_megatron_arguments(parser)
    return {**vars(parser.parse_args([])), **DERIVED, "use_distributed_optimizer": True, "bf16": True}


def _check(settings: dict, **megatron) -> DataParallelCompression:
    assert megatron.keys() <= _megatron().keys(), "not a flag of Megatron's"
    args = Namespace(**{**_megatron(), **megatron})
    config = DataParallelCompression(**settings).resolved(args.use_distributed_optimizer)
    check_data_parallel(config, args)
    return config


def test_the_preset() -> None:
    """``--dp-compression sdp4bit`` alone is both parts; one part named is that part alone."""
    both = _check(ON)
    assert both.quantized_weights and both.quantized_gradients
    plain = _check(ON, use_distributed_optimizer=False)
    assert not plain.quantized_weights and plain.quantized_gradients
    weights = _check({**ON, "quantized_weights": True})
    assert weights.quantized_weights and not weights.quantized_gradients


def test_tagc_keeps_error_feedback() -> None:
    """In fp32 unless it is asked for in 8 bits; weights are compressed only on request."""
    plain = _check(TAGC)
    assert plain.dp_error_feedback == "fp32" and not plain.quantized_weights
    assert _check({**TAGC, "dp_error_feedback": "int8"}).dp_error_feedback == "int8"
    assert _check({**TAGC, "quantized_weights": True, "wq_group_size": 512}).quantized_weights


def test_tagc_begins_uncompressed() -> None:
    """For a fifth of the run, at most 1000 iterations; a number of one's own counts, 0 too."""
    started = {
        iterations: DataParallelCompression(**TAGC).resolved(True, iterations).gradients_start_iteration
        for iterations in (None, 0, 400, 100_000)
    }
    assert started == {None: 0, 0: 0, 400: 80, 100_000: 1000}
    for own in (0, 7):
        asked = DataParallelCompression(**TAGC, gradients_quantization_start_iteration=own)
        assert asked.resolved(True, 400).gradients_start_iteration == own
    assert DataParallelCompression(**ON).resolved(True, 400).gradients_start_iteration == 0


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ("--train-iters 50", 10),
        ("--train-samples 800 --global-batch-size 8", 20),
        ("--train-iters 50 --gradients-quantization-start-iteration 0", 0),
    ],
)
def test_the_warm_up_is_known_to_checkpoints_and_reports(flags: str, start: int) -> None:
    """From Megatron's flags, by iterations or samples, into its arguments and the configuration."""
    parser = ArgumentParser()
    add_megatron_arguments(parser)
    add_compression_arguments(parser)
    args = parser.parse_args(["--bf16", "--dp-compression", "tagc", *flags.split()])
    vars(args).update(DERIVED)
    config = compression_config_from_args(args).data_parallel
    assert config.gradients_start_iteration == args.gradients_quantization_start_iteration == start


def test_flags_of_the_authors() -> None:
    """Their names parse, with and without the rotation."""
    parser = ArgumentParser()
    ArgumentGroupFactory(DataParallelCompression).build_group(parser, title="t")
    line = (
        "--dp-compression sdp4bit --quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 "
        "--quantized-gradients --gq-group-size-inter 128 --gradient-quantization-bits-inter 4 "
        "--gq-group-size-intra 512 --gradient-quantization-bits-intra 8 --hadamard-transform "
        "--gradient-alltoall-pipeline 4 --gradients-quantization-start-iteration 10"
    )
    config = _default_config_from_args(DataParallelCompression, parser.parse_args(line.split()))
    assert config.gq_group_size_intra == 512 and config.hadamard_transform
    args = parser.parse_args([*line.split(), "--no-hadamard-transform", "--no-weight-difference"])
    config = _default_config_from_args(DataParallelCompression, args)
    assert not config.hadamard_transform and not config.weight_difference


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wq_group_size": 2048, "quantized_gradients": True}, "is off; add --dp-compression"),
        ({**ON, "weight_quantization_bits": 6}, "--weight-quantization-bits 6 must be 4 or 8"),
        ({**ON, "gq_group_size_inter": 100}, "--gq-group-size-inter 100 is not possible"),
        ({**ON, "gradient_alltoall_pipeline": -1}, "--gradient-alltoall-pipeline -1 must be"),
        (
            {**TAGC, "gradients_quantization_start_iteration": -1},
            "--gradients-quantization-start-iteration -1 must be an integer >= 0",
        ),
        ({**ON, "dp_intra_node_size": 0}, "--dp-intra-node-size 0 must be"),
        ({**ON, "dp_error_feedback_average": 0.5}, "without --dp-error-feedback"),
        ({**ON, "dp_error_feedback": "fp32", "dp_error_feedback_average": 2.0}, r"must lie in \(0, 1\]"),
        ({**ON, "tagc_sparsity": 0.9}, "--tagc-sparsity given without TAGC"),
        ({"tagc_bits": 32}, "add --dp-compression tagc"),
        ({**TAGC, "gq_group_size_inter": 64}, "--gq-group-size-inter given, but --dp-compression tagc"),
        ({**TAGC, "tagc_sparsity": 0.3}, r"--tagc-sparsity 0.3 must lie in \[0.5, 0.98\]"),
        ({**TAGC, "tagc_sketch_ratio": 4.0}, "has no sketch; add --tagc-wire sketch"),
        ({**TAGC, "tagc_wire": "sketch", "tagc_sketch_ratio": 0.5}, "--tagc-sketch-ratio 0.5 must lie in"),
        ({**TAGC, "tagc_wire": "sketch", "tagc_bits": 8}, "8 must be 16, 32 with --tagc-wire sketch"),
        ({**TAGC, "tagc_layers": "mlp,norm"}, "--tagc-layers mlp,norm: 'norm' is unknown"),
    ],
)
def test_impossible_settings(settings: dict, message: str) -> None:
    """Refused by the settings themselves."""
    with pytest.raises(CompressionConfigError, match=message):
        DataParallelCompression(**settings)


@pytest.mark.parametrize(
    ("settings", "megatron", "message"),
    [
        (ON, {"use_megatron_fsdp": True}, "--use-megatron-fsdp communicates inside its own buffers"),
        (ON, {"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        (ON, {"num_experts": 8}, "--num-experts"),
        (
            ON,
            {"use_layer_wise_distributed_optimizer": True, "optimizer": "muon"},
            "--optimizer muon with --use-distributed-optimizer",
        ),
        (ON, {"optimizer_cuda_graph": True}, "--optimizer-cuda-graph replays the optimizer's step"),
        (TAGC, {"rerun_mode": "report_stats"}, "--rerun-mode report_stats runs every iteration twice"),
        (ON, {"fp8_param_gather": True}, "--fp8-param-gather gathers fp8 weights already"),
        (ON, {"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        (ON, {"ddp_reduce_scatter_with_fp32_accumulation": True}, "has its own reduce-scatter"),
        (ON, {"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        (ON, {"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        (ON, {"bf16": False}, "add --bf16 or --fp16"),
        (
            {**ON, "quantized_weights": True},
            {"use_distributed_optimizer": False},
            "--quantized-weights quantises the distributed optimizer's",
        ),
        (
            {**ON, "quantized_gradients": True, "wq_group_size": 512},
            {},
            "--wq-group-size given, but weights are not quantised",
        ),
        (
            {**ON, "quantized_weights": True, "gq_group_size_intra": 512},
            {},
            "--gq-group-size-intra given, but gradients are not quantised",
        ),
        ({**ON, "dp_error_feedback": "fp32"}, {"fp16": True}, "units of the loss scale"),
        (
            {**ON, "dp_error_feedback": "int8"},
            {"save": "x", "ckpt_format": "torch"},
            "--ckpt-format torch_dist, not torch",
        ),
    ],
)
def test_impossible_combinations(settings: dict, megatron: dict, message: str) -> None:
    """Refused together with Megatron's flags."""
    with pytest.raises(CompressionConfigError, match=message):
        _check(settings, **megatron)


@pytest.mark.parametrize(
    ("name", "shape", "chosen"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 4), {"mlp", "mlp,attention", "all"}),
        ("chunk1.decoder.layers.0.self_attention.linear_qkv.weight", (4, 4), {"mlp,attention", "all"}),
        ("embedding.word_embeddings.weight", (4, 4), {"all"}),
        ("mtp.layers.0.eh_proj.weight", (4, 4), {"all"}),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4,), set()),
    ],
)
def test_tagc_layers(name: str, shape: tuple[int, ...], chosen: set[str]) -> None:
    """Matrices by what their names say; ``all`` takes those too that belong to no kind."""
    span = ParameterSpan(name, torch.nn.Parameter(torch.zeros(shape)), 0, 4)
    for text in ("mlp", "mlp,attention", "all"):
        assert is_compressed(span, parse_tagc_layers(text)) == (text in chosen)


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_flags_exist(name: str) -> None:
    """Under the name that Megatron gives them: another one would refuse nothing."""
    with pytest.raises(CompressionConfigError, match=f"--{name.replace('_', '-')} "):
        _check(ON, **{name: 2})


def test_nothing_to_do_is_said() -> None:
    """One data-parallel rank has nothing to send."""
    assert "no effect" in idle_reason(DataParallelCompression(**ON), 1)
    assert idle_reason(DataParallelCompression(**ON), 2) is None


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([0, 0, 0, 0], (1, 4)),
        ([0, 0, 1, 1], (2, 2)),
        ([0, 1, 2], (3, 1)),
        ([5, 5, 5, 7, 7, 7], (2, 3)),
        ([0, 0, 1], None),
        ([0, 1, 1], None),
        ([0, 0, 1, 1, 0, 0], None),
        ([3], (1, 1)),
    ],
)
def test_nodes_of_a_group(nodes: list[int], shape: tuple[int, int] | None) -> None:
    """Equal nodes, one behind the other; anything else has no two hops."""
    assert group_by_node(nodes) == shape


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ([2, 2, 2, 2], [0, 0, 2, 2]),
        ([4, 4, 4, 4, 2, 2], [0, 0, 0, 0, 4, 4]),
        ([3, 3, 3, 2, 2, 2, 2], [0, 0, 0, 3, 3, 5, 5]),
        ([4, 4], [0, 0]),  # fewer than there might be
        ([4, 2, 4, 2, 4, 4], None),  # nodes take ranks in turn
        ([2, 2, 0, 0], None),
        ([0], None),
    ],
)
def test_nodes_by_the_size_that_each_rank_knows(sizes: list[int], nodes: list[int] | None) -> None:
    assert nodes_by_size(sizes) == nodes


@pytest.mark.parametrize(
    ("sizes", "hosts", "nodes"),
    [
        ([2, 2, 2, 2], "aabb", [0, 0, 2, 2]),
        ([2, 2, 2, 2], "aaaa", [0, 0, 2, 2]),  # containers of one name; nodes emulated on one host
        ([2, 2, 2, 2], "abab", [0, 1, 0, 1]),  # ranks that go round the hosts
        ([0, 0, 0, 0], "aabb", [0, 0, 2, 2]),
    ],
)
def test_nodes_by_what_ranks_say_and_the_names_of_their_hosts(sizes, hosts, nodes) -> None:
    assert nodes_by_views(sizes, list(hosts)) == nodes


@pytest.mark.parametrize(
    ("nodes", "local", "given", "pieces"),
    [(2, 2, 0, 8), (1, 4, 0, 1), (4, 1, 0, 1), (1, 4, 3, 3), (2, 2, 2, 2)],
)
def test_pieces_of_a_bucket(nodes: int, local: int, given: int, pieces: int) -> None:
    """Several by default where one exchange can run behind another."""
    topology = SimpleNamespace(
        nodes=nodes, local=local, world_size=nodes * local, two_hops=nodes > 1 and local > 1
    )
    numel = 4 * 24 * 4096
    bucket = SimpleNamespace(topology=topology, numel=numel, sharded=False, gradients=torch.empty(numel))
    settings = {**ON, "quantized_gradients": True, "gradient_alltoall_pipeline": given}
    factory, _ = data_parallel_codecs(DataParallelCompression(**settings))
    assert len(factory(bucket).pieces) == pieces
