"""Times a run's messages with each dimension's candidates, and decides: in about ``timing.LIMIT`` seconds.

All ranks come to the same: everything follows from values that are the largest over all ranks.
"""

import math
from argparse import Namespace
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.auto import candidates
from megatron.compression.auto.candidates import Candidate
from megatron.compression.auto.decision import LEAST_GAIN, TRIED, Choice, Decision, choose
from megatron.compression.auto.messages import activations, workload
from megatron.compression.auto.predict import Message, iteration_seconds
from megatron.compression.auto.timing import LIMIT, Sender, Stopwatch, gemm_rate
from megatron.compression.codecs.registry import settings_of
from megatron.compression.compression import Compression
from megatron.compression.config import ACTIVATIONS, CompressionConfig
from megatron.compression.context_parallel import hooks as context_parallel
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel import hooks as expert_parallel
from megatron.compression.tensor_parallel import hooks as tensor_parallel

_LAYERS: dict[str, Any] = {
    "tensor_parallel": tensor_parallel,
    "expert_parallel": expert_parallel,
    "context_parallel": context_parallel,
}
"""The hooks of dimensions whose layers send by themselves: they may be of a kind that is not covered."""


class Measurement:
    """One measurement of a run. Collective over all ranks.

    Args:
        args: Megatron's, validated.
        flops: of an iteration over all ranks.
        chunks: of this rank's pipeline stage.
    """

    def __init__(
        self, args: Namespace, compression: Compression, flops: float, chunks: list[torch.nn.Module]
    ) -> None:
        self.args, self.config, self.watch = args, compression.config, Stopwatch()
        self._transports = compression.run.transports
        self.lines: list[str] = []
        """For the log: how payloads of layers travel."""
        hooks = {name: module.why_not_attachable(chunks) for name, module in _LAYERS.items()}
        if getattr(args, "tp_comm_overlap", False):
            hooks["tensor_parallel"] = "--tp-comm-overlap sends past NCCL"
        self._not_attachable = {name: of_any_rank(reason) for name, reason in hooks.items()}
        (parameters,) = self.watch.largest(_replicated(chunks))
        tokens, samples, channels = activations(args)
        columns = args.ffn_hidden_size // args.tensor_model_parallel_size
        rate = gemm_rate(self.watch, tokens * samples, columns, channels, args.params_dtype)
        self.work = workload(args, int(parameters), flops, rate)
        sharded, topology = args.use_distributed_optimizer, compression.gradients.topology
        self._sender = Sender(self._transports, topology, sharded, self.watch.device)
        self._times: dict[Message, float] = {}

    def decide(self, budget: float) -> Decision:
        """Time everything and choose.

        Args:
            budget: percent of loss, over all dimensions.
        """
        for message in self.work.messages:
            self._times[message] = self.watch.seconds(self._sender.sends(message))
        whole = iteration_seconds(self.work.computation, self.work.messages, self._times)
        used = [name for name in candidates.CANDIDATES if self._messages(name) or self._unseen(name)]
        plans: dict[str, dict[Candidate, dict]] = {}
        why: dict[str, str] = {}
        for dimension in used:
            if dimension in self.config.auto:
                plans[dimension], why[dimension] = self._plan(dimension, whole, budget)
        gains = self._gains(plans, whole)
        untimed = {dimension: len(plan) - len(gains[dimension]) for dimension, plan in plans.items()}
        chosen = choose(gains, budget)
        choices = []
        for dimension in used:
            name, settings, gain, loss = "none", None, 0.0, 0.0
            if dimension not in self.config.auto:
                specs = [spec for spec in getattr(self.config, dimension).specs if spec]
                name, reason = ", back ".join(specs), "its own flag says so"
            elif dimension in chosen:
                one = chosen[dimension]
                name, settings, loss = one.name, dict(one.settings), one.loss
                gain, reason = gains[dimension][one], f"gains most within the budget; loss: {one.source}"
            else:
                reason = why[dimension] or _not_taken(gains[dimension])
            if untimed.get(dimension):
                reason += f"; {untimed[dimension]} more not timed: no time was left of the {LIMIT:g} s"
            choices.append(Choice(dimension, self._link(dimension), settings, name, gain, loss, reason))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        computation = self.work.computation
        return Decision(tuple(choices), budget, 1e3 * whole, 1e3 * computation, self.watch.elapsed())

    def _messages(self, dimension: str) -> list[Message]:
        return [message for message in self.work.messages if message.dimension == dimension]

    def _unseen(self, dimension: str) -> bool:
        """Whether a dimension is in use, but sends in a way that cannot be timed."""
        ways = ("expert_parallel", "context_parallel")
        return dimension in ways and ACTIVATIONS[dimension](self.args) > 1

    def _plan(self, dimension: str, whole: float, budget: float) -> tuple[dict[Candidate, dict], str]:
        """The candidates to be timed, each with its rules; or why there are none."""
        messages = self._messages(dimension)
        if not messages:
            possible, reason = self._possible(dimension, math.inf)
            return {}, "no layer sends any" if possible else reason
        exposed = sum(message.exposed(self._times[message]) for message in messages)
        if exposed < LEAST_GAIN * whole:
            return {}, f"its messages hold up an iteration by {100 * exposed / whole:.1f} % only"
        allowed, reason = self._possible(dimension, budget)
        if allowed and dimension in _LAYERS:
            self.lines += self._sender.prepare(messages, any(not one.exact for one in allowed))
        return allowed, "" if allowed else reason

    def _gains(
        self, plans: dict[str, dict[Candidate, dict]], whole: float
    ) -> dict[str, dict[Candidate, float]]:
        """The part of an iteration that each candidate saves, by dimension.

        The first of every dimension is timed, so that none goes uncompressed because another one's messages
        are slow or its kernels cold; then the second ones and so on, as long as the longest so far would fit
        into the limit.
        """
        gains: dict[str, dict[Candidate, float]] = {dimension: {} for dimension in plans}
        rounds = zip_longest(*([(name, *one) for one in plan.items()] for name, plan in plans.items()))
        now, longest = self.watch.elapsed(), 0.0
        for dimension, candidate, rules in filter(None, chain.from_iterable(rounds)):
            if gains[dimension] and now + longest > LIMIT:
                continue
            saved = 0.0
            for message in self._messages(dimension):
                rule = rules[message.traffic]
                if rule.codec is not None:
                    seconds = self.watch.seconds(self._sender.sends(message, rule))
                    saved += message.exposed(self._times[message]) - message.exposed(seconds)
            gains[dimension][candidate] = saved / whole
            began, now = now, self.watch.elapsed()
            longest = max(longest, now - began)
        return gains

    def _possible(self, dimension: str, budget: float) -> tuple[dict[Candidate, dict], str]:
        """The candidates that go with this run, each with its rules; or why there are none."""
        if reason := self._not_attachable.get(dimension):
            return {}, f"not possible: {reason}"
        found, reason = {}, "no candidate is within the budget"
        for candidate in candidates.within(budget, dimension):
            try:
                found[candidate] = dimension_config(dimension, dict(candidate.settings), self.args).rules(0)
            except CompressionConfigError as error:
                reason = f"not possible: {error}"
        return found, reason

    def _link(self, dimension: str) -> str:
        if not self._messages(dimension):
            return "not timed"
        message = max(self._messages(dimension), key=lambda one: one.exposed(self._times[one]))
        return self._sender.describe(message, self._times[message])


