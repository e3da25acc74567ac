"""Several codecs behind one flag."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields

from megatron.compression.config import RECOMMENDED, PipelineParallelCompression, TensorParallelCompression
from megatron.compression.config_errors import check_chosen
from megatron.compression.pipeline_parallel.config import RECOMMENDED_FORWARD, RECOMMENDED_PIPELINE

COMPRESSION_3D = {"tp_compression": "taco", "dp_compression": "sdp4bit", "pp_compression": "tah-quant"}
"""``--compression-3d``: the set-up of the TACO paper (arXiv 2604.24088), each codec as in its own paper."""

_AUTO = (
    (TensorParallelCompression, "tp_compression", "taco", RECOMMENDED),
    (PipelineParallelCompression, "pp_compression", RECOMMENDED_FORWARD, RECOMMENDED_PIPELINE),
)
"""Dataclass, codec flag, the codec that ``auto`` takes, and its settings."""

HELP_3D = (
    "Compress all three dimensions as the TACO paper does: --tp-compression taco, --dp-compression sdp4bit, "
    "--pp-compression tah-quant. A dimension's own flag beside it wins (none leaves the dimension "
    "uncompressed); flags of single settings still count."
)

HELP_VALIDATION = (
    "Evaluation (validation and test) sends activations uncompressed, between tensor-parallel ranks and from "
    "stage to stage: its loss is that of the weights alone. Training is unaffected."
)


def tell_none_from_absent(parser: ArgumentParser) -> None:
    """Leave None what the command line does not name and a preset may decide: dimensions' codecs, and what
    ``auto`` chooses. ``name_codecs`` fills it in."""
    names = [name for *_, recommended in _AUTO for name in recommended]
    parser.set_defaults(**dict.fromkeys([*COMPRESSION_3D, *names]))


def name_codecs(args: Namespace) -> None:
    """Give each dimension that the command line does not name its codec, of ``--compression-3d`` or none, and
    each setting that it does not name the one of ``auto`` or the default.

    Raises:
        CompressionConfigError: a setting that contradicts ``auto``, though it be the default.
    """
    for name, codec in COMPRESSION_3D.items():
        if getattr(args, name) is None:
            setattr(args, name, codec if args.compression_3d else "none")
    for config_class, codec_of, codec, recommended in _AUTO:
        auto = getattr(args, codec_of) == "auto"
        for field in fields(config_class):
            if field.name not in recommended:
                continue
            value = getattr(args, field.name)
            if value is None:
                setattr(args, field.name, recommended[field.name] if auto else field.default)
            elif auto:
                flag = f"--{codec_of.replace('_', '-')}"
                check_chosen(field.name, value, recommended, flag, codec)
