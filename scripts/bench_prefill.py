"""Measure the time to the first token: a forward pass over a prompt, with and without compression.

    python scripts/bench_prefill.py --json prefill.json
    python scripts/bench_prefill.py --shape qwen2.5-7b --regimes pcie --tokens 1024 4096 --codecs
    none int6 python scripts/bench_prefill.py --codecs none "none --caat-net-sync-fraction 0.5"

Shapes, settings and regimes are those of bench_end_to_end.py. One prompt of each length goes
through the whole model, without gradients; the output layer computes the last position alone. Each
setting is timed eager and, on GPUs, as one CUDA graph. A CAAT-Net is another model, and so a run of
its own: compare its times only. Flags that are not this script's go to pretrain_gpt.py.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import _launch
from _launch import SETTINGS_HELP, BenchSetting, output_file, parse_setting, torchrun
from bench_end_to_end import MODEL, REGIMES, SHAPES

from megatron.compression.report.render import table as markdown

WARM_UP = 3
"""Passes before those that are timed."""
TIMED = 15
ORDER = "BENCH_PREFILL"
"""The environment variable that tells the ranks what to do, in JSON."""
ROW = "prefill row"
"""How a line of the ranks begins that holds a ``Timing``, in JSON."""


@dataclass(frozen=True)
class Timing:
    """What the ranks measure: one setting, one length, eager or in a graph."""

    setting: int
    """Its position among the settings of the run."""
    tokens: int
    graphs: str
    """none or full_iteration."""
    milliseconds: float
    """Median of the timed passes."""
    least: float
    most: float
    host_ms: float
    """Median time that the host needs to launch a pass."""
    sent: int
    """Bytes that a rank sends."""
    uncompressed: int
    """Bytes that it would send uncompressed."""


def parse(words: list[str] | None = None) -> Namespace:
    """Return the command line. Flags that are not this script's are in ``extra``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--codecs",
        dest="settings",
        nargs="+",
        type=parse_setting,
        metavar="SETTING",
        default=[parse_setting(text) for text in ("none", "int8", "int6", "taco", "none")],
        help=f"settings; speed-ups are against the first. A setting is {SETTINGS_HELP} (default: none int8 "
        "int6 taco none)",
    )
    add(
        "--regimes",
        nargs="+",
        choices=REGIMES,
        default=["nvlink", "pcie"],
        help="links to measure over (default: nvlink pcie)",
    )
    shapes = [name for name in SHAPES if name != "thin"]
    add("--shape", choices=shapes, default="1.75b", help="the model (default: 1.75b)")
    add(
        "--tokens",
        nargs="+",
        type=int,
        default=[4096, 8192],
        help="lengths of the prompt (default: 4096 8192)",
    )
    add("--tensor-parallel", type=int, default=2, help="ranks (default: 2)")
    add(
        "--limit",
        type=float,
        default=200,
        help="seconds for a row, with the start of its run (default: 200)",
    )
    add("--json", type=output_file, help="file for the rows")
    options, options.extra = parser.parse_known_args(words)
    return options


def run(options: Namespace) -> None:
    """Measure every regime and print the table. The exit status is 1 where a run failed."""
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")

    has_failed = False
    for regime in options.regimes:
        # Settings that differ only in their codecs share a run.
        for _, batch in groupby(options.settings, lambda setting: setting.flags):
            try:
                run_batch(options, regime, list(batch), keep)
            except RuntimeError as error:
                print(f"error: {regime}: {error}", file=sys.stderr, flush=True)
                has_failed = True
    print(f"\n{table(rows, options.settings[0].text)}", flush=True)
    if has_failed:
        sys.exit(1)


def run_batch(
    options: Namespace, regime: str, batch: list[BenchSetting], keep: Callable[[dict], None]
) -> None:
    """Measure settings that differ only in their codecs, in one run.

    Args:
        options: the command line.
        regime: the links.
        batch: the settings.
        keep: called with each row.

    Raises:
        RuntimeError: the run failed.
    """
    # The run is started with a setting that compresses, if there is one, and changes to each.
    first = max(batch, key=lambda setting: setting.specs != ("none",))
    longest = max(options.tokens)
    words = [*MODEL.split(), *SHAPES[options.shape].split(), *first.words("tensor")]
    words += [*options.extra, "--micro-batch-size", 1, "--global-batch-size", 1]
    words += ["--train-iters", 1, "--seq-length", longest, "--max-position-embeddings", longest]
    words += ["--tensor-model-parallel-size", options.tensor_parallel]
    common = {
        "shape": options.shape,
        "ranks": options.tensor_parallel,
        "regime": regime,
        "flags": shlex.join(map(str, words)),
    }

    def read(line: str) -> float | None:
        match = re.search(f"{ROW} (.*)", line)
        if match is None:
            return None
        timing = json.loads(match[1])
        codec = batch[timing.pop("setting")].text
        keep({**common, "codec": codec, **timing})
        return options.limit

    order = {
        "settings": [setting.words("tensor") for setting in batch],
        "tokens": options.tokens,
    }
    environment = {**REGIMES[regime], ORDER: json.dumps(order), **first.environment}
    torchrun(options.tensor_parallel, __file__, words, read, options.limit, **environment)


