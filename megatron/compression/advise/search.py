"""Layouts that fit, the fastest first."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from megatron.compression.advise import memory
from megatron.compression.advise.cluster import Cluster
from megatron.compression.advise.phases import predict
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.errors import InputError

USABLE = 0.92
"""Of a GPU's memory: the rest is torch's, NCCL's and CUDA's own."""
SEARCHED = ("tensor", "pipeline", "expert", "micro_batch", "recompute")
"""What of a layout is tried; data parallelism takes the GPUs that are left."""


def fits(model: Model, layout: Layout, cluster: Cluster) -> bool:
    """Whether the estimate leaves room."""
    return memory.gigabytes(model, layout) <= USABLE * cluster.memory_gb


def layouts(model: Model, start: Layout, cluster: Cluster, free: Collection[str]) -> Iterator[Layout]:
    """Every layout of the cluster's GPUs that Megatron would run: ``start``, its ``free`` fields changed."""
    powers = [2**power for power in range(15)]
    tried = {
        "tensor": [size for size in powers if size <= cluster.gpus_per_node],
        "pipeline": [size for size in range(1, model.layers + 1) if model.layers % size == 0],
        "expert": [size for size in powers if model.experts and model.experts % size == 0] or [1],
        "micro_batch": [1, 2, 4, 8],
        "recompute": ["none", "full"],
    }
    options = [replace(start)]
    for name in SEARCHED:
        if name in free:
            options = [replace(one, **{name: value}) for one in options for value in tried[name]]
    for one in options:
        ranks = one.tensor * one.pipeline * one.context
        if cluster.gpus % ranks:
            continue
        parallel = one.tensor > 1 and ("tensor" in free or one.sequence_parallel)
        layout = replace(one, data=cluster.gpus // ranks, sequence_parallel=parallel)
        try:
            layout.check(model)
        except InputError:
            continue
        yield layout


def fastest(model: Model, start: Layout, cluster: Cluster, free: Collection[str]) -> Layout:
    """The layout of the shortest uncompressed iteration among those that fit.

    Raises: InputError: none does.
    """
    possible = list(layouts(model, start, cluster, free))
    if not possible:
        raise InputError(
            f"no layout of {cluster.gpus} GPUs divides this model and a global batch of {start.global_batch};"
            " give --global-batch-size behind --"
        )
    fitting = [layout for layout in possible if fits(model, layout, cluster)]
    if not fitting:
        least = min(memory.gigabytes(model, layout) for layout in possible)
        raise InputError(
            f"no layout fits: the smallest takes {least:.0f} GB a GPU, of --memory-gb {cluster.memory_gb:g} "
            f"{100 * USABLE:.0f} % can be used; add --gpus"
        )
    return min(fitting, key=lambda layout: predict(model, layout, cluster).milliseconds)
