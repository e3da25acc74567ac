"""Several codecs behind one flag."""

from argparse import Namespace

COMPRESSION_3D = {"tp_compression": "taco", "dp_compression": "sdp4bit", "pp_compression": "tah-quant"}
"""``--compression-3d``: the set-up of the TACO paper (arXiv 2604.24088), each codec as in its own paper."""

HELP_3D = (
    "Compress all three dimensions as the TACO paper does: --tp-compression taco, --dp-compression sdp4bit, "
    "--pp-compression tah-quant. A dimension's own flag beside it wins; flags of single settings still count."
)


def expand_3d(args: Namespace) -> None:
    """Set what ``--compression-3d`` stands for where the dimension has no codec of its own yet."""
    for name, codec in COMPRESSION_3D.items():
        if getattr(args, name) == "none":
            setattr(args, name, codec)
