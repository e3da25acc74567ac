"""Time to the first token: one forward pass over a prompt, without gradients, with and without compression.

    python scripts/bench_prefill.py --json prefill.json
    python scripts/bench_prefill.py --shape qwen2.5-7b --regimes pcie --tokens 1024 4096 --codecs none int6
    python scripts/bench_prefill.py --codecs none "none --caat-net-sync-fraction 0.5"

Shapes, settings and NCCL's regimes are those of bench_end_to_end.py. One prompt of each length goes through
the whole model; the output layer computes the last position alone. Each setting is timed eager and as one
CUDA graph. A CAAT-Net is another model, so it is a run of its own: compare times only.
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
from itertools import groupby
from pathlib import Path

import _launch
from _launch import SETTINGS_HELP, parse_setting, torchrun
from bench_end_to_end import MODEL, REGIMES, SHAPES

from megatron.compression.report.render import table as markdown

WARM_UP, TIMED = 3, 15
_ORDER, _ROW = "BENCH_PREFILL", "prefill row"


def parse(words: list[str] | None = None) -> Namespace:
    """The command line; flags that are not the script's own are in ``extra``, for pretrain_gpt.py."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    codecs = [parse_setting(text) for text in ("none", "int8", "int6", "taco", "none")]
    add(
        "--codecs",
        dest="settings",
        nargs="+",
        type=parse_setting,
        default=codecs,
        help=SETTINGS_HELP,
    )
    add("--regimes", nargs="+", choices=REGIMES, default=["nvlink", "pcie"])
    add("--shape", choices=[name for name in SHAPES if name != "thin"], default="1.75b")
    add("--tokens", nargs="+", type=int, default=[4096, 8192], help="lengths of the prompt")
    add("--tensor-parallel", type=int, default=2)
    add("--limit", type=float, default=200, help="seconds for a row, its run's start included")
    add("--json", type=argparse.FileType("a"), help="write the rows here")
    options, options.extra = parser.parse_known_args(words)
    return options


def run(options: Namespace) -> None:
    """Run every regime and print the table; exit status 1 where a run failed."""
    rows: list[dict] = []
    failed = False
    for regime in options.regimes:
        for _, together in groupby(options.settings, lambda setting: setting.flags):
            settings = list(together)
            first = max(settings, key=lambda one: one.specs != ("none",))
            words = [
                *MODEL.split(),
                *SHAPES[options.shape].split(),
                *first.words("tensor"),
                *options.extra,
            ]
            words += ["--micro-batch-size", 1, "--global-batch-size", 1, "--train-iters", 1]
            words += [
                "--seq-length",
                max(options.tokens),
                "--max-position-embeddings",
                max(options.tokens),
            ]
            words += ["--tensor-model-parallel-size", options.tensor_parallel]
            order = {
                "settings": [one.words("tensor") for one in settings],
                "tokens": options.tokens,
            }
            run = {"shape": options.shape, "ranks": options.tensor_parallel, "regime": regime}
            run["flags"] = shlex.join(map(str, words))

            def show(line: str, run: dict = run, settings: list = settings) -> float | None:
                if (found := re.search(f"{_ROW} (.*)", line)) is None:
                    return None
                row = json.loads(found[1])
                rows.append({**run, "codec": settings[row.pop("setting")].text, **row})
                print(json.dumps(rows[-1]), flush=True)
                if options.json:
                    Path(options.json.name).write_text(json.dumps(rows, indent=1) + "\n")
                return options.limit

            environment = {**REGIMES[regime], _ORDER: json.dumps(order), **first.environment}
            try:
                torchrun(
                    options.tensor_parallel, __file__, words, show, options.limit, **environment
                )
            except RuntimeError as error:
                print(f"error: {regime}, {first.text}: {error}", file=sys.stderr, flush=True)
                failed = True
    print(f"\n{table(rows, options.settings[0].text)}", flush=True)
    if failed:
        sys.exit(1)


def table(rows: list[dict], first: str) -> str:
    """Markdown; speed-ups against the ``first`` setting in each regime, length and kind of graphs."""
    columns = "regime, tokens, graphs, codec, ms (least - most), host ms, speed-up, MB sent, of uncompressed"
    lines = [columns.split(", ")]
    for row in sorted(rows, key=lambda row: (row["regime"], row["tokens"], row["graphs"])):
        same = {"codec": first} | {key: row[key] for key in ("regime", "tokens", "graphs")}
        base = next((one for one in rows if same.items() <= one.items()), None)
        cells = [row["regime"], str(row["tokens"]), row["graphs"], row["codec"]]
        ms = row["milliseconds"]
        cells += [f"{ms:.2f} ({row['least']:.2f} - {row['most']:.2f})", f"{row['host_ms']:.2f}"]
        cells += [f"{base['milliseconds'] / ms:.2f}" if base else "-", f"{row['sent'] / 1e6:.1f}"]
        lines.append([*cells, f"{row['sent'] / max(row['plain'], 1):.2f}"])
    return "\n".join(markdown(*lines))


def worker() -> None:
    """One rank of a run: Megatron builds the model, and prompts take the place of training."""
    order = json.loads(os.environ[_ORDER])

    def change(args, compression, model_config) -> None:
        from megatron.training import training

        rules = [_launch.rules_of(args, words) for words in order["settings"]]

        def prompts(forward_step, model, *others, **named):
            policy = compression.run.policy
            for number, one in enumerate(rules):
                policy.rules = one
                for tokens in order["tokens"]:
                    _prompt(
                        model[0].eval(), args.padded_vocab_size, tokens, compression.ledger, number
                    )
            return 0, 0

        args.do_valid = args.do_test = False
        training.train = prompts

    _launch.train(change)


def _prompt(model, vocabulary: int, tokens: int, ledger, setting: int) -> None:
    """Time one length, eager and as a graph; the first rank prints a row for each."""
    import torch
    import torch.distributed as dist
    from megatron.core.utils import get_attr_wrapped_model

    ids = torch.randint(
        0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1)
    ).cuda()
    places = torch.arange(tokens, device=ids.device)[None]
    output = get_attr_wrapped_model(model, "output_layer")
    last = output.register_forward_pre_hook(lambda layer, given: (given[0][-1:], *given[1:]))

    def forward() -> torch.Tensor:
        return model(ids, places, None)

    def sent() -> tuple[int, int]:
        tallies = ledger.tallies.values()
        return sum(one.sent for one in tallies), sum(one.plain for one in tallies)

    def time_it(graphs: str, call) -> None:
        times, hosts = [], []
        for number in range(WARM_UP + TIMED):
            before = sent()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            if number >= WARM_UP:
                times.append((time.perf_counter() - begin) * 1e3)
                hosts.append(host * 1e3)
        row = {
            "setting": setting,
            "tokens": tokens,
            "graphs": graphs,
            "host_ms": statistics.median(hosts),
        }
        row |= {"milliseconds": statistics.median(times), "least": min(times), "most": max(times)}
        row |= dict(
            zip(
                ("sent", "plain"), (b - a for a, b in zip(before, sent(), strict=True)), strict=True
            )
        )
        if dist.get_rank() == 0:
            print(_ROW, json.dumps(row), flush=True)

    with torch.no_grad():
        time_it("none", forward)
        if torch.cuda.is_available():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                forward()
            time_it("full_iteration", graph.replay)
            graph.reset()
    last.remove()


if __name__ == "__main__":
    if _ORDER in os.environ:
        worker()
    else:
        run(parse())
