"""Validation loss on real text with compressed data parallelism: the same tokens, weights and order.

    python scripts/data_parallel_convergence.py                  # 4 GPUs, or 2 CPU ranks at tiny size
    python scripts/data_parallel_convergence.py --settings "fp32 gradients" sdp4bit --seeds 1 2 3

The text is the sources of the installed Python packages (on CPUs Python's own, as in demo.py). Every
setting trains the same model from the same seed on the same tokens with the distributed optimizer; the
table shows the validation losses at the end against uncompressed fp32 gradients of the same seed, and
what the traffic costs. Ranks are split into two nodes (--dp-intra-node-size), so that gradients take both
hops. "plain 4 bits" is the control: gradients without the Hadamard transform and in 4 bits in both hops,
weights quantised themselves instead of their differences. "bf16 gradients" and one more uncompressed run
with another seed show the noise. Flags that are not the script's own go to Megatron.

On GPUs the next run's processes load their modules while one trains.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import _convergence
import demo

WAIT_FOR = "DATA_PARALLEL_CONVERGENCE_GO"

BASELINE = "fp32 gradients"
SDP4BIT = "--dp-compression sdp4bit"
TAGC = "--dp-compression tagc"
SETTINGS = {
    BASELINE: "",
    "bf16 gradients": "--grad-reduce-in-bf16",
    "sdp4bit": SDP4BIT,
    "sdp4bit, bf16 gradients": f"{SDP4BIT} --grad-reduce-in-bf16",
    "sdp4bit, one hop int8": f"{SDP4BIT} --dp-intra-node-size {{ranks}}",
    "sdp4bit, one hop int4": f"{SDP4BIT} --dp-intra-node-size 1",
    "sdp4bit, int8 feedback": f"{SDP4BIT} --dp-error-feedback int8",
    "sdp4bit, fp32 feedback": f"{SDP4BIT} --dp-error-feedback fp32",
    "tagc, sketch": f"{TAGC} --tagc-wire sketch",
    "tagc, sketch, all matrices": f"{TAGC} --tagc-wire sketch --tagc-layers all",
    "tagc, sketch, 80 % of the sum": f"{TAGC} --tagc-wire sketch --tagc-sketch-ratio 3.85",
    "tagc, packed": TAGC,
    "tagc, packed, from the start": f"{TAGC} --gradients-quantization-start-iteration 0",
    "tagc, packed, after 4": f"{TAGC} --gradients-quantization-start-iteration 4",
    "tagc, packed, after 20": f"{TAGC} --gradients-quantization-start-iteration 20",
    "tagc, packed, after 160": f"{TAGC} --gradients-quantization-start-iteration 160",
    "tagc, sketch, from the start": f"{TAGC} --tagc-wire sketch --gradients-quantization-start-iteration 0",
    "tagc, packed, mlp": f"{TAGC} --tagc-layers mlp",
    "tagc, packed, all matrices": f"{TAGC} --tagc-layers all",
    "tagc, packed, 60 %, 8 bits": f"{TAGC} --tagc-sparsity 0.6 --tagc-bits 8",
    "tagc, packed, 95 %": f"{TAGC} --tagc-sparsity 0.95",
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


def worker() -> None:
    """One rank of a run that was started ahead of its turn: pretrain_gpt.py, after a file has appeared."""
    sys.path.insert(0, str(demo.ROOT))
    import pretrain_gpt
    from megatron.compression import preflight

    preflight.prepare()
    from megatron.compression import entrypoint  # noqa: F401 - loads what takes long

    while not Path(os.environ[WAIT_FOR]).exists():
        time.sleep(0.1)
    pretrain_gpt.main()


class Turns:
    """Trains one run after the other; the next one's processes are started ahead and wait for their turn.

    Args:
        runs: all that may come, in order.
        start: starts a run, given the file that it waits for.
        directory: for those files.
        ahead: whether to; the processors must be able to bear it.
    """

    def __init__(self, runs: list[dict], start, directory: Path, ahead: bool) -> None:
        self.runs, self.start, self.directory, self.ahead = runs, start, directory, ahead
        self.waiting: tuple[dict, demo.Training] | None = None

    def train(self, run: dict) -> dict:
        """The summary of a run. Several threads may call it where nothing is started ahead."""
        if not self.ahead:
            self._go(run).touch()
            return self.start(run, self._go(run)).finish()
        if self.waiting is None or self.waiting[0] != run:
            self.end()
            self._launch(run)
        training, self.waiting = self.waiting[1], None
        self._go(run).touch()
        later = self.runs[self.runs.index(run) + 1 :]
        if later:
            self._launch(later[0])
        return training.finish()

    def _go(self, run: dict) -> Path:
        return self.directory / f"go-{os.getpid()}-{self.runs.index(run)}"

    def _launch(self, run: dict) -> None:
        self.waiting = run, self.start(run, self._go(run))

    def end(self) -> None:
        """Stop what has not had its turn."""
        if self.waiting is not None:
            self.waiting[1].process.terminate()
            self.waiting[1].process.wait()
            self.waiting = None
        for file in self.directory.glob(f"go-{os.getpid()}-*"):
            file.unlink()


def main() -> None:
    """Train every setting and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _convergence.add_arguments(parser, demo.ROOT / "runs" / "data_parallel")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=[BASELINE, "sdp4bit", "tagc, packed", "tagc, sketch", "plain 4 bits", "bf16 gradients"],
    )
    parser.add_argument("--data-parallel", type=int, help="ranks (default: 4 on GPUs, 2 on CPUs)")
    _convergence.add_model_arguments(parser, MODELS)
    options, extra = parser.parse_known_args()
    gpus = demo.gpu_count()
    ranks = options.data_parallel or (4 if gpus >= 4 or options.share_gpus else 2)
    gpus, share = _convergence.share(options, gpus, ranks)
    on_gpus = gpus >= ranks
    data, common = _convergence.prepare(options, extra, MODELS, TRAINING, ranks, on_gpus)
    plan = _convergence.plan(options.settings, BASELINE, options.seeds, options.noise_seed)
    runs = [{**common, "setting": setting, "seed": seed} for setting, seed in plan]

    def start(run: dict, go: Path) -> demo.Training:
        name = f"{run['setting'].replace(' ', '-').replace(',', '')}-{run['seed']}"
        flags = " ".join([flags_of(run["setting"], ranks, run["seed"]), *share, *extra])
        entry = f"scripts/{Path(__file__).name}"
        return demo.Training(name, flags, data, ranks, gpus, options, 1, entry, **{WAIT_FOR: str(go)})

    turns = Turns(runs, start, options.output, ahead=on_gpus and options.jobs == 1)

    def train(run: dict) -> dict:
        summary = turns.train(run)
        kept = ("validation_loss", "last_loss", "bytes_per_iteration", "bytes_between_nodes")
        return {key: summary[key] for key in kept}

    try:
        results = _convergence.train_missing(
            runs, train, options.output, options.time_limit, jobs=options.jobs
        )
    finally:
        turns.end()
    rows = [row(result, results) for result in results]
    baseline = {"setting": BASELINE}
    _convergence.conclude(options.output, common, results, baseline, rows, table(rows))


