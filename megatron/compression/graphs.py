"""Compression in CUDA graphs: what a graph may hold, and a whole iteration's captured again.

A replay sends what its capture sent, so decisions are made before a capture. Graphs of a whole iteration
(``--cuda-graph-impl full_iteration``) are captured again when they change; those of layers (``local``,
``transformer_engine``) cannot be, and what would change after their capture is refused.
"""

from argparse import Namespace
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from megatron.compression.communication.site import Run
from megatron.compression.errors import CompressionConfigError
from megatron.compression.patches import loop, running

if TYPE_CHECKING:
    from megatron.compression.session import Session

FULL = "--cuda-graph-impl full_iteration"


def whole_iterations(args: Namespace) -> bool:
    """Whether a graph holds an iteration's forward and backward passes and the reduction of gradients."""
    return args.cuda_graph_impl == "full_iteration"


def by_layer(args: Namespace) -> bool:
    """Whether graphs hold layers, or parts of them."""
    return args.cuda_graph_impl in ("local", "transformer_engine")


def _holds_experts(args: Namespace) -> bool:
    """Whether a graph holds the exchange of experts' tokens."""
    modules = {getattr(module, "name", module) for module in args.cuda_graph_modules or ()}
    return whole_iterations(args) or (by_layer(args) and (not modules or "moe" in modules))


def held_by_layers(args: Namespace) -> set[str]:
    """Dimensions whose messages graphs of layers hold."""
    return {"tensor_parallel", "context_parallel"} | (
        {"expert_parallel"} if _holds_experts(args) else set()
    )


def refuse_host_splits(args: Namespace, flag: str) -> None:
    """Raises: CompressionConfigError: a graph would hold an exchange of as many tokens as the router says."""
    if _holds_experts(args) and not args.moe_pad_expert_input_to_capacity:
        modules = "" if whole_iterations(args) else ", or --cuda-graph-modules without moe"
        raise CompressionConfigError(
            f"--cuda-graph-impl {args.cuda_graph_impl} captures the exchange of experts' tokens, whose "
            f"sizes the host reads; give --moe-pad-expert-input-to-capacity{modules}, or drop {flag}"
        )


def refuse_by_layer(args: Namespace, flag: str, reason: str) -> None:
    """Raises: CompressionConfigError: graphs hold layers, which ``flag`` cannot have for a reason."""
    if by_layer(args):
        raise CompressionConfigError(
            f"{flag} {reason}, past the graphs of --cuda-graph-impl {args.cuda_graph_impl}; use "
            f"full_iteration or drop {flag}"
        )


def refuse_later_decisions(args: Namespace, config: Any) -> None:
    """Raises: CompressionConfigError: a setting of the ``CompressionConfig`` that graphs of layers would not
    follow, since they are captured once."""
    if whole_iterations(args) and config.error_bound and args.log_interval == 1:
        raise CompressionConfigError(
            f"--compression-error-bound with --log-interval 1 measures in every iteration, past the graph of "
            f"{FULL}; raise --log-interval, or drop the bound"
        )
    parts = {name: getattr(config, name) for name in held_by_layers(args)} if by_layer(args) else {}
    if not any(
        one.ranks(args) > 1 and (one.enabled or name in config.auto) for name, one in parts.items()
    ):
        return
    # The iteration that is the policy's when layers are captured: Transformer Engine's before an iteration.
    eager = args.cuda_graph_warmup_steps if args.cuda_graph_impl == "transformer_engine" else 1
    start = config.start_iteration or 0
    fix = f"drop one of the two, or use {FULL}"
    for given, flag, reason in (
        (
            start >= max(eager, 1),
            f"--compression-start-iteration {start}",
            "begins after the capture",
        ),
        (config.error_bound, "--compression-error-bound", "decides after the capture"),
        (
            config.validate_uncompressed and args.cuda_graph_impl == "local",
            "--validate-uncompressed",
            "sends otherwise in evaluation, which replays training's graphs",
        ),
    ):
        if given:
            raise CompressionConfigError(
                f"{flag} {reason}, and a layer is captured once with --cuda-graph-impl "
                f"{args.cuda_graph_impl}; {fix}"
            )


