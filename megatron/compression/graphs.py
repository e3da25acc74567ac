"""Compression in CUDA graphs: what a graph may hold, and a whole iteration's captured again.

A replay sends what its capture sent, so decisions are made before a capture. Graphs of a whole
iteration (``--cuda-graph-impl full_iteration``) are captured again when they change; those of
layers (``local``, ``transformer_engine``) cannot be, and what would change after their capture is
refused.
"""

from argparse import Namespace
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megatron.compression.communication.site import Run
from megatron.compression.errors import CompressionConfigError, SettingError, argument
from megatron.compression.patches import loop, running

if TYPE_CHECKING:
    from megatron.compression.session import Session

_IMPL = argument("cuda_graph_impl")


def whole_iterations(args: Namespace) -> bool:
    """Return whether a graph holds an iteration's forward and backward passes and the reduction of
    gradients."""
    return args.cuda_graph_impl == "full_iteration"


def by_layer(args: Namespace) -> bool:
    """Return whether graphs hold layers, or parts of them."""
    return args.cuda_graph_impl in ("local", "transformer_engine")


def _modules(args: Namespace) -> set[str]:
    """Return the names of the modules that graphs of layers hold; empty: whole layers."""
    # Modules are enum members, or names.
    return {getattr(module, "name", module) for module in args.cuda_graph_modules or ()}


def _holds_experts(args: Namespace) -> bool:
    """Return whether a graph holds the exchange of experts' tokens."""
    if whole_iterations(args):
        return True
    modules = _modules(args)
    return by_layer(args) and (not modules or "moe" in modules)


def held_by_layers(args: Namespace) -> set[str]:
    """Return the dimensions whose messages graphs of layers hold."""
    dimensions = {"tensor_parallel", "context_parallel"}
    if _holds_experts(args):
        dimensions.add("expert_parallel")
    return dimensions


def refuse_host_splits(args: Namespace, name: str) -> None:
    """Refuse a graph that would hold an exchange of as many tokens as the router decides.

    Args:
        args: Megatron's.
        name: a reference to the setting that compresses the exchange.

    Raises:
        SettingError: the sizes of a captured exchange are read by the host.
    """
    pads = argument("moe_pad_expert_input_to_capacity")
    if not _holds_experts(args) or args.moe_pad_expert_input_to_capacity:
        return
    fix = f"give {pads}"
    if not whole_iterations(args):
        fix += f", or {argument('cuda_graph_modules')} without moe"
    raise SettingError(
        "args.cuda_graph_impl",
        args.cuda_graph_impl,
        "captures the exchange of experts' tokens, whose sizes the host reads",
        f"{fix}, or drop {name}",
    )


def refuse_host_counts(args: Namespace, name: str) -> None:
    """Refuse a graph of moe_preprocess that would hold a count which alltoall reads on the host.

    The flex dispatcher reads none there. megatron-core stops alltoall in the first forward, by an
    assertion that names no setting.

    Args:
        args: Megatron's.
        name: a reference to the setting that compresses tokens, and so needs alltoall.

    Raises:
        SettingError: how many tokens a rank sends is known on the device alone.
    """
    if not by_layer(args) or "moe_preprocess" not in _modules(args):
        return
    if args.moe_token_dispatcher_type == "allgather":
        return
    # Without these a rank sends --moe-router-topk times its tokens.
    changing = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    if not args.moe_pad_expert_input_to_capacity:
        changing += ("moe_expert_capacity_factor",)
    for setting_name in changing:
        if getattr(args, setting_name, None):
            raise SettingError(
                "args.cuda_graph_modules",
                "moe_preprocess",
                f"captures how many tokens a rank sends, which alltoall reads on the host with "
                f"{argument(setting_name)}",
                f"drop one of the two, or {name}",
            )


def refuse_by_layer(args: Namespace, name: str, reason: str) -> None:
    """Refuse a setting that graphs of layers cannot have.

    Args:
        args: Megatron's.
        name: a reference to the setting, with its value where that matters.
        reason: what the setting does, as a sentence that goes on from its name.

    Raises:
        CompressionConfigError: graphs hold layers.
    """
    if by_layer(args):
        raise CompressionConfigError(
            f"{name} {reason}, past the graphs of {_IMPL} {args.cuda_graph_impl}; use "
            f"full_iteration or drop {name}"
        )


def refuse_later_decisions(args: Namespace, config: Any) -> None:
    """Refuse what graphs would not follow, since they are captured before it is decided.

    Args:
        args: Megatron's.
        config: the ``CompressionConfig``.

    Raises:
        SettingError: a setting that changes after the capture what is sent.
    """
    if whole_iterations(args) and config.error_bound and args.log_interval == 1:
        interval = argument("log_interval")
        raise SettingError(
            "error_bound",
            None,
            f"with {interval} 1 measures in every iteration, past the graph of {_IMPL} "
            "full_iteration",
            f"raise {interval}, or drop the bound",
        )
    if not _layers_compress(args, config):
        return
    # The policy's iteration when layers are captured: Transformer Engine captures before an
    # iteration.
    captured_at = 1
    if args.cuda_graph_impl == "transformer_engine":
        captured_at = max(args.cuda_graph_warmup_steps, 1)
    start = config.start_iteration or 0
    if start >= captured_at:
        _refuse_after_capture(args, "start_iteration", start, "begins after the capture")
    if config.error_bound:
        _refuse_after_capture(args, "error_bound", None, "decides after the capture")
    if config.validate_uncompressed and args.cuda_graph_impl == "local":
        reason = "sends otherwise in evaluation, which replays training's graphs"
        _refuse_after_capture(args, "validate_uncompressed", None, reason)


