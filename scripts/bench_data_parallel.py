"""Iteration time of a GPT of 1.3 B parameters under data parallelism, by kind of link, on one host.

    python scripts/bench_data_parallel.py --data-parallel 4 --json data_parallel.json
    python scripts/bench_data_parallel.py --fp32-gradients --regimes ethernet

A regime is one run of the training loop with the distributed optimizer and both overlap flags; the settings
take turns in it, a block of iterations each, so that all of them see the same machine, model and optimizer.
Reported: the median of each block after its first iterations, from Megatron's log, and the bytes that one
rank sends in an iteration, from the ledger's. The regimes are bench_end_to_end.py's. "nodes of n" counts n
ranks of this host as a node: one of them a node is what the link of the ethernet regime stands for.
Gradients are reduced in bf16; --fp32-gradients measures Megatron's default instead.
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
SETTINGS = "BENCH_DATA_PARALLEL"
ON = {"dp_compression": "sdp4bit", "quantized_weights": True, "quantized_gradients": True}
TAGC = {"dp_compression": "tagc", "dp_error_feedback": "fp32"}
CODECS = {
    "none": {},
    "sdp4bit": ON,
    "sdp4bit, nodes of 1": {**ON, "dp_intra_node_size": 1},
    "sdp4bit, nodes of 2": {**ON, "dp_intra_node_size": 2},
    "sdp4bit, nodes of 1, int8 feedback": {**ON, "dp_intra_node_size": 1, "dp_error_feedback": "int8"},
    "sdp4bit, nodes of 1, one communicator": {**ON, "dp_intra_node_size": 1, "dp_communicators": 1},
    "tagc, sketch": {**TAGC, "tagc_wire": "sketch"},
    "tagc, packed": TAGC,
    "tagc, packed, int4 weights": {**TAGC, "quantized_weights": True},
    "tagc, packed, all matrices, int4 weights": {**TAGC, "tagc_layers": "all", "quantized_weights": True},
    "weights only": {**ON, "quantized_gradients": False},
}
MODEL = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --bf16
    --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 100,0,0 --eval-iters 0
    --eval-interval 100000 --log-interval 1 --log-throughput --no-create-attention-mask-in-dataloader
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dp-compression sdp4bit"""


class Switch:
    """Changes what a bound model's buckets use, between iterations."""

    def __init__(self, settings: dict) -> None:
        self.iterations = settings["iterations"]
        self.names = settings["codecs"]
        self.chunks, self.runtime, self.current, self.prepared = [], None, None, {}

    def bind(self, chunks: list, runtime) -> list:
        """In place of ``bind_data_parallel``: binds, and keeps hold of the model."""
        from megatron.compression.data_parallel.bind import bind_data_parallel

        self.chunks, self.runtime = bind_data_parallel(chunks, runtime), runtime
        return chunks

    def to(self, iteration: int) -> None:
        """Take on the setting of this iteration's block; every rank calls it before a forward."""
        name = self.names[min(iteration // self.iterations, len(self.names) - 1)]
        if name == self.current:
            return
        self.current = name
        for chunk in self.chunks:
            for group in chunk.bucket_groups:
                if group.weights and group.weights[0].pending is not None:
                    group.start_param_sync(force_sync=True)
                self._change(group, name)

    def _change(self, group, name: str) -> None:
        from dataclasses import replace

        from megatron.compression.data_parallel.codecs import data_parallel_codecs
        from megatron.compression.data_parallel.config import DataParallelCompression
        from megatron.compression.data_parallel.topology import find_topology
        from megatron.compression.data_parallel.weights import ATTRIBUTE, BucketWeights

        if not hasattr(group, "bench_views"):
            group.bench_views = [sync.bucket for sync in group.gradient_syncs]
        settings = DataParallelCompression(**CODECS[name])
        size = settings.dp_intra_node_size
        if size not in self.prepared:
            self.prepared[size] = find_topology(group.topology.group, size, settings.dp_communicators)
        group.topology = self.prepared[size]
        gradients, weights = data_parallel_codecs(settings)
        views = [replace(view, topology=group.topology) for view in group.bench_views]
        group.gradient_syncs = [gradients(view) for view in views] if gradients else []
        group.weights = []
        for bucket in group.buckets:
            if hasattr(bucket, ATTRIBUTE):
                delattr(bucket, ATTRIBUTE)
            if weights is not None:
                held = BucketWeights(bucket.param_data, weights, group.topology, self.runtime.ledger)
                setattr(bucket, ATTRIBUTE, held)
                group.weights.append(held)


def worker() -> None:
    """One rank of a regime's run: pretrain_gpt.py's loop, with the codecs changed at each block's start."""
    from megatron import host
    from megatron.compression.versions import MEGATRON_CORE_VERSION

    host.prepare(MEGATRON_CORE_VERSION)
    from megatron.training import get_args

    from megatron.compression import entrypoint, weave
    from megatron.compression.arguments import add_compression_arguments

    switch = Switch(json.loads(os.environ[SETTINGS]))
    weave.bind_data_parallel = switch.bind

    class SwitchingForwardStep(entrypoint.ForwardStep):
        def __call__(self, data_iterator, model):
            switch.to(get_args().curr_iteration)
            return super().__call__(data_iterator, model)

    entrypoint.ForwardStep = SwitchingForwardStep
    entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


def run_regime(regime: str, options) -> list[dict]:
    """One launch; returns a row for each setting."""
    iterations = options.iterations
    environment = dict(os.environ, OMP_NUM_THREADS="1", **REGIMES[regime])
    environment[SETTINGS] = json.dumps({"codecs": options.codecs, "iterations": iterations})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.data_parallel}", __file__, *MODEL.split()]
    command += ["--global-batch-size", str(4 * options.data_parallel * options.micro_batches)]
    command += [] if options.fp32_gradients else ["--grad-reduce-in-bf16"]
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
            channel: float(re.search(rf"dp\.{channel} \(MB\): ([\d.]+)", sent[chosen][-1])[1])
            for channel in ("gradient", "weight")
        }
        rows.append(
            {
                "regime": regime,
                "gradients": "fp32" if options.fp32_gradients else "bf16",
                "codec": codec,
                "milliseconds": statistics.median(float(ms) for ms, _ in times[chosen]),
                "gradient_megabytes": megabytes["gradient"],
                "weight_megabytes": megabytes["weight"],
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
    parser.add_argument("--data-parallel", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation, of 4 samples")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=["nvlink", "ethernet"])
    parser.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=["none", "sdp4bit", "sdp4bit, nodes of 1"]
    )
    parser.add_argument(
        "--iterations", type=int, default=8, help=f"of a block; the first {WARM_UP} not timed"
    )
    parser.add_argument("--fp32-gradients", action="store_true", help="the baseline reduces in fp32")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options, options.extra = parser.parse_known_args()
    rows = []
    for regime in options.regimes:
        rows += run_regime(regime, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{regime} done", flush=True)
    print(
        f"{'regime':10} {'gradients':9} {'codec':36} {'ms':>9} {'speed-up':>9} {'MB gradients':>13} "
        f"{'MB weights':>11} {'loss':>8}"
    )
    for row in rows:
        base = next(r for r in rows if r["regime"] == row["regime"])
        print(
            f"{row['regime']:10} {row['gradients']:9} {row['codec']:36} {row['milliseconds']:9.1f} "
            f"{base['milliseconds'] / row['milliseconds']:9.3f} {row['gradient_megabytes']:13.1f} "
            f"{row['weight_megabytes']:11.1f} {row['last_loss']:8.4f}"
        )


if __name__ == "__main__":
    worker() if SETTINGS in os.environ else main()
