"""Validation loss on real text with compressed data parallelism: the same tokens, weights and order.

    python scripts/data_parallel_convergence.py                  # 4 GPUs, or 2 CPU ranks at tiny size
    python scripts/data_parallel_convergence.py --settings "fp32 gradients" sdp4bit --seeds 1 2

The text is the Python sources of this installation, as in demo.py. Every setting trains the same model from
the same seed with the distributed optimizer; the table shows the validation losses at the end against
uncompressed fp32 gradients, and the bits that a gradient and a weight cost on the wire. Ranks are split into
two nodes (--dp-intra-node-size), so that gradients take both hops. "plain 4 bits" is the control: gradients
without the Hadamard transform and in 4 bits in both hops, weights quantised themselves instead of their
differences.
"""

import argparse
import json
import statistics
from pathlib import Path

import demo

SDP4BIT = "--dp-compression sdp4bit"
TAGC = "--dp-compression tagc"
SETTINGS = {
    "fp32 gradients": "",
    "bf16 gradients": "--grad-reduce-in-bf16",
    "sdp4bit": SDP4BIT,
    "sdp4bit, bf16 gradients": f"{SDP4BIT} --grad-reduce-in-bf16",
    "sdp4bit, one hop int8": f"{SDP4BIT} --dp-intra-node-size {{ranks}}",
    "sdp4bit, one hop int4": f"{SDP4BIT} --dp-intra-node-size 1",
    "sdp4bit, int8 feedback": f"{SDP4BIT} --dp-error-feedback int8",
    "sdp4bit, fp32 feedback": f"{SDP4BIT} --dp-error-feedback fp32",
    "tagc": f"{TAGC}",
    "tagc, all matrices": f"{TAGC} --tagc-layers all",
    "tagc, 80 % of the sum": f"{TAGC} --tagc-sketch-ratio 3.85",
    "tagc, packed": f"{TAGC} --tagc-wire packed",
    "tagc, packed, all matrices": f"{TAGC} --tagc-wire packed --tagc-layers all",
    "tagc, packed, 60 %, 8 bits": f"{TAGC} --tagc-wire packed --tagc-sparsity 0.6 --tagc-bits 8",
    "tagc, packed, 95 %": f"{TAGC} --tagc-wire packed --tagc-sparsity 0.95",
    "no hadamard": f"{SDP4BIT} --no-hadamard-transform",
    "gradients plain 4 bits": f"{SDP4BIT} --quantized-gradients --no-hadamard-transform "
    "--gradient-quantization-bits-intra 4",
    "weights plain 4 bits": f"{SDP4BIT} --quantized-weights --no-weight-difference",
    "plain 4 bits": f"{SDP4BIT} --no-hadamard-transform --gradient-quantization-bits-intra 4 "
    "--no-weight-difference",
}
MODELS = {
    "tiny": """--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128
        --max-position-embeddings 128 --micro-batch-size 8 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4""",
    "small": """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512
        --max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 64 --lr 1e-3 --min-lr 1e-4""",
}
TRAINING = """--attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --no-create-attention-mask-in-dataloader
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"""


def flags_of(setting: str, ranks: int, seed: int) -> str:
    """The setting's flags; two nodes where it compresses and names no other."""
    flags = SETTINGS[setting].format(ranks=ranks)
    if "--dp-compression" in flags and "--dp-intra-node-size" not in flags:
        flags += f" --dp-intra-node-size {max(1, ranks // 2)}"
    return f"{flags} --seed {seed}"


def main() -> None:
    """Train every setting and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=demo.ROOT / "runs" / "data_parallel")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=["fp32 gradients", "bf16 gradients", "sdp4bit", "plain 4 bits"],
    )
    parser.add_argument("--model", choices=MODELS, help="default: small on GPUs, tiny on CPUs")
    parser.add_argument("--data-parallel", type=int, help="ranks (default: 4 on GPUs, 2 on CPUs)")
    parser.add_argument("--iterations", type=int, help="default: 400 on GPUs, 60 on CPUs")
    parser.add_argument("--corpus-mb", type=int, help="megabytes of text (default: 24 on GPUs, 8 on CPUs)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options, extra = parser.parse_known_args()
    gpus = demo.gpu_count()
    ranks = options.data_parallel or (4 if gpus >= 4 else 2)
    on_gpus = gpus >= ranks
    options.iterations = options.iterations or (400 if on_gpus else 60)
    options.output = options.output.resolve()
    demo.CORPUS_MB = options.corpus_mb or (24 if on_gpus else 8)
    data = demo.prepare_data(options.output / "data")
    demo.GPT_MODEL_ARGS = MODELS[options.model or ("small" if on_gpus else "tiny")]
    demo.TRAINING_ARGS = TRAINING
    losses: dict[str, list[float]] = {}
    reports = {}
    for seed in options.seeds:
        for setting in options.settings:
            name = f"{setting.replace(' ', '-').replace(',', '')}-{seed}"
            flags = " ".join([flags_of(setting, ranks, seed), *extra])
            summary = demo.train(name, flags, data, ranks, gpus, options, tensor_parallel=1)
            losses.setdefault(setting, []).append(summary["validation_loss"])
            reports[setting] = summary
    table = rows(losses, reports)
    (options.output / "summary.json").write_text(
        json.dumps({"ranks": ranks, "iterations": options.iterations, "rows": table}, indent=1) + "\n"
    )
    print(f"\n{'setting':26} {'validation loss':>16} {'against fp32':>13} {'MB gradients':>13}", end="")
    print(f" {'between nodes':>14} {'MB weights':>11}")
    for row in table:
        change = "" if row["difference"] is None else f"{row['difference']:+.2%}"
        crossed = "" if row["between_nodes_megabytes"] is None else f"{row['between_nodes_megabytes']:.3f}"
        print(
            f"{row['setting']:26} {row['validation_loss']:16.4f} {change:>13} "
            f"{row['gradient_megabytes']:13.3f} {crossed:>14} {row['weight_megabytes']:11.3f}"
        )
    print(f"{options.output / 'summary.json'}")


def rows(losses: dict[str, list[float]], reports: dict[str, dict]) -> list[dict]:
    """One row a setting: means over seeds; differences are of pairs of one seed."""
    table = []
    for setting, values in losses.items():
        base = losses.get("fp32 gradients")
        pairs = [value / other - 1 for value, other in zip(values, base, strict=True)] if base else None
        report = reports[setting]
        sent = {channel: pair["sent"] / 1e6 for channel, pair in report["bytes_per_iteration"].items()}
        crossed = report["bytes_between_nodes"].get("dp.gradient")
        table.append(
            {
                "setting": setting,
                "validation_loss": statistics.mean(values),
                "validation_losses": values,
                "difference": statistics.mean(pairs) if pairs else None,
                "gradient_megabytes": sent["dp.gradient"],
                "between_nodes_megabytes": crossed["sent"] / 1e6 if crossed else None,
                "weight_megabytes": sent["dp.weight"],
            }
        )
    return table


if __name__ == "__main__":
    main()
