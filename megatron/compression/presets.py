"""Several codecs behind one flag."""

from argparse import ArgumentParser, Namespace

COMPRESSION_3D = {"tp_compression": "taco", "dp_compression": "sdp4bit", "pp_compression": "tah-quant"}
"""``--compression-3d``: the set-up of the TACO paper (arXiv 2604.24088), each codec as in its own paper."""

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
    """Leave a dimension's codec None where the command line does not name it; ``name_codecs`` fills it in."""
    parser.set_defaults(**dict.fromkeys(COMPRESSION_3D))


def name_codecs(args: Namespace) -> None:
    """Give each dimension that the command line does not name its codec: of ``--compression-3d``, or none."""
    for name, codec in COMPRESSION_3D.items():
        if getattr(args, name) is None:
            setattr(args, name, codec if args.compression_3d else "none")
