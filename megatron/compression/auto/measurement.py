"""Times a run's own messages, uncompressed and through codecs, and decides: in about ``LIMIT``
seconds.

Everything is sent as training sends it. All ranks come to the same plan: it follows from values
that are the largest over all ranks.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.compression import graphs
from megatron.compression.auto.dispatchers import compare_dispatchers, may_leave_flex
from megatron.compression.auto.messages import MessageKind, Workload, activations, workload
from megatron.compression.auto.plan import (
    LEAST_GAIN,
    TRIED,
    DimensionPlan,
    RunPlan,
    choose,
    largest,
    within,
)
from megatron.compression.auto.sender import Sender, normal_values
from megatron.compression.auto.stopwatch import Stopwatch, first_reason
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.communication.policy import Rule
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.flex import switch_to_alltoall
from megatron.compression.session import Session

LIMIT = 10.0
"""Seconds after which no recipe is timed but the first of each dimension."""


@dataclass
class Candidates:
    """The recipes of one dimension that are to be timed."""

    rules: dict[Recipe, dict[str, Rule]] = field(default_factory=dict)
    """Rules by traffic class, of each recipe."""
    reason: str = ""
    """Why there are none."""


class Measurement:
    """One measurement of a run. Collective over all ranks; ``of_run`` makes it.

    Args:
        args: Megatron's arguments.
        config: the settings, with dimensions left open (``config.auto``).
        work: what an iteration computes and sends.
        sender: sends the messages that are timed.
        watch: times them.
        not_attachable: by dimension, why a model's layers cannot be compressed.
        cost_of_alltoall: seconds by which an iteration is longer with the alltoall dispatcher,
            uncompressed, than with the flex one that the model was built with.
    """

    def __init__(
        self,
        args: Namespace,
        config: CompressionConfig,
        work: Workload,
        sender: Sender,
        watch: Stopwatch,
        not_attachable: Mapping[str, str | None],
        cost_of_alltoall: float = 0.0,
    ) -> None:
        self.args = args
        self.config = config
        self.work = work
        self.watch = watch
        self.lines: list[str] = []
        """For the log: how payloads of layers travel, and what was timed otherwise than planned."""
        self._sender = sender
        self._not_attachable = not_attachable
        self._cost_of_alltoall = cost_of_alltoall
        self._times: dict[MessageKind, float] = {}
        """Seconds of each message by itself, uncompressed."""

    @classmethod
    def of_run(
        cls,
        args: Namespace,
        session: Session,
        flops: float,
        chunks: list[torch.nn.Module],
    ) -> "Measurement":
        """Return the measurement of a run that is about to begin.

        Args:
            args: Megatron's arguments.
            session: of the run; nothing is attached yet.
            flops: floating-point operations of an iteration over all ranks.
            chunks: the model chunks of this pipeline stage.
        """
        watch = Stopwatch()
        comparison = None
        if may_leave_flex(args, session.config):
            comparison = compare_dispatchers(args, chunks, watch)
            # What would be compressed are alltoall's messages.
            args = copy(args)
            switch_to_alltoall(args)
        not_attachable = {
            name: first_reason(dimension.refusal(chunks))
            for name, dimension in session.dimensions.items()
        }
        (parameters,) = largest(_reduced_parameters(chunks))
        work = workload(args, int(parameters), flops, _gemm_rate(args, watch))
        sender = Sender(
            session.run.transports,
            session.gradients.topology,
            args.use_distributed_optimizer,
            watch.device,
        )
        cost = 0.0
        if comparison is not None:
            cost = comparison.cost_of_alltoall(work)
        measurement = cls(args, session.config, work, sender, watch, not_attachable, cost)
        if comparison is not None:
            measurement.lines.append(session.host.names.resolve(comparison.describe()))
        return measurement

    def decide(self, budget: float) -> RunPlan:
        """Time everything and choose.

        Args:
            budget: percent of validation loss that may be spent, over all dimensions.
        """
        # Everything uncompressed first: gains are parts of that iteration. Every rank times the
        # same messages in the same order, since each timing is collective.
        for message in self.work.messages:
            self._times[message] = self._seconds(message)
        iteration = self.work.seconds(self._times) - self._cost_of_alltoall
        dimensions = [name for name in RECIPES if self._messages(name) or self._unseen(name)]
        candidates = {
            name: self._candidates(name, iteration, budget)
            for name in dimensions
            if name in self.config.auto
        }
        gains = self._gains(candidates, iteration)
        chosen = choose(gains, budget)
        plans = []
        for dimension in dimensions:
            recipe = chosen.get(dimension)
            if dimension not in candidates:
                plans.append(self._plan_of_flag(dimension, iteration))
            else:
                plan = self._plan(dimension, candidates[dimension], gains[dimension], recipe)
                plans.append(replace(plan, exposed=self._exposed(dimension) / iteration))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # training has other tensors
        self.lines += [
            f"timed eager, not in a CUDA graph: {reason}"
            for reason in sorted(self.watch.not_captured)
        ]
        return RunPlan(
            dimensions=tuple(plans),
            budget=budget,
            iteration_ms=1e3 * iteration,
            computation_ms=1e3 * self.work.computation,
            seconds=self.watch.elapsed(),
        )

    def _plan_of_flag(self, dimension: str, iteration: float) -> DimensionPlan:
        """Return the plan of a dimension that its own flag decides.

        Args:
            dimension: its name.
            iteration: seconds of an uncompressed iteration.
        """
        specs = [spec for spec in getattr(self.config, dimension).specs if spec]
        return DimensionPlan(
            dimension=dimension,
            link=self._link(dimension),
            chosen=False,
            name=", back ".join(specs),
            gain=0.0,
            loss=0.0,
            reason="its own flag says so",
            exposed=self._exposed(dimension) / iteration,
        )

    def _plan(
        self,
        dimension: str,
        candidates: Candidates,
        gains: dict[Recipe, float],
        chosen: Recipe | None,
    ) -> DimensionPlan:
        """Return the plan of a dimension whose candidates were timed.

        Args:
            dimension: its name.
            candidates: what was to be timed, or why nothing was.
            gains: the part of an iteration that each timed recipe saves.
            chosen: the recipe; None: uncompressed.
        """
        # Uncompressed, unless a recipe was chosen.
        name = "none"
        gain = 0.0
        loss = 0.0
        if chosen is not None:
            name = chosen.name
            gain = gains[chosen]
            loss = chosen.loss
            reason = f"gains most within the budget; loss: {chosen.source}"
        else:
            reason = candidates.reason or _not_chosen(gains)
        untimed = len(candidates.rules) - len(gains)
        if untimed:
            reason += f"; {untimed} more not timed: no time was left of the {LIMIT:g} s"
        link = self._link(dimension)
        return DimensionPlan(dimension, link, chosen is not None, name, gain, loss, reason)

    def _seconds(self, message: MessageKind, rule: Rule | None = None) -> float:
        """Return what a message takes by itself, sent as in training: in a CUDA graph where one
        holds it."""
        in_graph = graphs.whole_iterations(self.args)
        if graphs.by_layer(self.args):
            in_graph = message.dimension in graphs.held_by_layers(self.args)
        return self.watch.seconds(self._sender.sends(message, rule), in_graph)

    def _messages(self, dimension: str) -> list[MessageKind]:
        return [message for message in self.work.messages if message.dimension == dimension]

    def _unseen(self, dimension: str) -> bool:
        """Return whether a dimension is in use, but sends in a way that cannot be timed."""
        if dimension not in ("expert_parallel", "context_parallel"):
            return False
        return getattr(self.config, dimension).ranks(self.args) > 1

    def _candidates(self, dimension: str, iteration: float, budget: float) -> Candidates:
        """Return the recipes that are worth to be timed.

        Args:
            dimension: its name.
            iteration: seconds of an uncompressed iteration.
            budget: percent of validation loss.
        """
        messages = self._messages(dimension)
        if not messages:
            # It is in use, and sends in a way that is not known here: the config's check says
            # which.
            possible = self._possible(dimension, math.inf)
            return Candidates(reason=possible.reason or "no layer sends any")
        possible = self._possible(dimension, budget)
        if not possible.rules:
            return possible
        # If its messages took no time at all, would that be worth it?
        exposed = self._exposed(dimension)
        if exposed < LEAST_GAIN * iteration:
            percent = 100 * exposed / iteration
            return Candidates(reason=f"its messages lengthen an iteration by {percent:.1f} % only")
        # Payloads of layers may travel over symmetric or host memory, which is set up before they
        # are timed.
        if dimension not in ("pipeline_parallel", "data_parallel"):
            lossy = any(not recipe.exact for recipe in possible.rules)
            self.lines += self._sender.prepare(messages, lossy)
        return possible

    def _possible(self, dimension: str, budget: float) -> Candidates:
        """Return the recipes that go with this run, or why there are none.

        Args:
            dimension: its name.
            budget: percent of validation loss.
        """
        if reason := self._not_attachable.get(dimension):
            return Candidates(reason=f"not possible: {reason}")
        rules = {}
        reason = "no recipe is within the budget"
        for recipe in within(budget, dimension):
            try:
                config = dimension_config(self.config, dimension, recipe, self.args)
            except CompressionConfigError as error:
                reason = f"not possible: {error}"
                continue
            rules[recipe] = config.rules(0)
        if not rules:
            return Candidates(reason=reason)
        return Candidates(rules)

    def _gains(
        self, candidates: dict[str, Candidates], iteration: float
    ) -> dict[str, dict[Recipe, float]]:
        """Return the part of an iteration that each timed recipe saves, by dimension.

        The first recipe of every dimension is timed; then the second ones and so on, as long as the
        longest timing so far would still fit into the limit.

        Args:
            candidates: by dimension.
            iteration: seconds of an uncompressed iteration.
        """
        gains: dict[str, dict[Recipe, float]] = {dimension: {} for dimension in candidates}
        # The slowest rank's clock: all ranks stop at the same recipe.
        now = self.watch.elapsed()
        longest = 0.0
        for dimension, recipe in _in_turns(candidates):
            # The first recipe of a dimension is timed in any case.
            if gains[dimension] and now + longest > LIMIT:
                continue
            rules = candidates[dimension].rules[recipe]
            gains[dimension][recipe] = self._saved_seconds(dimension, rules) / iteration
            began = now
            now = self.watch.elapsed()
            longest = max(longest, now - began)
        return gains

    def _saved_seconds(self, dimension: str, rules: dict[str, Rule]) -> float:
        """Return by how many seconds an iteration is shorter where a dimension's messages follow
        rules."""
        saved = 0.0
        if dimension == "expert_parallel":
            # A codec is to gain more than what leaving the flex dispatcher costs.
            saved -= self._cost_of_alltoall
        for message in self._messages(dimension):
            rule = rules[message.traffic]
            if rule.codec is not None:
                before = message.exposed(self._times[message])
                saved += before - message.exposed(self._seconds(message, rule))
        return saved

    def _exposed(self, dimension: str) -> float:
        """Return by how many seconds a dimension's uncompressed messages lengthen an iteration."""
        messages = self._messages(dimension)
        return sum(message.exposed(self._times[message]) for message in messages)

    def _link(self, dimension: str) -> str:
        """Return a dimension's link as measured, by the messages that hold an iteration up most."""
        messages = self._messages(dimension)
        if not messages:
            return "not timed"
        slowest = max(messages, key=lambda message: message.exposed(self._times[message]))
        return self._sender.describe(slowest, self._times[slowest])


