"""One picture of a prediction: phases by setting, gain against bandwidth, gain against GPUs."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.compression.advise.cluster import Cluster
from megatron.compression.advise.phases import PHASES
from megatron.compression.advise.settings import Advice, Setting, advise
from megatron.compression.advise.shapes import Layout, Model, with_gpus
from megatron.compression.errors import InputError, require_extra, require_folder

FACTORS = [2.0**power for power in range(-5, 6)]
MOST_GPUS = 16384


def sweeps(
    model: Model, layout: Layout, cluster: Cluster, settings: list[Setting]
) -> dict[str, dict[str, list[list[float]]]]:
    """``bandwidth`` (GB/s of the slowest link in use) and ``gpus`` -> flags -> [[x, speed-up], ...].

    More GPUs are more data-parallel ranks, each with the same micro-batches.
    """
    results: dict[str, dict[str, list[list[float]]]] = {"bandwidth": {}, "gpus": {}}

    def add(sweep: str, x: float, rows: list[Advice]) -> None:
        for row in rows[1:]:
            results[sweep].setdefault(row.flags, []).append([x, row.speed_up])

    one_node = cluster.gpus <= cluster.gpus_per_node
    link = cluster.intra if one_node else cluster.inter
    for factor in FACTORS:
        scaled = link.faster(factor)
        faster = replace(cluster, intra=scaled) if one_node else replace(cluster, inter=scaled)
        add("bandwidth", link.bandwidth * factor / 1e6, advise(model, layout, faster, settings))
    for grown in _grown(model, layout, cluster):
        add("gpus", grown.gpus, advise(model, grown, replace(cluster, gpus=grown.gpus), settings))
    return results


def _grown(model: Model, layout: Layout, cluster: Cluster) -> Iterator[Layout]:
    """The layout on the cluster's GPUs, on twice as many and so on, in one node and in whole ones."""
    ranks, node = layout.tensor * layout.pipeline * layout.context, cluster.gpus_per_node
    counts = {cluster.gpus}
    for start in (ranks, math.lcm(ranks, node)):
        counts |= {start * 2**power for power in range(15)}
    for gpus in sorted(counts):
        if min(2, cluster.gpus) <= gpus <= MOST_GPUS and (gpus <= node or gpus % node == 0):
            grown = with_gpus(layout, gpus)
            try:
                grown.check(model)
            except InputError:
                continue
            yield grown


def check_file(path: Path) -> None:
    """Raises: InputError: no picture can be written there."""
    require_extra("matplotlib", "plots", "--plot")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.is_dir() or path.suffix.lower().removeprefix(".") not in known:
        raise InputError(f"--plot {path}: give a file that ends in one of .{', .'.join(sorted(known))}")
    require_folder(path, "--plot")


def draw(rows: list[Advice], curves: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    bars, bandwidth, gpus = figure.subplots(1, 3)
    names = [row.flags.replace("-compression", "").replace(" --", "\n--") or "uncompressed" for row in rows]
    bottom = [0.0] * len(rows)
    for phase in PHASES:
        heights = [row.prediction.phases[phase] for row in rows]
        if max(heights) > 0:
            bars.barh(names, heights, left=bottom, label=phase)
            bottom = [left + height for left, height in zip(bottom, heights, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="ms an iteration")
    for axes, name, label in (
        (bandwidth, "bandwidth", "GB/s a GPU, slowest link"),
        (gpus, "gpus", "GPUs, as many samples each"),
    ):
        for flags, points in curves[name].items():
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=flags.replace("-compression", ""))
        axes.axhline(1.0, color="0.6", linewidth=1)
        axes.set(xscale="log", xlabel=label, ylabel="times as fast as uncompressed")
    bars.legend(fontsize="x-small", loc="lower left", framealpha=0.9)
    if curves["bandwidth"]:
        bandwidth.legend(fontsize="x-small", loc="upper right", framealpha=0.6)
    figure.savefig(path, dpi=120)
