"""Validation loss on real text with compressed pipeline stages: the same tokens, weights and order.

    python scripts/pipeline_convergence.py                       # 4 GPUs, or 2 CPU ranks at tiny size
    python scripts/pipeline_convergence.py --settings none tah-quant --seeds 1 2

The text is the Python sources of this installation, as in demo.py. Every setting trains the same model from
the same seed; the table shows the validation losses at the end, against the uncompressed run of that seed.
"no transform" is TAH-Quant without pivot swap and Hadamard transform.
"""

import argparse
import json
import statistics
from pathlib import Path

import demo

SETTINGS = {
    "none": "",
    "tah-quant": "--pp-compression tah-quant",
    "no transform": "--pp-compression tah-quant --tah-transform none",
    "tile": "--pp-compression tah-quant --tah-allocation tile",
    "8 bits": "--pp-compression int8",
    "forward only": "--pp-compression tah-quant --pp-backward-compression none",
    "warm-up": "--pp-compression tah-quant --tah-start-iteration 50",
}
MODELS = {
    "tiny": """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
        --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4""",
    "small": """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512
        --max-position-embeddings 512 --micro-batch-size 8 --global-batch-size 64 --lr 1e-3 --min-lr 1e-4""",
}
TRAINING = """--attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --no-create-attention-mask-in-dataloader"""


def main() -> None:
    """Train every setting and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=demo.ROOT / "runs" / "pipeline")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=["none", "tah-quant", "no transform"]
    )
    parser.add_argument("--model", choices=MODELS, help="default: small on GPUs, tiny on CPUs")
    parser.add_argument("--pipeline-parallel", type=int, help="stages (default: 4 on GPUs, 2 on CPUs)")
    parser.add_argument("--iterations", type=int, help="default: 400 on GPUs, 60 on CPUs")
    parser.add_argument("--corpus-mb", type=int, help="megabytes of text (default: 24 on GPUs, 8 on CPUs)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options, extra = parser.parse_known_args()
    gpus = demo.gpu_count()
    ranks = options.pipeline_parallel or (4 if gpus >= 4 else 2)
    on_gpus = gpus >= ranks
    options.iterations = options.iterations or (400 if on_gpus else 60)
    model = MODELS[options.model or ("small" if on_gpus else "tiny")]
    options.output = options.output.resolve()
    demo.CORPUS_MB = options.corpus_mb or (24 if on_gpus else 8)
    data = demo.prepare_data(options.output / "data")
    demo.GPT_MODEL_ARGS, demo.TRAINING_ARGS = model, TRAINING
    losses: dict[str, list[float]] = {}
    reports = {}
    for seed in options.seeds:
        for setting in options.settings:
            name = f"{setting.replace(' ', '-')}-{seed}"
            flags = f"{SETTINGS[setting]} --pipeline-model-parallel-size {ranks} --seed {seed} " + " ".join(
                extra
            )
            summary = demo.train(name, flags, data, ranks, gpus, options, tensor_parallel=1)
            losses.setdefault(setting, []).append(summary["validation_loss"])
            reports[name] = summary
    table = rows(losses, reports, options.seeds)
    (options.output / "summary.json").write_text(
        json.dumps({"rows": table, "runs": reports}, indent=1) + "\n"
    )
    print(f"\n{'setting':14} {'validation loss':>16} {'against none':>13}", end="")
    print(f" {'bits forward':>13} {'bits back':>10}")
    for row in table:
        change = "" if row["difference"] is None else f"{row['difference']:+.2%}"
        print(
            f"{row['setting']:14} {row['validation_loss']:16.4f} {change:>13} {row['forward_bits']:13.3f} "
            f"{row['backward_bits']:10.3f}"
        )
    print(f"{options.output / 'summary.json'}")


def rows(losses: dict[str, list[float]], reports: dict[str, dict], seeds: list[int]) -> list[dict]:
    """One row a setting: means over seeds; differences are of pairs of one seed. Uncompressed is bf16."""
    table = []
    for setting, values in losses.items():
        base = losses.get("none")
        pairs = [value / other - 1 for value, other in zip(values, base, strict=True)] if base else None
        sent = reports[f"{setting.replace(' ', '-')}-{seeds[0]}"]["bytes_per_iteration"]
        bits = {
            channel: 16 * sent[channel]["sent"] / sent[channel]["uncompressed"]
            for channel in ("pp.forward", "pp.backward")
        }
        table.append(
            {
                "setting": setting,
                "validation_loss": statistics.mean(values),
                "difference": statistics.mean(pairs) if pairs else None,
                "forward_bits": bits["pp.forward"],
                "backward_bits": bits["pp.backward"],
                "seeds": seeds,
            }
        )
    return table


if __name__ == "__main__":
    main()