def _layers_compress(args: Namespace, config: Any) -> bool:
    """Return whether graphs of layers hold messages that are compressed, or may be."""
    if not by_layer(args):
        return False
    for name in held_by_layers(args):
        dimension = getattr(config, name)
        if dimension.ranks(args) > 1 and (dimension.enabled or name in config.auto):
            return True
    return False


def _refuse_after_capture(args: Namespace, path: str, value: object, reason: str) -> NoReturn:
    raise SettingError(
        path,
        value,
        f"{reason}, and a layer is captured once with {_IMPL} {args.cuda_graph_impl}",
        f"drop one of the two, or use {_IMPL} full_iteration",
    )


def lines(args: Namespace, config: Any) -> list[str]:
    """Return for the log what a graph changes in what a run measures.

    Args:
        args: Megatron's.
        config: the ``CompressionConfig``.
    """
    if args.cuda_graph_impl == "none" or not config.enabled:
        return []
    if config.error_bound is not None:
        return [
            "the last iteration of each log interval runs without its CUDA graph, to measure "
            f"errors, and a graph is captured after it (--log-interval {args.log_interval})"
        ]
    if config.report:
        return [
            "what a CUDA graph sends is measured in its first iteration alone, which runs without "
            "it"
        ]
    return []


def follow(session: "Session") -> "WholeIterations | None":
    """Have a run's CUDA graphs follow what is decided and measured.

    Returns:
        What follows graphs of whole iterations; None: the run has none.

    Raises:
        SettingError: another open session has graphs of whole iterations. megatron-core keeps them
            on its class, so the two would replay each other's.
    """
    args = session.host.arguments
    if args.cuda_graph_impl != "none":
        # A replay measures nothing, so the first pass, which runs without a graph, is measured as
        # well.
        session.run.policy.meter.also_first = True
    if not whole_iterations(args):
        return None
    # FullCudaGraphWrapper keeps its graphs, results and pool in attributes of the class.
    for run in running.open_runs():
        if run is not session.run and getattr(run.session, "whole_iterations", None) is not None:
            raise SettingError(
                "args.cuda_graph_impl",
                "full_iteration",
                "is in use by another model of this process, and megatron-core keeps one set of "
                "graphs",
                f"use {_IMPL} local or none for one of the two",
            )
    loop.around_whole_iterations()
    return WholeIterations(session.run, session.host.log)


class WholeIterations:
    """Stands for the passes of a ``FullCudaGraphWrapper``: captures anew where decisions have
    changed, and measures.

    Args:
        run: the run whose decisions graphs hold.
        log: prints a line; called on every rank.
    """

    def __init__(self, run: Run, log: Callable[[str], None]) -> None:
        self._run = run
        self._log = log
        self._known: dict[str, Hashable] = {}
        """What the graphs were captured with: by stage the size of its passes; the policy's
        circumstances."""

    def one_pass(self, run_pass: Callable[..., Any], wrapper: Any, **arguments: Any) -> Any:
        """Run, capture or replay one pass by megatron-core's wrapper; the same on all ranks.

        Args:
            run_pass: megatron-core's own method.
            wrapper: the ``FullCudaGraphWrapper``. It counts passes by stage in ``curr_iteration``;
                the one with the number of its warm-up steps is captured, and those after it are
                replayed.
            arguments: the pass's.
        """
        stage = "validation" if arguments["forward_only"] else "training"
        policy = self._run.policy
        passes = wrapper.curr_iteration
        warm_up = wrapper.cuda_graph_warmup_steps
        # One pass at least runs without a graph: what is sent for the first time sets up its
        # kernels.
        first = min(0, warm_up - 1)
        if stage not in self._known:
            passes[stage] += first
        # What a graph was captured for: more micro-batches (batch-size ramp-up), or gradients that
        # are reduced in full to be saved, are another sequence of operations.
        size = arguments["num_microbatches"], arguments.get("force_all_reduce")
        now = {stage: size, "decisions": policy.circumstances()}
        # A stage that is met for the first time is no change; the policy's circumstances are of all
        # stages.
        changed = any(self._known.get(name, value) != value for name, value in now.items())
        self._known |= now
        if changed:
            # One pass without a graph sets up what is sent for the first time. The warm-up steps
            # that Megatron asks for are those of a process: whatever is left of them still runs.
            begun = {name: min(number, warm_up - 1) for name, number in passes.items()}
            reset(wrapper)
            passes.update(begun)
            self._log(
                f"compression changes at iteration {policy.iteration() + 1} ({stage}): capturing "
                "CUDA graphs again"
            )
        elif (
            stage == "training"
            and policy.meter.bound
            and policy.meter.ends_interval(policy.iteration())
        ):
            # This pass measures, so it neither captures nor replays; its memory is that of the
            # graphs.
            done = {name: min(number, warm_up) for name, number in passes.items()}
            reset(wrapper)
            passes.update(done)
            passes[stage] = min(done[stage], warm_up - 1)
        return run_pass(wrapper, **arguments)


def reset(wrapper: Any) -> None:
    """Free the graphs of a ``FullCudaGraphWrapper``, those of training and of validation.

    They share a pool of memory, which is free when none has it. megatron-core counts the next
    passes from 0, as if none had warmed up.
    """
    from megatron.core import full_cuda_graph  # settings are read without megatron-core, too

    torch.cuda.synchronize()  # a graph must not be freed while its last replay runs
    wrapper.reset_cuda_graph()
    # torch does not capture into a pool that no graph has and in which a tensor still lies.
    full_cuda_graph._shared_graph_pool = None
