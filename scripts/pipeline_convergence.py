"""Validation loss on real text with compressed pipeline stages: the same tokens, weights and order.

    python scripts/pipeline_convergence.py                       # 4 GPUs, or 2 CPU ranks at tiny size
    python scripts/pipeline_convergence.py --settings none tah-quant --seeds 1 2 3

The text is the sources of the installed Python packages (on CPUs Python's own, as in demo.py). Every
setting trains the same model from the same seed; the table shows the validation losses at the end,
against the uncompressed run of that seed. "no transform" is TAH-Quant without pivot swap and Hadamard
transform, the control. One more uncompressed run with another seed shows the noise. Flags that are not
the script's own go to Megatron.
"""

import argparse

import _convergence
import demo

BASELINE = "none"
INT4 = "--pp-compression int4 --pp-backward-compression tah-quant"
SIGNED_INT4 = "--pp-compression int4 --pp-normalize standardize --pp-scales signed --pp-group-size 32"
SIGNED_32 = f"{SIGNED_INT4} --pp-backward-compression tah-quant"
SETTINGS = {
    BASELINE: "",
    "tah-quant": "--pp-compression tah-quant",
    "no transform": "--pp-compression tah-quant --tah-transform none",
    "tile": "--pp-compression tah-quant --tah-allocation tile",
    "8 bits": "--pp-compression int8",
    "forward only": "--pp-compression tah-quant --pp-backward-compression none",
    "tah-quant centered": "--pp-compression tah-quant --pp-normalize center",
    "tah-quant standardized": "--pp-compression tah-quant --pp-normalize standardize",
    "int4": INT4,
    "int4 centered": f"{INT4} --pp-normalize center",
    "int4 standardized": f"{INT4} --pp-normalize standardize",
    "int4 standardized, signed": f"{INT4} --pp-normalize standardize --pp-scales signed",
    "int4 standardized, signed, groups of 32": SIGNED_32,
    "int4 standardized, signed, groups of 32, after 80": f"{SIGNED_32} --tah-start-iteration 80",
    "auto": "--pp-compression auto",
    "auto, 5 bits back": f"{SIGNED_INT4} --pp-backward-compression int5",
    "auto, 4 bits back": f"{SIGNED_INT4} --pp-backward-compression int4",
    "int4 standardized dither": f"{INT4} --pp-normalize standardize --pp-rounding dither",
    "int5 standardized": f"{INT4.replace('int4', 'int5')} --pp-normalize standardize",
    "int6 standardized": f"{INT4.replace('int4', 'int6')} --pp-normalize standardize",
    "int4 standardized, int8 back": "--pp-compression int4 --pp-normalize standardize "
    "--pp-backward-compression int8",
    "warm-up": "--pp-compression tah-quant --tah-start-iteration 50",
    "tah-quant standardized, after 80": "--pp-compression tah-quant --pp-normalize standardize "
    "--tah-start-iteration 80",
    "int4 standardized, after 80": f"{INT4} --pp-normalize standardize --tah-start-iteration 80",
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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _convergence.add_arguments(parser, demo.ROOT / "runs" / "pipeline")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=[BASELINE, "tah-quant", "no transform"]
    )
    parser.add_argument("--pipeline-parallel", type=int, help="stages (default: 4 on GPUs, 2 on CPUs)")
    _convergence.add_model_arguments(parser, MODELS)
    options, extra = parser.parse_known_args()
    gpus = demo.gpu_count()
    ranks = options.pipeline_parallel or (4 if gpus >= 4 or options.share_gpus else 2)
    gpus, share = _convergence.share(options, gpus, ranks)
    on_gpus = gpus >= ranks
    data, common = _convergence.prepare(options, extra, MODELS, TRAINING, ranks, on_gpus)

    def train(run: dict) -> dict:
        flags = f"{SETTINGS[run['setting']]} --pipeline-model-parallel-size {ranks} --seed {run['seed']}"
        flags = " ".join([flags, *share, *extra])
        name = f"{run['setting'].replace(',', '').replace(' ', '-')}-{run['seed']}"
        summary = demo.train(name, flags, data, ranks, gpus, options, tensor_parallel=1)
        return {key: summary[key] for key in ("validation_loss", "last_loss", "bytes_per_iteration")}

    runs = _convergence.plan(options.settings, BASELINE, options.seeds, options.noise_seed)
    results = _convergence.train_missing(
        [{**common, "setting": setting, "seed": seed} for setting, seed in runs],
        train,
        options.output,
        options.time_limit,
        jobs=options.jobs,
    )
    rows = [row(result, results) for result in results]
    baseline = {"setting": BASELINE}
    _convergence.conclude(options.output, common, results, baseline, rows, table(rows))


def row(result: dict, results: list[dict]) -> dict:
    """One run: its loss against the uncompressed one of its seed, and the bits that a value (bf16) took."""
    sent = result["bytes_per_iteration"]
    bits = {
        channel: 16 * sent[channel]["sent"] / sent[channel]["uncompressed"]
        for channel in ("pp.forward", "pp.backward")
    }
    return {
        "setting": result["setting"],
        "seed": result["seed"],
        "validation_loss": result["validation_loss"],
        "difference": _convergence.difference(result, results, {"setting": BASELINE}),
        "forward_bits": bits["pp.forward"],
        "backward_bits": bits["pp.backward"],
    }


def table(rows: list[dict]) -> str:
    """Markdown, one row a run."""
    lines = [
        "| setting | seed | validation loss | against none | bits forward | bits back |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| {one['setting']} | {one['seed']} | {one['validation_loss']:.4f} "
            f"| {_convergence.percent(one['difference'])} | {one['forward_bits']:.3f} "
            f"| {one['backward_bits']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
