"""Iteration time of a GPT of 1.75 B parameters under compressed tensor parallelism, by link, on one host.

With --expert-parallel it is a mixture of experts instead: layers of Qwen3-30B-A3B's shape, whose tokens are
compressed on their way to experts and back.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json
    python scripts/bench_end_to_end.py --expert-parallel 2 --communicators 2 --json experts.json
    python scripts/bench_end_to_end.py --expert-parallel 2 --transformer-impl transformer_engine \\
        --moe-grouped-gemm --moe-permute-fusion
    python scripts/bench_end_to_end.py --codecs none int6 "int6 --tp-compression-chunks 2" --regimes pcie
    python scripts/bench_end_to_end.py --codecs none taco int6 --regimes ethernet --communicators 2

A CAAT-Net (--caat-net-sync-fraction 0.5 behind the script's own options) is another model: compare its
iterations in time with those of a run without, not in loss.
"""

import _bench

SHAPE = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000
    --global-batch-size 16 --bf16"""
EXPERTS = """--num-layers 4 --hidden-size 2048 --num-attention-heads 32 --group-query-attention
    --num-query-groups 4 --kv-channels 128 --qk-layernorm --ffn-hidden-size 6144 --vocab-size 32000
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --global-batch-size 16 --grad-reduce-in-bf16 --bf16"""
"""Four of 48 layers; the vocabulary is smaller too, since its product is not what is compared."""


def main() -> None:
    """Run all regimes and print a table."""
    codecs = ["none", "taco", "int8", "int6", "none"]
    parser = _bench.make_parser(__doc__, "tensor", codecs, iterations=13)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--expert-parallel", type=int, help="ranks between which experts are spread")
    options, options.extra = parser.parse_known_args()
    if options.expert_parallel:
        options.dimension, options.ranks = "expert", options.expert_parallel
        options.codecs = ["none", "int8", "int6", "none"] if options.codecs == codecs else options.codecs
        flags = [*_bench.MODEL.split(), *EXPERTS.split(), "--expert-model-parallel-size", options.ranks]
        _bench.run(options, flags, ("ep.forward", "ep.backward"))
        return
    flags = [*_bench.MODEL.split(), *SHAPE.split(), "--tensor-model-parallel-size", options.ranks]
    flags += ["--sequence-parallel"] if options.sequence_parallel else []
    _bench.run(options, flags, ("tp.forward", "tp.backward"))


if __name__ == "__main__":
    _bench.worker() if _bench.is_worker() else main()