def _replicated(chunks: list[torch.nn.Module]) -> int:
    """Parameters of this rank that data parallelism sends: experts may have no replica."""
    experts = parallel_state.get_expert_data_parallel_world_size() > 1
    every = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    return sum(p.numel() for p in every if experts or getattr(p, "allreduce", True))


def dimension_config(dimension: str, settings: dict[str, Any], args: Namespace) -> Any:
    """A dimension's config with a candidate's settings.

    Raises: CompressionConfigError: they do not go with this run.
    """
    kind: Any = settings_of(CompressionConfig)[dimension].type
    config = kind(**settings)
    if dimension == "data_parallel":
        config = config.resolved(args)
    config.check(args)
    return config


def decided_config(config: CompressionConfig, decision: Decision, args: Namespace) -> CompressionConfig:
    """``config`` with what was left open.

    Raises: CompressionConfigError: a setting that does not go with this run.
    """
    decided = decision.settings().items()
    return replace(
        config, **{dimension: dimension_config(dimension, one, args) for dimension, one in decided}
    )


def _not_taken(gains: dict[Candidate, float]) -> str:
    """Why a dimension whose candidates were timed has none."""
    best = max(gains, key=lambda one: gains[one])
    percent = 100 * gains[best]
    if gains[best] < TRIED:
        gain = f"gain {percent:.1f} %, under {100 * TRIED:g} %" if percent > 0 else f"cost {-percent:.1f} %"
        return f"{best.name}, the best here, would {gain} of an iteration"
    return (
        f"{best.name} would gain {100 * gains[best]:.1f} % for +{best.loss:.3g} % of loss, but the budget is "
        "spent; raise --compression-loss-budget"
    )


def of_any_rank(reason: str | None) -> str | None:
    """The first rank's reason, where any has one."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, reason)
    return next((one for one in found if one), None)
