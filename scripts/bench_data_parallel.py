"""Iteration time of a GPT of 1.3 B parameters under compressed data parallelism, by link, on one host.

    python scripts/bench_data_parallel.py --data-parallel 4 --json data_parallel.json
    python scripts/bench_data_parallel.py --regimes ethernet --communicators 2 \\
        --codecs none "sdp4bit --dp-compression-node-size 1" "tagc --dp-error-feedback fp32"

Every setting is a run of its own, with the distributed optimizer and both overlap flags.
--dp-compression-node-size n counts n ranks of this host as a node: one is what the ethernet regime stands
for. Gradients are reduced in bf16; --fp32-gradients measures Megatron's default instead.
"""

import _bench

SHAPE = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 32000 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"""


def main() -> None:
    """Run all regimes and print a table."""
    codecs = ["none", "sdp4bit", "sdp4bit --dp-compression-node-size 1"]
    parser = _bench.make_parser(__doc__, "data", codecs, iterations=11)
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation, of 4 samples")
    parser.add_argument("--fp32-gradients", action="store_true", help="Megatron's default")
    options, options.extra = parser.parse_known_args()
    batch = 4 * options.ranks * options.micro_batches
    flags = [*_bench.MODEL.split(), *SHAPE.split(), "--global-batch-size", batch]
    flags += [] if options.fp32_gradients else ["--grad-reduce-in-bf16"]
    _bench.run(options, flags, ("dp.gradient", "dp.weight"))


if __name__ == "__main__":
    _bench.worker() if _bench.is_worker() else main()
