"""Iteration time of a GPT with compressed pipeline stages, by kind of link, on one host.

    python scripts/bench_pipeline.py --pipeline-parallel 4 --json pipeline.json
    python scripts/bench_pipeline.py --virtual-stages 2          # interleaved, overlapped point-to-point

Stages are thin (one layer of hidden size 2048), so that point-to-point traffic weighs as it does between
nodes; --num-layers and --hidden-size behind the script's own options change the model. A message has one
communicator, compressed or not.
"""

import sys

import _bench

SHAPE = """--hidden-size 2048 --num-attention-heads 16 --vocab-size 8191 --global-batch-size 64
    --untie-embeddings-and-output-weights"""


def main() -> None:
    """Run all regimes and print a table."""
    codecs = ["none", "auto", "tah-quant", "int8", "none"]
    parser = _bench.make_parser(__doc__, "pipeline", codecs, iterations=9)
    parser.add_argument("--virtual-stages", type=int, default=1, help="layers, and stages, of each rank")
    parser.add_argument("--fp32", action="store_true", help="an fp32 model: messages twice as large")
    options, options.extra = parser.parse_known_args()
    if options.communicators > 1:
        sys.exit("error: --communicators: point-to-point messages have one; leave it out")
    flags = [*_bench.MODEL.split(), *SHAPE.split(), "--pipeline-model-parallel-size", options.ranks]
    flags += ["--num-layers", options.ranks * options.virtual_stages, *([] if options.fp32 else ["--bf16"])]
    flags += ["--num-layers-per-virtual-pipeline-stage", 1] if options.virtual_stages > 1 else []
    _bench.run(options, flags, ("pp.forward", "pp.backward"))


if __name__ == "__main__":
    _bench.worker() if _bench.is_worker() else main()
