"""The command line: our flags beside Megatron's, and what they say as one config."""

import argparse
from argparse import ArgumentParser, Namespace

from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig

COMPRESSION_3D = {"tp": "taco", "dp": "sdp4bit", "pp": "tah-quant"}
"""``--compression-3d``: the set-up of the TACO paper (arXiv 2604.24088), each codec as in its own paper."""


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser."""
    names = ", ".join(CODECS.names())
    spec = f"CODEC[:SETTING=VALUE,...], one of {names}; none = uncompressed"
    group = parser.add_argument_group("compression", "Codecs and their settings: docs/choosing.md.")
    add = group.add_argument
    add(
        "--taco",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="Compress tensor-parallel traffic with TACO at the paper's settings: the same as "
        "--tp-compression taco[:SETTINGS], SETTINGS such as format=fp8-e5m2,group=256.",
    )
    add(
        "--tp-compression",
        metavar="SPEC",
        help=f"Tensor-parallel activations and gradients: {spec}; auto = the recommended codec.",
    )
    add("--tp-backward-compression", metavar="SPEC", help="Another codec for tensor-parallel gradients.")
    add(
        "--tp-compression-min-mb",
        type=float,
        default=TensorParallelConfig.min_mb,
        help="Tensors of fewer MiB (uncompressed) go uncompressed: compression would cost more time than it "
        "saves.",
    )
    add(
        "--tp-compression-layers",
        default=TensorParallelConfig.layers,
        help="Layers that compress, counted from 0, such as 2-29,output; embedding and output name those "
        "outside the transformer.",
    )
    add(
        "--tp-compression-chunks",
        type=int,
        default=TensorParallelConfig.chunks,
        help="Pieces of the sequence whose exchange runs behind the next piece's GEMM; 2 pays over PCIe.",
    )
    add(
        "--pp-compression",
        metavar="SPEC",
        help=f"What pipeline stages send each other: {spec}; auto = the recommended codecs.",
    )
    add(
        "--pp-backward-compression",
        metavar="SPEC",
        help="Another codec for the gradients that go back; by default what the forward's codec names.",
    )
    add(
        "--dp-compression",
        metavar="SPEC",
        help="Data-parallel gradients: a codec as above, or one of "
        f"{', '.join(GRADIENT_COMPRESSORS.names())}; sdp4bit alone compresses the distributed optimizer's "
        "weights as well.",
    )
    add("--dp-weight-compression", metavar="SPEC", help="Changes of the distributed optimizer's weights.")
    add(
        "--dp-error-feedback",
        default=None,
        metavar="{none,fp32,int8}[:average=A]",
        help="Remember what the compression of a gradient lost and add it to the next one, in fp32 or int8; "
        "average = the newest error's weight in a moving average (LoCo).",
    )
    add(
        "--dp-compression-node-size",
        type=int,
        help="Data-parallel ranks that count as one node; by default the real topology.",
    )
    add(
        "--caat-net-sync-fraction",
        type=float,
        default=CaatNetConfig.sync_fraction,
        help="Part of the channels of each row-parallel output that ranks sum (CAAT-Net); below 1 it is "
        "another model. 0.5 is the paper's.",
    )
    add(
        "--compression-3d",
        action="store_true",
        help="Compress three dimensions as the TACO paper does: --tp-compression taco, --dp-compression "
        "sdp4bit, --pp-compression tah-quant. A dimension's own flag beside it wins.",
    )
    add("--compression-start-iteration", type=int, help="Iterations that run uncompressed first.")
    add(
        "--compression-transport",
        default="auto",
        choices=["auto", "collective", "symmetric"],
        help="How tensor-parallel payloads travel: torch.distributed, or one fused kernel over the memory of "
        "the ranks' GPUs; auto takes the latter on one host with peer access.",
    )
    add(
        "--compression-communicators",
        type=int,
        default=0,
        help="Communicators that share each payload over torch.distributed; 0 takes 2 on TCP links, else 1.",
    )
    add(
        "--compression-error-bound",
        type=float,
        help="A tensor-parallel layer whose relative error passes this goes uncompressed from then on; "
        "the log says so.",
    )
    add(
        "--validate-uncompressed",
        action="store_true",
        help="Evaluation sends activations uncompressed: its loss is that of the weights alone.",
    )
    add("--compression-report", metavar="DIR", help="Write report.json, report.md and plots.")
    add("--compression-report-baseline", metavar="DIR", help="Another run's report, to compare with.")
    _escape_broken_help(parser)
    return parser


def resolve(args: Namespace) -> CompressionConfig:
    """What the parsed flags say. Pure: nothing is written into ``args``.

    Args:
        args: the namespace of ``parse_and_validate_args``.

    Raises:
        CompressionConfigError: a setting that is impossible, alone or together with Megatron's flags.
    """
    tp, dp, pp = (
        COMPRESSION_3D[name] if given is None and args.compression_3d else given or "none"
        for name, given in (
            ("tp", _tensor_parallel_spec(args)),
            ("dp", args.dp_compression),
            ("pp", args.pp_compression),
        )
    )
    config = CompressionConfig(
        tensor_parallel=TensorParallelConfig(
            compression=tp,
            backward=args.tp_backward_compression,
            min_mb=args.tp_compression_min_mb,
            layers=args.tp_compression_layers,
            chunks=args.tp_compression_chunks,
        ),
        pipeline_parallel=PipelineParallelConfig(compression=pp, backward=args.pp_backward_compression),
        data_parallel=DataParallelConfig(
            compression=dp,
            weights=args.dp_weight_compression,
            error_feedback=args.dp_error_feedback,
            node_size=args.dp_compression_node_size,
        ).resolved(args),
        caat_net=CaatNetConfig(sync_fraction=args.caat_net_sync_fraction),
        start_iteration=args.compression_start_iteration,
        transport=args.compression_transport,
        communicators=args.compression_communicators,
        error_bound=args.compression_error_bound,
        validate_uncompressed=args.validate_uncompressed,
        report=args.compression_report,
        report_baseline=args.compression_report_baseline,
    )
    config.check(args)
    return config


def train_iterations(args: Namespace) -> int | None:
    """How long the run is; None where Megatron's flags leave it open."""
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    growing = getattr(args, "step_batch_size_schedule", None)  # global_batch_size is another one then
    if iterations or not samples or not args.global_batch_size or growing:
        return iterations
    return samples // args.global_batch_size


def _tensor_parallel_spec(args: Namespace) -> str | None:
    if args.taco is None:
        return args.tp_compression
    if args.tp_compression not in (None, "taco"):
        raise CompressionConfigError(
            f"--taco is --tp-compression taco, not {args.tp_compression}; drop one of the two"
        )
    return f"taco:{args.taco}" if args.taco else "taco"


def _escape_broken_help(parser: ArgumentParser) -> None:
    """Let ``--help`` work: megatron-core has a help text with a bare percent sign, which argparse formats."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
