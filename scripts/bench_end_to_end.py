"""Iteration time of a GPT of 1.75 B parameters under compressed tensor parallelism, by link, on one host.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json
    python scripts/bench_end_to_end.py --codecs none int6 "int6 --tp-compression-chunks 2" --regimes pcie
    python scripts/bench_end_to_end.py --codecs none taco int6 --regimes ethernet --communicators 2

A CAAT-Net (--caat-net-sync-fraction 0.5 behind the script's own options) is another model: compare its
iterations in time with those of a run without, not in loss.
"""

import _bench

SHAPE = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000
    --global-batch-size 16 --bf16"""


def main() -> None:
    """Run all regimes and print a table."""
    codecs = ["none", "taco", "int8", "int6", "none"]
    parser = _bench.make_parser(__doc__, "tensor", codecs, iterations=13)
    parser.add_argument("--sequence-parallel", action="store_true")
    options, options.extra = parser.parse_known_args()
    flags = [*_bench.MODEL.split(), *SHAPE.split(), "--tensor-model-parallel-size", options.ranks]
    flags += ["--sequence-parallel"] if options.sequence_parallel else []
    _bench.run(options, flags, ("tp.forward", "tp.backward"))


if __name__ == "__main__":
    _bench.worker() if _bench.is_worker() else main()
