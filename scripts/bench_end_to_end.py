"""Iteration time of a GPT with compressed tensor parallelism, under several kinds of link on one host.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json

A regime is one run of the training loop; the settings take turns in it, a block of iterations each, so that
all of them see the same machine, model and weights. Reported: the median of each block after its first three
iterations, from Megatron's log. The regimes are NCCL's own switches:

    nvlink      as it is
    pcie        NCCL_P2P_DISABLE=1: through host memory
    ethernet    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1: TCP

A setting is a codec (``none``, ``int8:single``), with ``caat0.5+`` before it for a CAAT-Net that synchronises
half of the channels. A CAAT-Net is another model: its iterations compare in time, not in loss.
``int8:chunks2`` is int8 with --taco-overlap-chunks 2, ``int8:copies`` with --taco-transport copies (nvlink
alone has that).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from _codec_names import parse_codec

ROOT = Path(__file__).resolve().parent.parent
REGIMES = {
    "nvlink": {},
    "pcie": {"NCCL_P2P_DISABLE": "1"},
    "ethernet": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
WARM_UP = 3
SETTINGS = "BENCH_END_TO_END"

# measured once with megatron-core's local layers and once with torch-native ones: see --upstream-layers
MODEL = [
    *("--num-layers", "8", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "2048"),
    *("--max-position-embeddings", "2048", "--micro-batch-size", "4", "--global-batch-size", "16"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--bf16", "--lr", "1e-4", "--mock-data"),
    *(
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "32000",
        "--split",
        "100,0,0",
        "--eval-iters",
        "0",
    ),
    *("--eval-interval", "100000", "--log-interval", "1", "--log-throughput"),
    *("--no-create-attention-mask-in-dataloader", "--taco", "--taco-min-message-mb", "0"),
]


@dataclass(frozen=True)
class Setting:
    """What a block of iterations runs with."""

    codec: dict | None
    """Arguments of the codec; None sends as it is."""
    fraction: float = 1.0
    """Part of the channels that a CAAT-Net synchronises."""
    chunks: int = 1
    transport: str = "auto"


def parse_setting(text: str) -> Setting:
    """Setting of ``none``, ``int8:single:chunks2``, ``fp8-e4m3:copies``, ``caat0.5+int8:dither``."""
    fraction = 1.0
    if text.startswith("caat"):
        number, _, text = text.removeprefix("caat").partition("+")
        fraction = float(number)
    if text == "none":
        return Setting(None, fraction)
    codec, chunks, transport = [], 1, "auto"
    for option in text.split(":"):
        if option.startswith("chunks"):
            chunks = int(option.removeprefix("chunks"))
        elif option == "copies":
            transport = option
        else:
            codec.append(option)
    return Setting(parse_codec(":".join(codec)), fraction, chunks, transport)


def worker() -> None:
    """One rank of a regime's run: pretrain_gpt.py's loop, with the setting changed at each block's start."""
    from megatron.compression import preflight

    preflight.prepare()
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args
    from megatron.training.models.gpt import default_layer_spec

    from megatron.compression import entrypoint
    from megatron.compression.arguments import add_compression_arguments
    from megatron.compression.codecs import build_codec
    from megatron.compression.config import CaatNetSettings
    from megatron.compression.tensor_parallel.caat_net_layers import bind_caat_net
    from scripts._kernel_times import KernelTimes

    settings = json.loads(os.environ[SETTINGS])
    blocks = [parse_setting(text) for text in settings["codecs"]]
    codecs = [None if one.codec is None else build_codec("taco", **one.codec) for one in blocks]
    fractions = [CaatNetSettings(caat_net_sync_fraction=one.fraction) for one in blocks]
    kernel_times, profiles = KernelTimes(), []

    class SwitchingForwardStep(entrypoint.ForwardStep):
        bound, iteration = CaatNetSettings(), -1

        def __call__(self, data_iterator, model):
            block, iteration = divmod(get_args().curr_iteration, settings["iterations"])
            if settings["profile"] and iteration != self.iteration and int(os.environ["RANK"]) == 0:
                if iteration == settings["iterations"] - 2:
                    kernel_times.start()
                elif iteration == settings["iterations"] - 1:
                    profiles.append(kernel_times.stop())
                    Path(settings["profile"]).write_text(json.dumps(profiles))
            self.iteration = iteration
            self.runtime.tensor_parallel_codec = codecs[block]
            config = self.runtime.config
            tensor_parallel = replace(config.tensor_parallel, taco_overlap_chunks=blocks[block].chunks)
            self.runtime.transports.choice = blocks[block].transport
            self.runtime.config = replace(config, tensor_parallel=tensor_parallel)
            if self.bound != fractions[block]:
                bind_caat_net(unwrap_model(model), fractions[block], self.runtime.ledger)
                self.bound = fractions[block]
            return super().__call__(data_iterator, model)

    entrypoint.ForwardStep = SwitchingForwardStep
    args = entrypoint.parse_arguments(add_compression_arguments)
    if settings["upstream_layers"]:
        weave = entrypoint.weave

        def weave_with_upstream_layers(args, model_config):
            model_config.transformer_layer_spec = lambda config, vp_stage=None: default_layer_spec(
                config, vp_stage
            )
            return weave(args, model_config)

        entrypoint.weave = weave_with_upstream_layers
    entrypoint.run(args)


