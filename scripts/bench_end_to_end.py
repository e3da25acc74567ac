"""Iteration time of a model with and without compression, by link, on one host: any shape, any layout.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json
    python scripts/bench_end_to_end.py --shape qwen2.5-7b --tensor-parallel 2 --sequence-parallel
    python scripts/bench_end_to_end.py --shape 1.3b --tensor-parallel 2 --pipeline-parallel 2 \\
        --data-parallel 2 --codecs none "none --compression taco-paper" "none --compression auto" none
    python scripts/bench_end_to_end.py --shape 6.7b --tensor-parallel 2 --ablations taco
    python scripts/bench_end_to_end.py --shape qwen3-30b-a3b --expert-parallel 2 --communicators 2
    python scripts/bench_end_to_end.py --shape 1.3b --data-parallel 4 --micro-batches 1 --regimes ethernet \\
        --codecs none "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1" tagc
    python scripts/bench_end_to_end.py --shape thin --pipeline-parallel 4
    python scripts/bench_end_to_end.py --codecs none int6 "int6 --tp-compression-layers 2-5" --regimes pcie
    python scripts/bench_end_to_end.py --tensor-parallel 2 --regimes pcie --codecs none int6 \\
        "none --tp-compression-overlap halves" "int6 --tp-compression-overlap halves"

A codec of --codecs is that of the first of these with more than one rank: expert, tensor, pipeline, data;
flags behind it name the others' ("taco --dp-compression sdp4bit"). Shapes are whole models, but for 1.75b (8
layers of 4096), qwen3-30b-a3b (4 of 48) and thin (one layer of 2048 a stage, so that point-to-point traffic
weighs as it does between nodes); --num-layers behind the script's own options makes one fit.
--micro-batches is gradient accumulation. Under data parallelism both of Megatron's overlaps are on
(--no-overlap: off, as in SDP4Bit's scripts) and gradients travel in bf16 (--fp32-gradients: Megatron's
default).
MEGATRON_COMPRESSION_NODE_SIZE=n behind a setting counts n ranks of this host as a node: one is what ethernet
stands for.

A CAAT-Net ("none --caat-net-sync-fraction 0.5") is another model: compare times, not losses.
"""

import argparse
import sys
from argparse import Namespace
from pathlib import Path

import _bench
from _launch import SETTINGS_HELP

from megatron.compression.huggingface.models import MODELS, as_arguments, megatron_flags

SHAPE = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16"
_GPT = "--num-layers {} --hidden-size {} --num-attention-heads {} --vocab-size 50257 --bf16"
_QWEN = megatron_flags(MODELS["2.5-7b"])
del _QWEN["--padded-vocab-size"]  # Megatron's own padding: --vocab-size behind the options counts
EXPERTS = """--num-layers 4 --hidden-size 2048 --num-attention-heads 32 --group-query-attention
    --num-query-groups 4 --kv-channels 128 --qk-layernorm --ffn-hidden-size 6144 --vocab-size 32000
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --bf16"""
"""Four of 48 layers; the vocabulary is smaller too, since its product is not what is compared."""
SHAPES = {
    "350m": _GPT.format(24, 1024, 16) + " --micro-batch-size 8",
    "1.3b": _GPT.format(24, 2048, 16),
    "1.75b": SHAPE,
    "2.7b": _GPT.format(32, 2560, 32),
    "6.7b": _GPT.format(32, 4096, 32),
    "13b": _GPT.format(40, 5120, 40),
    "qwen2.5-7b": " ".join(map(str, as_arguments(_QWEN))) + " --seq-length 512 --micro-batch-size 8 --bf16",
    "qwen3-30b-a3b": EXPERTS,
    "thin": "--num-layers {stages} --hidden-size 2048 --num-attention-heads 16 --vocab-size 8191"
    " --untie-embeddings-and-output-weights --bf16",
}
"""Sequences of 2048 in micro-batches of 4 unless a shape says otherwise."""
LAYOUT = ("tensor", "pipeline", "data")
CODECS = {
    "tensor": ["none", "taco", "int8", "int6", "none"],
    "expert": ["none", "int8", "int6", "none"],
    "pipeline": ["none", "pipeline-6bit", "tah-quant", "int8", "none"],
    "data": ["none", "sdp4bit", "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1"],
}
ABLATIONS = (
    "none",
    "{}",
    "{} --compression-min-mb 8",  # Megatron's users' default; all else compresses every message
    "{} --compression-transport collective",  # NCCL between the codec's kernels: not fused, other links too
    "{} --tp-compression-overlap halves",  # behind the other half
    "none --tp-compression-overlap halves",
    "{} --no-gradient-accumulation-fusion",  # weight gradients, behind which exchanges run, take longer
    "none --no-gradient-accumulation-fusion",
    "none",
)