def table(rows: list[dict], baseline: str) -> str:
    """Return a markdown table; speed-ups are against a setting of the same regime, length and
    graphs."""
    header = ["regime", "tokens", "graphs", "codec", "ms (least - most)", "host ms", "speed-up"]
    lines = [[*header, "MB sent", "of uncompressed"]]
    for row in sorted(rows, key=lambda row: (row["regime"], row["tokens"], row["graphs"])):
        speed_up = "-"
        for base in rows:
            is_baseline = base["codec"] == baseline
            if is_baseline and all(base[key] == row[key] for key in ("regime", "tokens", "graphs")):
                speed_up = f"{base['milliseconds'] / row['milliseconds']:.2f}"
                break
        lines.append(
            [
                row["regime"],
                str(row["tokens"]),
                row["graphs"],
                row["codec"],
                f"{row['milliseconds']:.2f} ({row['least']:.2f} - {row['most']:.2f})",
                f"{row['host_ms']:.2f}",
                speed_up,
                f"{row['sent'] / 1e6:.1f}",
                f"{row['sent'] / max(row['uncompressed'], 1):.2f}",
            ]
        )
    return "\n".join(markdown(*lines))


# The ranks
# ----------------------------------------------------------------------------------------------


def worker() -> None:
    """Run one rank: Megatron builds the model, and prompts take the place of training."""
    order = json.loads(os.environ[ORDER])

    def change(args: Namespace, session: Any, model_config: Any) -> None:
        """Put the prompts in the place of Megatron's training loop.

        Args:
            args: Megatron's arguments.
            session: the compressed run.
            model_config: the model's config.
        """
        from megatron.training import training

        rules = [_launch.rules_of(args, words) for words in order["settings"]]

        def time_prompts(forward_step, model, *more, **named):
            policy = session.run.policy
            prompts = Prompts(model[0].eval(), args.padded_vocab_size, session.ledger)
            for setting, rules_of_setting in enumerate(rules):
                policy.rules = rules_of_setting
                for tokens in order["tokens"]:
                    prompts.time(setting, tokens)
            return 0, 0  # iterations and operations, as Megatron's train() returns

        # The run ends after the prompts.
        args.do_valid = False
        args.do_test = False
        training.train = time_prompts

    _launch.train(change)


class Prompts:
    """Times forward passes; the first rank prints a row for each.

    Args:
        model: the model, in evaluation.
        vocabulary: number of tokens.
        ledger: counts what this rank sends.
    """

    def __init__(self, model: Any, vocabulary: int, ledger: Any) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.ledger = ledger

    def time(self, setting: int, tokens: int) -> None:
        """Time a prompt, eager and, on GPUs, as one CUDA graph.

        Args:
            setting: position of the setting, for the rows.
            tokens: length of the prompt.
        """
        import torch
        from megatron.core.utils import get_attr_wrapped_model

        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.vocabulary, (1, tokens), generator=generator).cuda()
        positions = torch.arange(tokens, device=ids.device)[None]
        output_layer = get_attr_wrapped_model(self.model, "output_layer")

        def keep_last_position(layer, inputs):
            return (inputs[0][-1:], *inputs[1:])  # [sequence, samples, hidden]

        def forward() -> None:
            self.model(ids, positions, None)

        hook = output_layer.register_forward_pre_hook(keep_last_position)
        with torch.no_grad():
            self._time_calls(forward, setting, tokens, "none")
            if torch.cuda.is_available():
                graph = torch.cuda.CUDAGraph()
                # Other threads, NCCL's watchdog among them, may call CUDA during the capture.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    forward()
                self._time_calls(graph.replay, setting, tokens, "full_iteration")
                graph.reset()
        hook.remove()

    def _time_calls(self, call: Callable, setting: int, tokens: int, graphs: str) -> None:
        """Time a call several times; the ranks begin together. The first rank prints the
        ``Timing``."""
        import torch
        import torch.distributed as dist

        times = []
        host_times = []
        for number in range(WARM_UP + TIMED):
            sent_before, uncompressed_before = self._bytes()
            # All ranks begin with idle GPUs: the barrier is a kernel itself under NCCL.
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            launched = time.perf_counter()
            torch.cuda.synchronize()
            ended = time.perf_counter()
            if number >= WARM_UP:
                times.append(1e3 * (ended - began))
                host_times.append(1e3 * (launched - began))
        sent, uncompressed = self._bytes()
        timing = Timing(
            setting=setting,
            tokens=tokens,
            graphs=graphs,
            milliseconds=statistics.median(times),
            least=min(times),
            most=max(times),
            host_ms=statistics.median(host_times),
            sent=sent - sent_before,  # of the last pass
            uncompressed=uncompressed - uncompressed_before,
        )
        if dist.get_rank() == 0:
            print(ROW, json.dumps(asdict(timing)), flush=True)

    def _bytes(self) -> tuple[int, int]:
        """Return what this rank has sent so far, and would have sent uncompressed."""
        tallies = self.ledger.tallies.values()
        sent = sum(tally.sent for tally in tallies)
        uncompressed = sum(tally.uncompressed for tally in tallies)
        return sent, uncompressed


if __name__ == "__main__":
    if ORDER in os.environ:
        worker()
    else:
        run(parse())