def _in_turns(candidates: dict[str, Candidates]) -> Iterator[tuple[str, Recipe]]:
    """Yield the first recipe of each dimension, then the second ones, and so on."""
    columns = [
        [(dimension, recipe) for recipe in possible.rules]
        for dimension, possible in candidates.items()
    ]
    for row in zip_longest(*columns):
        for pair in row:
            if pair is not None:
                yield pair


def _reduced_parameters(chunks: list[torch.nn.Module]) -> int:
    """Return how many trainable parameters of this stage data parallelism reduces.

    Experts (``allreduce`` is False) are left out where they have no replica.
    """
    experts_have_replicas = parallel_state.get_expert_data_parallel_world_size() > 1
    count = 0
    for chunk in chunks:
        for parameter in chunk.parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            if parameter.requires_grad and (experts_have_replicas or not is_expert):
                count += parameter.numel()
    return count


def _gemm_rate(args: Namespace, watch: Stopwatch) -> float:
    """Return the FLOP/s of a layer's first MLP product on this rank."""
    tokens, samples, channels = activations(args)
    columns = args.ffn_hidden_size // args.tensor_model_parallel_size
    inputs = normal_values((tokens * samples, channels), args.params_dtype, watch.device)
    weights = normal_values((channels, columns), args.params_dtype, watch.device)
    return 2 * inputs.numel() * columns / watch.seconds(lambda: inputs @ weights)