def flags_of(options: Namespace) -> list:
    """What every run is started with: the model, and how it is spread.

    Raises:
        ValueError: a layout that the shape does not have.
    """
    if (options.shape == "qwen3-30b-a3b") != bool(options.expert_parallel):
        raise ValueError(
            f"--shape {options.shape}: --expert-parallel goes with qwen3-30b-a3b, and only there"
        )
    shape = SHAPES[options.shape].format(stages=options.pipeline_parallel).split()
    flags = [*_bench.MODEL.split(), *(word for word in shape if not (options.fp32 and word == "--bf16"))]
    if options.expert_parallel:
        flags += ["--expert-model-parallel-size", options.expert_parallel]
        return [*flags, "--global-batch-size", 16, "--grad-reduce-in-bf16"]
    tensor, pipeline, data = (getattr(options, f"{name}_parallel") for name in LAYOUT)
    given = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    given.add_argument("--micro-batch-size", type=int)
    micro = given.parse_known_args([*map(str, flags), *options.extra])[0].micro_batch_size
    flags += ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
    flags += ["--global-batch-size", micro * data * (options.micro_batches or 4 * pipeline)]
    flags += ["--sequence-parallel"] if options.sequence_parallel else []
    if data > 1:
        flags += ["--use-distributed-optimizer"]
        flags += [] if options.no_overlap else ["--overlap-grad-reduce", "--overlap-param-gather"]
        flags += [] if options.fp32_gradients else ["--grad-reduce-in-bf16"]
    return flags


def parse(words: list[str] | None = None) -> tuple[Namespace, list, tuple[str, ...]]:
    """The command line: options with the rest in ``extra``, a run's flags, the ledger's classes to show."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{_bench.__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--codecs", nargs="+", help=f"settings, in turn: {SETTINGS_HELP}")
    add("--regimes", nargs="+", choices=_bench.REGIMES, default=list(_bench.REGIMES))
    add("--communicators", type=int, default=1, help="over which each message travels, compressed or not")
    add("--iterations", type=int, default=13, help=f"of a block; the first {_bench.WARM_UP} are not timed")
    add("--json", type=Path, help="write the rows here")
    add("--shape", choices=SHAPES, help="default: 1.75b, with --expert-parallel qwen3-30b-a3b")
    add("--tensor-parallel", dest="ranks", type=int)
    add("--pipeline-parallel", type=int, default=1)
    add("--data-parallel", type=int, default=1)
    add("--expert-parallel", type=int, default=0, help="ranks between which experts are spread")
    add("--sequence-parallel", action="store_true")
    add("--micro-batches", type=int, default=0, help="of an iteration and rank (default: 4 a stage)")
    add("--no-overlap", action="store_true", help="data parallelism without Megatron's overlaps")
    add("--fp32", action="store_true", help="an fp32 model: messages twice as large")
    add("--fp32-gradients", action="store_true", help="Megatron's default under data parallelism")
    add("--ablations", metavar="CODEC", help="instead of --codecs: this one with a part changed each")
    options, options.extra = parser.parse_known_args(words)
    options.shape = options.shape or ("qwen3-30b-a3b" if options.expert_parallel else "1.75b")
    alone = options.pipeline_parallel * options.data_parallel == 1
    options.tensor_parallel = options.ranks or (4 if alone and not options.expert_parallel else 1)
    sizes = {name: getattr(options, f"{name}_parallel") for name in LAYOUT}
    if options.expert_parallel:
        if max(sizes.values()) > 1:
            parser.error("--expert-parallel: experts are measured alone; drop the other --...-parallel")
        names = ("sequence_parallel", "micro_batches", "no_overlap", "fp32_gradients")
        if given := [name for name in names if getattr(options, name)]:
            flag = given[0].replace("_", "-")
            parser.error(f"--{flag} has no effect with --expert-parallel; leave it out")
        sizes = {"expert": options.expert_parallel}
    spread = [name for name, size in sizes.items() if size > 1] or ["tensor"]
    options.dimension, options.ranks = spread[0], 1
    for size in sizes.values():
        options.ranks *= size
    if spread == ["pipeline"] and options.communicators > 1:
        parser.error("--communicators: point-to-point messages have one; leave it out")
    if options.ablations:
        if spread[0] != "tensor":
            parser.error("--ablations: they are of tensor parallelism; give --tensor-parallel 2 or more")
        options.codecs = [text.format(options.ablations) for text in ABLATIONS]
    options.codecs = options.codecs or CODECS[spread[0]]
    names = {"tensor": "tp", "pipeline": "pp", "expert": "ep"}
    traffic = [f"{names[one]}.{way}" for one in spread if one != "data" for way in ("forward", "backward")]
    traffic += ["dp.gradient", "dp.weight"] if "data" in spread else []
    try:
        return options, flags_of(options), tuple(traffic)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    if _bench.is_worker():
        _bench.worker()
    else:
        _bench.run(*parse(sys.argv[1:]))
