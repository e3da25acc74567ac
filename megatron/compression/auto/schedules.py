"""Switches a run between the ways to train that ``--compression auto`` compares in it."""

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch

from megatron.compression.auto.check import TENSOR, Trial, trials_of
from megatron.compression.auto.measurement import dimension_config
from megatron.compression.auto.messages import HALVES_COST
from megatron.compression.auto.plan import RunPlan, within
from megatron.compression.auto.stopwatch import first_reason
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.communication.ledger import TRAFFIC
from megatron.compression.communication.policy import Rule
from megatron.compression.config import CompressionConfig, train_iterations
from megatron.compression.errors import CompressionConfigError
from megatron.compression.names import PARALLELISMS
from megatron.compression.session import Session
from megatron.compression.tensor_parallel import halves_block
from megatron.compression.tensor_parallel.config import halves_refusal
from megatron.compression.tensor_parallel.hooks import sites_of

ROOM = 0.05
"""Part of a device's memory that has to be left to try halves of a micro-batch. They took 0.5 % more
(docs/results/iterations.md), in two pieces where there was one."""


def shortage() -> str | None:
    """Return why there is no room to try another schedule on some rank, or None.

    Collective over all ranks, after an iteration or more.
    """
    reason = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        # What torch holds and has not needed at once is free as well.
        unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
        free_share = (free + unused) / total
        if free_share < ROOM:
            reason = (
                f"iterations leave {100 * max(free_share, 0.0):.1f} % of a device's memory, under "
                f"{100 * ROOM:g} %"
            )
    return first_reason(reason)


class Schedules:
    """Prepares the ways to train that a run compares, and has it take one of them.

    Args:
        session: of the run, attached, with the decided settings.
        config: as the flags have it, with dimensions left open.
        args: Megatron's arguments.
        log: prints a line.
    """

    def __init__(
        self,
        session: Session,
        config: CompressionConfig,
        args: Namespace,
        log: Callable[[str], None],
    ) -> None:
        self._session = session
        self._config = config
        self._args = args
        self._log = log
        self._halved: list[torch.nn.Module] = []
        """Chunks that can be switched to halves of a micro-batch."""
        self._rules = {"": dict(session.run.policy.rules)}
        """The policy's rules by the recipe of a trial; empty: those of the decided one."""

    def prepare(self, plan: RunPlan, chunks: Sequence[torch.nn.Module]) -> list[Trial]:
        """Return the ways to train that the run is to compare. Collective over all ranks.

        Args:
            plan: the decision.
            chunks: this stage's, attached.
        """
        compressed = list(plan.recipes())
        halves = self._can_try_halves(plan, chunks)
        overlaps = halves and TENSOR in compressed and self._payloads_overlap()
        safer = self._safer_recipe(plan)
        if safer:
            self._rules[safer] = self._rules_with(safer)
        return trials_of(compressed, halves, overlaps, safer)

    def take(self, trial: Trial) -> None:
        """Train in one of the compared ways from the next iteration on."""
        policy = self._session.run.policy
        traffic = {
            name
            for name in TRAFFIC
            for dimension in trial.off
            if name.startswith(PARALLELISMS[dimension].traffic)
        }
        # A method of a set: every message asks.
        policy.left_out = frozenset(traffic).__contains__ if traffic else None
        # Not by replace_rules, after which no graph is true any more: here the same rules come back,
        # and the schedule tells graphs apart.
        policy.rules = self._rules[trial.recipe]
        policy.schedule = (trial.halves, trial.recipe)
        for chunk in self._halved:
            halves_block.switch(chunk, trial.halves)

    def _can_try_halves(self, plan: RunPlan, chunks: Sequence[torch.nn.Module]) -> bool:
        """Prepare the chunks for halves of a micro-batch, if the run is to try them; log why not.

        Collective over all ranks.
        """
        tensor = plan.of(TENSOR)
        # A schedule that was typed stays, and so does tensor parallelism with a flag of its own.
        if tensor is None or TENSOR not in self._config.auto:
            return False
        if self._config.tensor_parallel.overlap is not None:
            return False
        reason = self._why_no_halves(tensor.exposed, chunks)
        # Ranks switch together, so one that cannot is enough.
        reason = first_reason(reason)
        if reason is not None:
            self._log(f"interleaved halves are not tried: {reason}")
            return False
        for chunk in chunks:
            if any(True for _ in sites_of(chunk)):
                halves_block.attach(chunk)
                halves_block.switch(chunk, False)
                self._halved.append(chunk)
        return True

    def _why_no_halves(self, exposed: float, chunks: Sequence[torch.nn.Module]) -> str | None:
        """Return why halves of a micro-batch are not tried, or None.

        Args:
            exposed: part of an iteration by which tensor-parallel messages lengthen it; NaN: not
                known.
            chunks: this stage's, attached.
        """
        # They cannot hide more than there is.
        if exposed < HALVES_COST:
            return (
                f"sums lengthen an iteration by {100 * exposed:.1f} %, and halves by "
                f"{100 * HALVES_COST:g} %"
            )
        refusals = [halves_refusal(self._args)]
        for chunk in chunks:
            if any(True for _ in sites_of(chunk)):
                refusals.append(halves_block.refusal(chunk))
        for error in refusals:
            if error is not None:
                # The fix is to drop a flag that nobody has typed.
                return str(error).rpartition("; ")[0]
        return None

    def _payloads_overlap(self) -> bool:
        """Return whether compressed sums of this run's layers leave room for other kernels.

        Over symmetric memory a collective fills the GPU. Collective over all ranks.
        """
        transports = self._session.run.transports
        reason = None
        for chunk in self._halved:
            groups = dict.fromkeys(site.group for site in sites_of(chunk))
            if not all(transports.transport(group).overlaps for group in groups):
                reason = "a collective fills the GPU"
        return first_reason(reason) is None

    def _safer_recipe(self, plan: RunPlan) -> str:
        """Return the name of the lossy recipe of tensor parallelism that costs least loss, if that
        is not the decided one; else an empty text."""
        decided = plan.recipes().get(TENSOR)
        if decided is None or decided.exact:
            return ""
        for recipe in sorted(within(plan.budget, TENSOR), key=lambda recipe: recipe.loss):
            if recipe.exact or recipe.loss >= decided.loss:
                continue
            try:
                dimension_config(self._config, TENSOR, recipe, self._args)
            except CompressionConfigError:
                continue
            return recipe.name
        return ""

    def _rules_with(self, recipe: str) -> dict[str, Rule]:
        """Return the policy's rules with another recipe of tensor parallelism."""
        config = dimension_config(self._config, TENSOR, tensor_recipe(recipe), self._args)
        start = self._session.config.start_iteration
        return self._rules[""] | config.rules(start, train_iterations(self._args))


def tensor_recipe(name: str) -> Recipe:
    """Return tensor parallelism's recipe of a name."""
    return next(recipe for recipe in RECIPES[TENSOR] if recipe.name == name)
