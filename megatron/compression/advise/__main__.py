"""What compression would bring on a cluster, before there is one.

    python -m megatron.compression.advise --model qwen2.5-7b --gpus 64 --intra nvlink --inter 12.5:20
    python -m megatron.compression.advise --gpus 64 --inter 50:10 -- <the flags of your launch script>
    python -m megatron.compression.advise --measure here.json            # on GPUs: the constants, once
    python -m megatron.compression.advise --calibration here.json --model llama-3-8b --plot advice.png

Flags behind -- win over those of --model, with which sizes that they leave open are searched.
docs/cost_model.md says how times are predicted and how far they were off.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.compression.advise import memory, shapes
from megatron.compression.advise.cluster import Cluster, Constants, Link
from megatron.compression.advise.phases import predict
from megatron.compression.advise.search import USABLE, fastest, fits
from megatron.compression.advise.settings import Advice, advise, config_of, recommended
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import InputError, OneLineParser, require_folder
from megatron.compression.report.render import table as markdown

TOKENS = 2**22
"""Of an iteration where nobody gives --global-batch-size."""
_FLAGS = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--expert-model-parallel-size": "expert",
    "--micro-batch-size": "micro_batch",
    "--recompute-granularity": "recompute",
}
"""Megatron's flag -> what it fixes of a layout that is searched."""