def row(result: dict, results: list[dict]) -> dict:
    """One run: its loss against the uncompressed one of its seed, and the megabytes of an iteration."""
    sent = {channel: pair["sent"] / 1e6 for channel, pair in result["bytes_per_iteration"].items()}
    crossed = result["bytes_between_nodes"].get("dp.gradient")
    return {
        "setting": result["setting"],
        "seed": result["seed"],
        "validation_loss": result["validation_loss"],
        "difference": _convergence.difference(result, results, {"setting": BASELINE}),
        "gradient_megabytes": sent["dp.gradient"],
        "between_nodes_megabytes": crossed["sent"] / 1e6 if crossed else None,
        "weight_megabytes": sent["dp.weight"],
    }


def table(rows: list[dict]) -> str:
    """Markdown, one row a run."""
    lines = [
        f"| setting | seed | validation loss | against {BASELINE} | MB grads | between nodes | MB weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        crossed = one["between_nodes_megabytes"]
        lines.append(
            f"| {one['setting']} | {one['seed']} | {one['validation_loss']:.4f} "
            f"| {_convergence.percent(one['difference'])} | {one['gradient_megabytes']:.3f} "
            f"| {'-' if crossed is None else f'{crossed:.3f}'} | {one['weight_megabytes']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    worker() if WAIT_FOR in os.environ else main()