def run_regime(regime: str, options, codecs: list[str], upstream_layers: bool) -> list[dict]:
    """One launch; returns a row for each setting."""
    with tempfile.TemporaryDirectory() as scratch:
        return _run_regime(regime, options, codecs, upstream_layers, scratch)


def _run_regime(regime, options, codecs, upstream_layers, scratch) -> list[dict]:
    iterations = options.iterations if regime != "ethernet" else max(WARM_UP + 2, options.iterations // 2)
    settings = {
        "codecs": codecs,
        "iterations": iterations,
        "upstream_layers": upstream_layers,
        "profile": os.path.join(scratch, "profile.json") if options.profile else None,
    }
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", **REGIMES[regime])
    environment[SETTINGS] = json.dumps(settings)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.tensor_parallel}", __file__, *MODEL, *options.extra]
    command += ["--tensor-model-parallel-size", str(options.tensor_parallel)]
    command += ["--train-iters", str(iterations * len(codecs))]
    if any(parse_setting(text).transport == "copies" for text in codecs):
        command += ["--taco-transport", "copies"]  # makes what blocks of both transports need
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = output.stdout + output.stderr
    found = re.findall(
        r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?TFLOP/s/GPU\): ([\d.]+).*?"
        r"lm loss: (\S+)",
        text,
    )
    if output.returncode or len(found) < iterations * len(codecs):
        print(f"error: the {regime} run failed:\n{text[-3000:]}", file=sys.stderr)
        return []
    rows = []
    for block, codec in enumerate(codecs):
        profiled = 2 if options.profile else 0  # with them, the last two iterations are not like the others
        lines = found[block * iterations + WARM_UP : (block + 1) * iterations - profiled]
        rows.append(
            {
                "regime": regime,
                "layers": "megatron-core local" if upstream_layers else "torch-native",
                "codec": codec,
                "milliseconds": statistics.median(float(line[1]) for line in lines),
                "tflops_per_gpu": statistics.median(float(line[2]) for line in lines),
                "iterations": len(lines),
                "last_loss": float(lines[-1][3]),
            }
        )
    if options.profile:
        for row, times in zip(rows, json.loads(Path(settings["profile"]).read_text()), strict=True):
            row["kernel_ms"] = times
            print(regime, row["codec"], times)
    return rows


def main() -> None:
    """Run all regimes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=["none", "fp8-e4m3", "int8:single", "int6:single", "caat0.5+none", "caat0.5+int8:single"],
    )
    parser.add_argument("--iterations", type=int, default=10, help="iterations of a block (half on ethernet)")
    parser.add_argument(
        "--upstream-layers", action="store_true", help="also megatron-core's own layers, once"
    )
    parser.add_argument(
        "--profile", action="store_true", help="kernel times of one iteration of each setting, on rank 0"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    options, options.extra = parser.parse_known_args()
    rows = []
    for regime in options.regimes:
        if options.upstream_layers and regime == options.regimes[0]:
            rows += run_regime(regime, options, ["none"], upstream_layers=True)
        rows += run_regime(regime, options, options.codecs, upstream_layers=False)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{regime} done", flush=True)
    print(f"{'regime':10} {'layers':20} {'codec':22} {'ms':>8} {'TFLOP/s/GPU':>12} {'speed-up':>9}")
    for row in rows:
        base = [r for r in rows if r["regime"] == row["regime"] and r["codec"] == "none"][-1]
        speed_up = base["milliseconds"] / row["milliseconds"]
        print(
            f"{row['regime']:10} {row['layers']:20} {row['codec']:22} {row['milliseconds']:8.1f} "
            f"{row['tflops_per_gpu']:12.1f} {speed_up:9.3f}"
        )


if __name__ == "__main__":
    worker() if SETTINGS in os.environ else main()