def dimension_config(
    config: CompressionConfig, dimension: str, recipe: Recipe, args: Namespace
) -> Any:
    """Return a dimension's part of the settings, with a recipe's codecs.

    Args:
        config: of the whole run.
        dimension: its name.
        recipe: one of the dimension's.
        args: Megatron's arguments.

    Raises:
        CompressionConfigError: the recipe does not go with this run.
    """
    if recipe.exact and args.cuda_graph_impl != "none":
        raise CompressionConfigError(
            f"--cuda-graph-impl {args.cuda_graph_impl} switches lossless off"
        )
    dimension_settings: Any = getattr(config, dimension)
    settings: dict[str, Any] = {"compression": recipe.compression}
    if recipe.backward is not None:
        settings["backward"] = recipe.backward
    if dimension == "tensor_parallel" and dimension_settings.min_mb is None:
        settings["min_mb"] = 0.0  # all messages of a layer have one size, which is timed
    changed = replace(dimension_settings, **settings)
    if dimension == "data_parallel":
        if getattr(args, "use_torch_fsdp2", False):
            raise CompressionConfigError(
                "--use-torch-fsdp2 is not timed; time --dp-compression yourself"
            )
        changed = replace(changed, weights=None).resolved(args)  # the recipe decides about weights
    changed.check(args)
    return changed


