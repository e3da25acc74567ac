"""Compression in CUDA graphs: what a graph may hold, and a whole iteration's captured again.

A replay sends what its capture sent, so decisions are made before a capture. Graphs of a whole iteration
(``--cuda-graph-impl full_iteration``) are captured again when they change; those of layers (``local``,
``transformer_engine``) cannot be, and what would change after their capture is refused.
"""

from argparse import Namespace
from collections.abc import Callable, Hashable
from typing import Any

import torch

from megatron.compression.communication.site import Run
from megatron.compression.errors import CompressionConfigError
from megatron.compression.patches import loop

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


def follow(args: Namespace, run: Run, say: Callable[[str], None]) -> None:
    """Have a run's graphs follow what is decided and measured; ``say`` prints a line, on every rank."""
    if args.cuda_graph_impl != "none":
        run.policy.meter.also_first = True
    if whole_iterations(args):
        loop.around_whole_iterations(WholeIterations(run, say).one_pass)


class WholeIterations:
    """Wraps ``FullCudaGraphWrapper``: captures anew where decisions have changed, and measures."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._known: dict[str, Hashable] = {}

    def one_pass(self, run_pass: Callable[..., Any], wrapper: Any, **arguments: Any) -> Any:
        """One pass, or one replay, by megatron-core's wrapper; the same on all ranks."""
        stage = "validation" if arguments["forward_only"] else "training"
        policy, passes, warm_up = (
            self._run.policy,
            wrapper.curr_iteration,
            wrapper.cuda_graph_warmup_steps,
        )
        # One at least runs without a graph: what is sent for the first time sets up its kernels.
        first = min(0, warm_up - 1)
        if stage not in self._known:
            passes[stage] += first
        given = arguments["num_microbatches"], arguments.get("force_all_reduce")
        now = {stage: given, "decisions": policy.circumstances()}
        changed = any(self._known.get(name, one) != one for name, one in now.items())
        self._known |= now
        if changed:
            reset(wrapper)
            passes.update(dict.fromkeys(passes, first))
            begun = f"from iteration {policy.iteration() + 1} on {stage} sends otherwise"
            self._say(f"compression: {begun}: CUDA graphs are captured again")
        elif (
            stage == "training"
            and policy.meter.bound
            and policy.meter.ends_interval(policy.iteration())
        ):
            done = {name: min(number, warm_up) for name, number in passes.items()}
            reset(wrapper)  # their memory is that of the iteration which measures
            passes.update(
                done | {stage: min(done[stage], warm_up - 1)}
            )  # neither captures nor replays
        return run_pass(wrapper, **arguments)


def reset(wrapper: Any) -> None:
    """Free the graphs of a ``FullCudaGraphWrapper``, those of training and of validation: they share a pool
    of memory, which is free when none has it. The next passes begin anew with their warm-up steps."""
    from megatron.core import full_cuda_graph  # settings are read without megatron-core, too

    torch.cuda.synchronize()  # the last replay
    wrapper.reset_cuda_graph()
    # torch does not capture into a pool that no graph has and in which a tensor still lies.
    full_cuda_graph._shared_graph_pool = None
