"""Iteration time of a GPT with compressed pipeline stages, under several kinds of link on one host.

    python scripts/bench_pipeline.py --pipeline-parallel 4 --json pipeline.json
    python scripts/bench_pipeline.py --virtual-stages 2          # interleaved, overlapped point-to-point

A regime is one run of the training loop; the settings take turns in it, a block of iterations each, so that
all of them see the same machine, model and weights. Reported: the median of each block after its first
iterations, from Megatron's log, with the bytes that one rank sends in an iteration, from the ledger's. The
regimes are bench_end_to_end.py's. A setting may be named twice: the second "none" shows how much the times of
two blocks differ. Stages are thin (one layer of hidden size 2048 by default), so that point-to-point traffic
weighs as it does between nodes; --num-layers and --hidden-size after the script's own options change the
model.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from bench_end_to_end import REGIMES, ROOT

WARM_UP = 2
SETTINGS = "BENCH_PIPELINE"
CODECS = {
    "none": {},
    "tah-quant": {"pp_compression": "tah-quant"},
    "tah-quant tile": {"pp_compression": "tah-quant", "tah_allocation": "tile"},
    "tah-quant 4-bit back": {"pp_compression": "tah-quant", "tah_backward_bits": 4},
    "int8": {"pp_compression": "int8"},
    "taco": {"pp_compression": "taco"},
}
MODEL = """--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 4 --global-batch-size 64 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 8191 --split 100,0,0 --eval-iters 0 --eval-interval 100000
    --log-interval 1 --log-throughput --no-create-attention-mask-in-dataloader
    --untie-embeddings-and-output-weights"""


def worker() -> None:
    """One rank of a regime's run: pretrain_gpt.py's loop, with the codecs changed at each block's start."""
    from megatron import host
    from megatron.compression.versions import MEGATRON_CORE_VERSION

    host.prepare(MEGATRON_CORE_VERSION)
    from megatron.compression import entrypoint, weave
    from megatron.compression.arguments import add_compression_arguments
    from megatron.compression.pipeline_parallel.codecs import backward_codec, forward_codec
    from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
    from megatron.compression.pipeline_parallel.exchange import BACKWARD, FORWARD, PipelineExchange

    settings = json.loads(os.environ[SETTINGS])
    blocks = []
    for name in settings["codecs"]:
        config = PipelineParallelCompression(**CODECS[name])
        blocks.append({FORWARD: forward_codec(config), BACKWARD: backward_codec(config)})

    class SwitchingExchange(PipelineExchange):
        def __call__(self, *args, **kwargs):
            self.codecs = blocks[self.iteration() // settings["iterations"]]
            return super().__call__(*args, **kwargs)

    weave.PipelineExchange = SwitchingExchange
    entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


def layout(options) -> list[str]:
    """Flags for the stages."""
    flags = ["--pipeline-model-parallel-size", str(options.pipeline_parallel)]
    layers = options.pipeline_parallel * options.virtual_stages
    if options.virtual_stages > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", "1"]
    return [*flags, "--num-layers", str(layers)]


def run_regime(regime: str, options) -> list[dict]:
    """One launch; returns a row for each setting."""
    iterations = options.iterations
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", **REGIMES[regime])
    environment[SETTINGS] = json.dumps({"codecs": options.codecs, "iterations": iterations})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.pipeline_parallel}", __file__, *MODEL.split(), *layout(options)]
    command += [] if options.fp32 else ["--bf16"]
    command += ["--train-iters", str(iterations * len(options.codecs)), *options.extra]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = output.stdout + output.stderr
    times = re.findall(
        r"iteration +\d+/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)", text
    )
    sent = re.findall(r"communication +\d+/.*", text)
    expected = iterations * len(options.codecs)
    if output.returncode or len(times) < expected or len(sent) < expected:
        print(f"error: the {regime} run failed:\n{text[-3000:]}", file=sys.stderr)
        return []
    rows = []
    for block, codec in enumerate(options.codecs):
        chosen = slice(block * iterations + WARM_UP, (block + 1) * iterations)
        megabytes = {
            channel: float(re.search(rf"pp\.{channel} \(MB\): ([\d.]+)", sent[chosen][-1])[1])
            for channel in ("forward", "backward")
        }
        rows.append(
            {
                "regime": regime,
                "codec": codec,
                "milliseconds": statistics.median(float(ms) for ms, _ in times[chosen]),
                "forward_megabytes": megabytes["forward"],
                "backward_megabytes": megabytes["backward"],
                "iterations": iterations - WARM_UP,
                "last_loss": float(times[chosen][-1][1]),
            }
        )
    return rows


def main() -> None:
    """Run all regimes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline-parallel", type=int, default=4)
    parser.add_argument("--virtual-stages", type=int, default=1, help="layers, and stages, of each rank")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=["nvlink", "ethernet"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=["none", "tah-quant", "int8", "none"])
    parser.add_argument(
        "--iterations", type=int, default=6, help=f"of a block; the first {WARM_UP} not timed"
    )
    parser.add_argument("--fp32", action="store_true", help="an fp32 model: messages twice as large")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options, options.extra = parser.parse_known_args()
    rows = []
    for regime in options.regimes:
        rows += run_regime(regime, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{regime} done", flush=True)
    print(
        f"{'regime':10} {'codec':22} {'ms':>9} {'speed-up':>9} {'MB forward':>11} {'MB back':>9} {'loss':>8}"
    )
    for row in rows:
        base = next(r for r in rows if r["regime"] == row["regime"])
        print(
            f"{row['regime']:10} {row['codec']:22} {row['milliseconds']:9.1f} "
            f"{base['milliseconds'] / row['milliseconds']:9.3f} {row['forward_megabytes']:11.1f} "
            f"{row['backward_megabytes']:9.1f} {row['last_loss']:8.4f}"
        )
    if {row["regime"] for row in rows} != set(options.regimes):
        sys.exit(1)


if __name__ == "__main__":
    worker() if SETTINGS in os.environ else main()
