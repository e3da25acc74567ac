"""Recommends CUDA graphs where the GPU waits for the host."""

import copy
from argparse import Namespace

from megatron.compression.auto.host import HostWatch
from megatron.compression.auto.plan import LEAST_GAIN
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import CompressionConfigError

MOST_GAIN = 0.9
"""Part of an iteration that a recommendation promises at most: the times are of a few layers."""


def recommendation(watch: HostWatch, args: Namespace, config: CompressionConfig) -> str | None:
    """Return a line with the flags that a run lacks for CUDA graphs, and the gain that is to be
    expected; None: the GPU does not wait for the host, or that is not known.

    Args:
        watch: has ended.
        args: Megatron's arguments, of a run without graphs.
        config: the run's settings.
    """
    times = watch.times
    if times is None or not watch.iteration_seconds:
        return None
    # A graph launches everything at once, so the GPU waits for nothing between its kernels.
    saved = times.waited * layer_passes(watch, args) / watch.iteration_seconds
    if saved < LEAST_GAIN:
        return None
    text = (
        f"the GPU waits for the host: a layer takes {1e3 * times.host:.2g} ms to launch and "
        f"{1e3 * times.gpu:.2g} ms to run"
    )
    flags, reason = _graph_flags(args, config)
    if reason:
        return f"{text}; CUDA graphs, which would save it, are not possible: {reason}"
    speed_up = 1 / (1 - min(saved, MOST_GAIN))
    return (
        f"{text}; add {flags}, which launches an iteration at once: about {speed_up:.1f} times as "
        "fast by these times"
    )


def layer_passes(watch: HostWatch, args: Namespace) -> int:
    """Return how many times an iteration runs one of this stage's layers.

    Args:
        watch: knows the stage's layers.
        args: Megatron's arguments.
    """
    # Sequences of one micro-batch over all replicas; what is left is how many micro-batches follow.
    replicas = args.data_parallel_size * args.micro_batch_size
    return watch.layers * max(1, args.global_batch_size // replicas)


def _graph_flags(args: Namespace, config: CompressionConfig) -> tuple[str, str | None]:
    """Return the flags that a run lacks for CUDA graphs of whole iterations, and why it cannot have
    them, or None.

    Args:
        args: Megatron's arguments, of a run without graphs.
        config: the run's settings.
    """
    in_graphs = copy.copy(args)
    flags = []
    if in_graphs.transformer_impl != "local":
        in_graphs.transformer_impl = "local"
        flags.append("--transformer-impl local")
    in_graphs.cuda_graph_impl = "full_iteration"
    flags.append("--cuda-graph-impl full_iteration")
    # The check reads gradients on the host, which a graph of a whole iteration cannot hold.
    if getattr(in_graphs, "check_for_nan_in_loss_and_grad", True):
        in_graphs.check_for_nan_in_loss_and_grad = False
        flags.append("--no-check-for-nan-in-loss-and-grad")
    try:
        config.check(in_graphs)
    except CompressionConfigError as error:
        return "", str(error)
    return " ".join(flags), None
