#!/usr/bin/env python
"""Bits by site: where a model can do with fewer bits, and the setting that a loss budget buys.

    python scripts/bits_by_site.py --processes 4 --budget 0.15 -- <the flags of pretrain_gpt.py>
    python scripts/bits_by_site.py ... --groups qkv proj fc1 fc2@0-3 fc2@4-31 -- <flags> --load DIR

runs those flags (--load continues a trained model for some hundred iterations) once uncompressed, and once
for each group of sites and each exchange with the coarse --probe there alone. What a probe adds to the
validation loss, over the probe's squared error, is the sensitivity of that group and exchange: loss follows
the squared error (docs/results/accuracy.md). Dynamic programming then takes the codecs of fewest bits whose
predicted losses add up to --budget per cent at most, as L-GreCo does under a budget of error (arXiv
2210.17357), and a last run measures them together. The spec that is printed is what --tp-compression takes.
results.json remembers every run: a script that is started again does what is missing.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _launch import fresh_folder, torchrun
from losses import train_missing

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.report.summary import mean_bytes, training_rows
from megatron.compression.tensor_parallel.by_site import parse_choices

GROUPS = ("qkv", "proj", "fc1", "fc2", "@embedding,output")
CODECS = ("int8", "int6:grid=quadratic", "int5:grid=quadratic", "int4:grid=quadratic")
STEPS = 2000
"""In which the budget is spent."""
LEAST = 0.02
"""Of the largest cost of a probe: what one costs at least, since runs scatter."""

Item = tuple[str, int]
"""A group, and its exchange: 0 or 1."""


def squared_error(codec: Codec) -> float:
    """Relative, of normal values, which a group is like after its transform."""
    x = torch.randn(1, 2**18, generator=torch.Generator().manual_seed(0))
    decoded = codec.decode(codec.encode(x), x.shape[1:], torch.float32)
    return float((decoded - x).square().sum() / x.square().sum())


def probe_spec(item: Item, probe: str, exact: str) -> str:
    """Only this group compressed, and in only this exchange coarse."""
    group, exchange = item
    return f"none;{group}=" + (f"{exact}/{probe}" if exchange else f"{probe}/{exact}")


def choose(
    slopes: dict[Item, float], weights: dict[Item, float], codecs: Sequence[str], budget: float
) -> dict[Item, str]:
    """The codec of every item that sends the fewest bits within the budget.

    Args:
        slopes: loss a squared error, in units of the budget.
        weights: share of the values, of each item.

    Raises:
        ValueError: the finest codecs cost more than the budget.
    """
    known = {spec: (parse_codec(spec).bits_per_value(), squared_error(parse_codec(spec))) for spec in codecs}
    best: dict[int, tuple[float, tuple[str, ...]]] = {0: (0.0, ())}  # by steps spent: bits, choices
    for item, slope in slopes.items():
        after: dict[int, tuple[float, tuple[str, ...]]] = {}
        for spent, (bits, chosen) in best.items():
            for spec, (width, error) in known.items():
                total = spent + math.ceil(slope * error / budget * STEPS)
                sent = bits + weights[item] * width
                if total <= STEPS and sent < after.get(total, (math.inf,))[0]:
                    after[total] = sent, (*chosen, spec)
        best = after
    if not best:
        raise ValueError(f"a budget of {budget:g} % is less than the finest of --codecs cost; give more")
    return dict(zip(slopes, min(best.values())[1], strict=True))


def spec_of(chosen: dict[Item, str], rest: str) -> str:
    """What ``--tp-compression`` takes; ``rest`` is for sites of no group."""
    parts = [rest]
    for group in dict.fromkeys(group for group, _ in chosen):
        first, second = chosen[group, 0], chosen[group, 1]
        parts.append(f"{group}={first}" if first == second else f"{group}={first}/{second}")
    return ";".join(parts)


def train(run: dict, args: argparse.Namespace) -> dict:
    """One run; its validation loss, and the bytes an iteration that its compressed messages stand for.

    Raises:
        RuntimeError: it failed, or evaluated nothing.
    """
    folder = fresh_folder(args.output, run["spec"])
    words = [*args.flags, "--compression-report", folder / "report"]
    if run["spec"] != "none":
        words += ["--tp-compression", run["spec"], "--tp-compression-min-mb", 0]
    status, end = torchrun(args.processes, "pretrain_gpt.py", words, folder / "log.txt")
    if status:
        raise RuntimeError(f"the run of {run['spec']!r} failed:\n{end}")
    report = json.loads((folder / "report" / "report.json").read_text())
    loss = report["summary"]["validation_loss"]
    if loss is None:
        raise RuntimeError("the run has no validation loss; give --eval-iters and --eval-interval")
    traffic = mean_bytes(training_rows(report))
    ways = [kinds for name, kinds in traffic.items() if name in ("tp.forward", "tp.backward")]
    plain = sum(kinds["compressed"]["plain"] for kinds in ways if "compressed" in kinds)
    print(f"{run['spec']}: {loss:.5f}", flush=True)
    return {"validation_loss": loss, "plain": plain}


def main(argv: Sequence[str] | None = None) -> None:
    """Probe, choose, check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="ranks on this host")
    parser.add_argument("--budget", type=float, required=True, help="per cent of validation loss")
    parser.add_argument("--groups", nargs="+", default=GROUPS, help="SITE, @LAYERS or SITE@LAYERS each")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="to choose among, of one group size")
    parser.add_argument("--probe", default="int4", help="coarse enough to be seen in a short run")
    parser.add_argument("--output", type=Path, default=Path("runs/bits"), help="folder for everything")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on the same devices")
    parser.add_argument("flags", nargs="+", metavar="-- FLAGS", help="of pretrain_gpt.py")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    finest = max(args.codecs, key=lambda spec: parse_codec(spec).bits_per_value())
    items = [(group, exchange) for group in args.groups for exchange in (0, 1)]
    probes = {item: probe_spec(item, args.probe, finest) for item in items}

    def measured(specs: Sequence[str]) -> list[dict]:
        for spec in specs:
            parse_choices(spec, "--groups")
        runs = [{"spec": spec, "flags": shlex.join(args.flags)} for spec in specs]
        found = train_missing(runs, lambda run: train(run, args), args.output, jobs=args.jobs)
        return sorted(found, key=lambda result: specs.index(result["spec"]))

    base, *results = measured(["none", *probes.values()])
    exact = base["validation_loss"]
    costs = {
        item: 100 * (result["validation_loss"] / exact - 1)
        for item, result in zip(items, results, strict=True)
        if result["plain"]
    }
    error, least = squared_error(parse_codec(args.probe)), LEAST * max([*costs.values(), 1e-6])
    plain = {item: result["plain"] for item, result in zip(items, results, strict=True)}
    weights = {item: plain[item] / sum(plain[one] for one in costs) for item in costs}
    slopes = {item: max(cost, least) / error for item, cost in costs.items()}
    try:
        chosen = choose(slopes, weights, args.codecs, args.budget)
    except ValueError as refused:
        sys.exit(f"error: {refused}")
    spec = spec_of(chosen, finest)
    for item, choice in chosen.items():
        print(f"{item[0]:20} exchange {item[1] + 1}: {args.probe} {costs[item]:+.3f} %, takes {choice}")
    bits = sum(weights[item] * parse_codec(choice).bits_per_value() for item, choice in chosen.items())
    predicted = sum(slopes[item] * squared_error(parse_codec(choice)) for item, choice in chosen.items())
    print(f"{bits:.3f} bits a value, {predicted:+.3f} % predicted: --tp-compression '{spec}'")
    last = measured(["none", spec])[-1]["validation_loss"]
    print(f"{100 * (last / exact - 1):+.3f} % measured")


if __name__ == "__main__":
    main()