def lines(args: Namespace, config: Any) -> list[str]:
    """For the log: what a graph changes in what a run with this ``CompressionConfig`` measures."""
    if args.cuda_graph_impl == "none" or not config.enabled:
        return []
    if config.error_bound is not None:
        often = (
            "the last iteration of each log interval runs without its CUDA graph, to measure errors"
        )
        return [f"{often}, and a graph is captured after it (--log-interval {args.log_interval})"]
    report = (
        "what a CUDA graph sends is measured in its first iteration alone, which runs without it"
    )
    return [report] if config.report else []


def follow(session: "Session") -> "WholeIterations | None":
    """Have a run's CUDA graphs follow what is decided and measured.

    Returns:
        What follows graphs of whole iterations; None: the run has none.

    Raises:
        CompressionConfigError: another open session has graphs of whole iterations. megatron-core keeps them
            on its class, so the two would replay each other's.
    """
    args = session.host.arguments
    if args.cuda_graph_impl != "none":
        session.run.policy.meter.also_first = True
    if not whole_iterations(args):
        return None
    for run in running.open_runs():
        if run is not session.run and getattr(run.session, "whole_iterations", None) is not None:
            raise CompressionConfigError(
                f"{FULL} is in use by another model of this process, and megatron-core keeps one set of "
                "graphs; use --cuda-graph-impl local or none for one of the two"
            )
    loop.around_whole_iterations()
    return WholeIterations(session.run, session.host.log)


class WholeIterations:
    """Stands for the passes of a ``FullCudaGraphWrapper``: captures anew where decisions have changed, and
    measures.

    Args:
        run: the run whose decisions graphs hold.
        log: prints a line; called on every rank.
    """

    def __init__(self, run: Run, log: Callable[[str], None]) -> None:
        self._run = run
        self._log = log
        self._known: dict[str, Hashable] = {}
        """What the graphs were captured with: by stage the size of its passes; the policy's circumstances."""

    def one_pass(self, run_pass: Callable[..., Any], wrapper: Any, **arguments: Any) -> Any:
        """Run, capture or replay one pass by megatron-core's wrapper; the same on all ranks.

        Args:
            run_pass: megatron-core's own method.
            wrapper: the ``FullCudaGraphWrapper``. It counts passes by stage in ``curr_iteration``; the one
                with the number of its warm-up steps is captured, and those after it are replayed.
            arguments: the pass's.
        """
        stage = "validation" if arguments["forward_only"] else "training"
        policy = self._run.policy
        passes = wrapper.curr_iteration
        warm_up = wrapper.cuda_graph_warmup_steps
        # One pass at least runs without a graph: what is sent for the first time sets up its kernels.
        first = min(0, warm_up - 1)
        if stage not in self._known:
            passes[stage] += first
        size = arguments["num_microbatches"], arguments.get("force_all_reduce")
        now = {stage: size, "decisions": policy.circumstances()}
        changed = any(self._known.get(name, value) != value for name, value in now.items())
        self._known |= now
        if changed:
            reset(wrapper)
            for name in passes:
                passes[name] = first
            self._log(
                f"compression changes at iteration {policy.iteration() + 1} ({stage}): capturing CUDA graphs "
                "again"
            )
        elif (
            stage == "training"
            and policy.meter.bound
            and policy.meter.ends_interval(policy.iteration())
        ):
            # This pass measures, so it neither captures nor replays; its memory is that of the graphs.
            done = {name: min(number, warm_up) for name, number in passes.items()}
            reset(wrapper)
            passes.update(done)
            passes[stage] = min(done[stage], warm_up - 1)
        return run_pass(wrapper, **arguments)


def reset(wrapper: Any) -> None:
    """Free the graphs of a ``FullCudaGraphWrapper``, those of training and of validation: they share a pool
    of memory, which is free when none has it. The next passes begin anew with their warm-up steps."""
    from megatron.core import full_cuda_graph  # settings are read without megatron-core, too

    torch.cuda.synchronize()  # the last replay
    wrapper.reset_cuda_graph()
    # torch does not capture into a pool that no graph has and in which a tensor still lies.
    full_cuda_graph._shared_graph_pool = None