def decided_config(config: CompressionConfig, plan: RunPlan, args: Namespace) -> CompressionConfig:
    """Return the settings with what was left open.

    Args:
        config: as the flags have it.
        plan: the decision.
        args: Megatron's arguments.

    Raises:
        CompressionConfigError: a recipe does not go with this run.
    """
    by_dimension = {
        dimension: dimension_config(config, dimension, recipe, args)
        for dimension, recipe in plan.recipes().items()
    }
    if plan.halves:
        tensor_parallel = by_dimension.get("tensor_parallel", config.tensor_parallel)
        changed = replace(tensor_parallel, overlap="halves")
        changed.check(args)
        by_dimension["tensor_parallel"] = changed
    return replace(config, **by_dimension)


def _not_chosen(gains: dict[Recipe, float]) -> str:
    """Return why a dimension whose recipes were timed has none."""
    best = max(gains, key=lambda recipe: gains[recipe])
    percent = 100 * gains[best]
    if gains[best] >= TRIED:
        return (
            f"{best.name} would gain {percent:.1f} % for +{best.loss:.3g} % of loss, but the "
            "budget is spent; raise --compression-loss-budget"
        )
    effect = f"cost {-percent:.1f} %"
    if percent > 0:
        effect = f"gain {percent:.1f} %, under {100 * TRIED:g} %"
    return f"{best.name}, the best here, would {effect} of an iteration"