def make_parser() -> argparse.ArgumentParser:
    """The adviser's own options."""
    parser = OneLineParser(
        prog="python -m megatron.compression.advise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"one of {', '.join(shapes.PRESETS)}")
    add("--gpus", type=int, default=8)
    add("--gpus-per-node", type=int, default=8)
    link = "a link of the calibration, or GB/s that a GPU sends, with microseconds of latency behind a colon"
    add("--intra", default="nvlink", metavar="LINK", help=f"inside a node: {link}")
    add(
        "--inter", default="50:10", metavar="LINK", help="between nodes, a GPU's share of its node's adapters"
    )
    add("--gemm-tflops", type=float, help="compute rate: what the products of a layer achieve on one GPU")
    add("--memory-gb", type=float, default=141.0, help="of one GPU")
    add("--calibration", type=Path, metavar="FILE", help="constants of --measure instead of an H200's")
    add("--measure", type=Path, metavar="FILE", help="measure the constants on this host's GPUs, and end")
    add("--json", type=Path, metavar="FILE", help="write everything here")
    add("--plot", type=Path, metavar="FILE", help="draw phases, gain against bandwidth and against GPUs")
    return parser


def link_of(text: str, flag: str, constants: Constants) -> Link:
    """A measured link by its name, or ``GB/s[:us]``.

    Raises: InputError: neither.
    """
    if text in constants.links:
        return constants.links[text]
    try:
        bandwidth, latency = map(float, (text if ":" in text else f"{text}:5").split(":"))
    except ValueError:
        names = ", ".join(constants.links)
        raise InputError(
            f"{flag} {text}: give one of {names}, or GB/s and microseconds such as 50:10"
        ) from None
    if not (0 < bandwidth < math.inf and 0 <= latency < math.inf):
        raise InputError(f"{flag} {text}: the bandwidth must be above 0 GB/s, the latency at least 0 us")
    return Link.of(bandwidth, latency)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options describe. Raises: InputError: an impossible one."""
    constants = Constants.load(options.calibration)
    for flag, value in (("--gemm-tflops", options.gemm_tflops), ("--memory-gb", options.memory_gb)):
        if value is not None and not 1e-3 <= value < math.inf:
            raise InputError(f"{flag} {value:g} must be a number from 0.001 on")
    if options.gemm_tflops:
        constants = replace(constants, gemm_tflops=options.gemm_tflops)
    return Cluster(
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        intra=link_of(options.intra, "--intra", constants),
        inter=link_of(options.inter, "--inter", constants),
        constants=constants,
        memory_gb=options.memory_gb,
    )


def what_runs(
    options: argparse.Namespace, words: Sequence[str], cluster: Cluster
) -> tuple[Model, Layout, CompressionConfig | None]:
    """Model, layout, and what the words compress (None: nothing).

    Raises: InputError: no model, an impossible layout, or none that fits.
    """
    if not options.model and not words:
        raise InputError("give --model NAME, or the flags of a launch script behind --")
    args = shapes.parse_megatron([*(shapes.preset(options.model) if options.model else ()), *words])
    model = shapes.model_of(args)
    if options.model and not args.global_batch_size:
        args.global_batch_size = max(TOKENS // model.sequence, cluster.gpus)
    layout = shapes.layout_of(args, cluster.gpus)
    if options.model:
        given = {word.split("=")[0] for word in words}
        layout = fastest(model, layout, cluster, {name for flag, name in _FLAGS.items() if flag not in given})
    layout.check(model)
    if not fits(model, layout, cluster):
        raise InputError(
            f"does not fit: {memory.gigabytes(model, layout):.0f} GB a GPU, and {100 * USABLE:.0f} % of "
            f"--memory-gb {cluster.memory_gb:g} can be used; take more GPUs, or --recompute-granularity full"
        )
    config = config_of(args, layout)
    models_other = config.caat_net.enabled or config.tensor_parallel.halves
    return model, layout, config if config.enabled or models_other else None  # these are refused by name


def table(rows: list[Advice]) -> str:
    """Markdown: milliseconds by phase, speed-up, memory, loss."""
    phases = [
        name for name in rows[0].prediction.phases if any(r.prediction.phases[name] >= 0.05 for r in rows)
    ]
    lines = [["setting", "ms", "times as fast", *phases, "hidden", "GB", "loss"]]
    for row in rows:
        found = row.prediction
        cells = [row.flags or "uncompressed", f"{found.milliseconds:.1f}", f"{row.speed_up:.2f}"]
        cells += [f"{found.phases[name]:.1f}" for name in phases]
        loss = "" if row.loss is None else f"+{row.loss:g} %"
        lines.append([*cells, f"{sum(found.hidden.values()):.1f}", f"{found.memory_gb:.0f}", loss])
    return "\n".join(markdown(*lines))


def report(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Print the table; write what was asked for."""
    from megatron.compression.advise import plots

    if options.plot:
        plots.check_file(options.plot)
    if options.json:
        require_folder(options.json, "--json")
    cluster = cluster_of(options)
    model, layout, config = what_runs(options, words, cluster)
    settings, fastest = recommended(model, layout, cluster)
    rows = advise(model, layout, cluster, settings)
    if config is not None:
        own = predict(model, layout, cluster, config)
        rows.append(Advice("as given", None, own, rows[0].prediction.milliseconds / own.milliseconds))
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "DP": layout.data,
        "CP": layout.context,
        "EP": layout.expert,
    }
    shown = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"
    print(
        f"{model.parameters / 1e9:.1f} B parameters on {cluster.gpus} GPUs: {shown}, {layout.micro_batches} "
        f"micro-batches of {layout.micro_batch} x {model.sequence} tokens, recomputation {layout.recompute}\n"
    )
    print(table(rows))
    if any(row.prediction.phases["host"] >= 0.05 for row in rows):
        print(
            f"\nhost: what the GPU waits for launches, at {cluster.constants.host_layer_ms:g} ms for a layer "
            "of a micro-batch; larger micro-batches need fewer, and --measure times your host"
        )
    curves = plots.sweeps(model, layout, cluster, fastest) if options.json or options.plot else {}
    if options.json:
        found = [dataclasses.asdict(row) | {"milliseconds": row.prediction.milliseconds} for row in rows]
        data = {"model": dataclasses.asdict(model), "layout": dataclasses.asdict(layout), "settings": found}
        options.json.write_text(json.dumps(data | {"gains": curves}, indent=1) + "\n")
    if options.plot:
        plots.draw(rows, curves, options.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 for bad input, which is one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    try:
        options = make_parser().parse_args(words[:place])
        if options.measure:
            from megatron.compression.advise import calibrate

            return calibrate.measure(options.measure)
        report(options, words[place + 1 :])
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
