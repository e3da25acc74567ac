"""Keeps a run of ``--compression auto`` within its budget of loss, by what the loss meter measures.

The costs that ``auto`` chooses by were measured on other models. Where this run's own cost is above
``--compression-loss-budget``, beyond two standard errors, the dimension that costs most takes its
next safer setting. With several dimensions that compress, each is measured by itself first:

    all together above the budget  ->  each dimension by itself  ->  the worst one is safer
              ^                                                              |
              +------------------- measured anew, from no pair on -----------+

A run never goes back to a setting that it has left: the plan says what it has, and so does a
resume.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.compression.auto.measurement import dimension_config
from megatron.compression.auto.plan import DimensionPlan, RunPlan
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.loss_meter import LEAST_PAIRS, TOGETHER, LossCost, LossMeter
from megatron.compression.names import ACTIVATIONS, PARALLELISMS

UNCOMPRESSED = "none"


class Safety:
    """Decides when a run takes safer codecs, and which.

    Args:
        session: of the run; its dimensions are attached.
        args: Megatron's arguments.
        budget: percent of loss.
        changed: called on all ranks with the new plan and a line that says why.
    """

    def __init__(
        self,
        session: Any,
        args: Namespace,
        budget: float,
        changed: Callable[[RunPlan, str], None],
    ) -> None:
        self._session = session
        self._args = args
        self._budget = budget
        self._changed = changed
        self._pairs_of_last_look = 0
        """A look at each pair would find a cost above the budget by chance alone, some day."""

    def look(self, plan: RunPlan, cost: LossCost) -> None:
        """Take a safer setting where the measured cost asks for it; the same on all ranks.

        Args:
            plan: what the run has now.
            cost: of all codecs together.
        """
        meter: LossMeter = self._session.loss_meter
        if cost.pairs < self._pairs_of_last_look:
            # Measured anew, or sums were halved.
            self._pairs_of_last_look = 0
        if cost.pairs < self._pairs_of_last_look + LEAST_PAIRS and not cost.broken:
            return
        self._pairs_of_last_look = cost.pairs
        if not cost.is_above(self._budget):
            # Passes of single dimensions cost time, and nobody asks for them now.
            meter.measure_apart(())
            return
        dimensions = self._compressed()
        if not dimensions:
            return
        worst = self._worst(meter, dimensions)
        if worst is None:
            return
        # A single dimension is never measured apart: all together is that one.
        measured = TOGETHER
        if meter.apart:
            measured = worst
        self._step_down(plan, worst, meter.cost(measured))
        meter.measure_apart(())
        self._pairs_of_last_look = 0

    def _compressed(self) -> tuple[str, ...]:
        """Return the dimensions that send activations through codecs now."""
        policy = self._session.run.policy
        dimensions = []
        for name in ACTIVATIONS:
            traffic = f"{PARALLELISMS[name].traffic}forward"
            left_out = policy.left_out is not None and policy.left_out(traffic)
            has_ranks = getattr(self._session.config, name).ranks(self._args) > 1
            if has_ranks and policy.rule(traffic).codecs and not left_out:
                dimensions.append(name)
        return tuple(dimensions)

    def _worst(self, meter: LossMeter, dimensions: tuple[str, ...]) -> str | None:
        """Return the dimension that costs most; None: that is not measured yet."""
        if len(dimensions) == 1:
            return dimensions[0]
        if meter.apart != dimensions:
            meter.measure_apart(dimensions)
            return None
        costs = {name: meter.cost(name) for name in dimensions}
        # NaN and infinity are worse than any percentage, and do not wait for more pairs.
        for name, cost in costs.items():
            if cost.broken:
                return name
        # The dimension with the fewest pairs decides when all can be told apart.
        if min(cost.pairs for cost in costs.values()) < LEAST_PAIRS:
            return None
        return max(dimensions, key=lambda name: costs[name].percent)

    def _step_down(self, plan: RunPlan, dimension: str, cost: LossCost) -> None:
        """Give a dimension its next safer setting, from the next iteration on.

        Args:
            plan: what the run has now.
            dimension: its name.
            cost: what its present setting costs.
        """
        config = self._session.config
        present = getattr(config, dimension)
        specs = ", back ".join(spec for spec in present.specs if spec)
        recipe = self._safer(dimension)
        # Settings of the user's own are replaced as a whole.
        settings = without_codecs(present)
        name = UNCOMPRESSED
        loss = 0.0
        if recipe is not None:
            opened = replace(config, **{dimension: settings})
            settings = dimension_config(opened, dimension, recipe, self._args)
            name = recipe.name
            loss = recipe.loss
        self._session.change(dimension, settings)
        reason = f"{specs} cost {cost} in this run, above the budget of {self._budget:g} %"
        changed = DimensionPlan(
            dimension=dimension,
            link="not timed",
            chosen=recipe is not None,
            name=name,
            gain=math.nan,
            loss=loss,
            reason=reason,
        )
        iteration = self._session.run.policy.iteration() + 1
        title = PARALLELISMS[dimension].title
        taken = name
        if recipe is None:
            taken = "uncompressed"
        line = f"{title}: {reason}: {taken} after iteration {iteration}"
        self._changed(_with(plan, changed), line)

    def _safer(self, dimension: str) -> Recipe | None:
        """Return the recipe of a dimension that comes next in cost after the present one; None:
        uncompressed is safer alone.

        A setting of the user's own has no known place among the recipes: after it comes the safest.
        Lossless is left out: what it gains here nobody has measured, and passes with an overflow
        would have to be repeated, which is arranged at the start.
        """
        config = self._session.config
        present = getattr(config, dimension)
        opened = replace(config, **{dimension: without_codecs(present)})
        possible = [
            recipe
            for recipe in sorted(RECIPES[dimension], key=lambda recipe: recipe.loss)
            if not recipe.exact and self._is_possible(opened, dimension, recipe)
        ]
        for recipe in RECIPES[dimension]:
            if (recipe.compression, recipe.backward) == (present.compression, present.backward):
                safer = [candidate for candidate in possible if candidate.loss < recipe.loss]
                # The last of them costs most: a step down is as small as it can be.
                return safer[-1] if safer else None
        return possible[0] if possible else None

    def _is_possible(self, opened: CompressionConfig, dimension: str, recipe: Recipe) -> bool:
        """Return whether a recipe goes with this run.

        Args:
            opened: the run's settings without codecs of the dimension.
            dimension: its name.
            recipe: one of the dimension's.
        """
        try:
            dimension_config(opened, dimension, recipe, self._args)
        except CompressionConfigError:
            return False
        return True


def without_codecs(settings: Any) -> Any:
    """Return a dimension's settings with nothing compressed."""
    return replace(settings, compression=UNCOMPRESSED, backward=None)


def without_replaced_flags(config: CompressionConfig, plan: RunPlan) -> CompressionConfig:
    """Return the settings without the codecs of flags that a run has replaced by safer ones.

    Args:
        config: as the flags have it.
        plan: the run's; of a dimension whose flag decides it has the flag's codecs, until they are
            replaced.
    """
    for decided in plan.dimensions:
        name = decided.dimension
        is_replaced = decided.chosen or decided.name == UNCOMPRESSED
        if name in ACTIVATIONS and name not in config.auto and is_replaced:
            config = replace(config, **{name: without_codecs(getattr(config, name))})
    return config


def _with(plan: RunPlan, changed: DimensionPlan) -> RunPlan:
    """Return a plan with another decision about one dimension; its link is known already."""
    dimensions = []
    is_new = True
    for decided in plan.dimensions:
        if decided.dimension == changed.dimension:
            decided = replace(changed, link=decided.link, exposed=decided.exposed)
            is_new = False
        dimensions.append(decided)
    if is_new:
        dimensions.append(changed)
    # A resume goes on with it as it is, without comparing iterations once more.
    return replace(plan, dimensions=tuple(dimensions), checked=True)
