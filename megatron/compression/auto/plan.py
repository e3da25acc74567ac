"""The decision of ``--compression auto``: by which rule, how the run checks it, where a resume
finds it."""

import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.files import read_json, write_whole
from megatron.compression.names import PARALLELISMS
from megatron.compression.report.history import to_json
from megatron.compression.report.markdown import table

BUDGET = 0.1
"""Percent of validation loss, where ``--compression-loss-budget`` is not given."""
LEAST_GAIN = 0.02
"""A dimension that saves a smaller part of an iteration, as the run itself measures it, stays
uncompressed."""
TRIED = 0.005
"""What is predicted to save a smaller part of an iteration is not tried. Predictions are off by
more than lies between this and ``LEAST_GAIN``."""
ALIKE = 0.005
"""Settings whose gains differ by a smaller part of an iteration count as equally fast."""
ROUNDING = 1e-9
"""By so many percent a sum of losses may exceed the budget: floating-point sums of decimal
fractions."""
FILE = "compression-auto.json"
"""In the folder of --save."""


@dataclass(frozen=True)
class DimensionPlan:
    """The decision about one dimension."""

    dimension: str
    """The dimension's name, such as tensor_parallel."""
    link: str
    """Its link as measured, uncompressed."""
    chosen: bool
    """Whether a recipe was chosen here; False: uncompressed, or its own flag decides."""
    name: str
    """The codecs, or ``none``."""
    gain: float
    """Part of the uncompressed iteration that it is expected to save."""
    loss: float
    """Percent of validation loss that it costs."""
    why: str
    """The reason, in words."""


@dataclass(frozen=True)
class RunPlan:
    """The decision for the whole run; the same on all ranks."""

    dimensions: tuple[DimensionPlan, ...]
    budget: float
    """Percent of validation loss that may be spent."""
    iteration_ms: float
    """Milliseconds of an uncompressed iteration, as predicted."""
    computation_ms: float
    """The part of it that is no communication."""
    seconds: float
    """How long the timings took."""
    checked: bool = False
    """Whether the run has compared iterations with and without."""

    def recipes(self) -> dict[str, Recipe]:
        """Return the recipes of the dimensions that compress.

        Raises:
            TypeError: a plan names what ``auto`` does not choose among.
        """
        return {plan.dimension: _recipe_of(plan) for plan in self.dimensions if plan.chosen}

    @classmethod
    def from_dict(cls, values: Any) -> "RunPlan":
        """Return the plan that ``asdict`` has made ``values`` of.

        Raises:
            TypeError, KeyError: it has not, or ``auto`` cannot have chosen this.
        """
        dimensions = tuple(_typed(DimensionPlan, plan) for plan in values["dimensions"])
        plan = _typed(cls, {**values, "dimensions": dimensions})
        plan.recipes()
        return plan

    def after_check(self, useless: Mapping[str, str]) -> "RunPlan":
        """Return the plan after the run's own check.

        Args:
            useless: dimension -> why it does not gain, in words.
        """
        dimensions = []
        for plan in self.dimensions:
            if plan.dimension in useless:
                reason = useless[plan.dimension]
                plan = replace(plan, chosen=False, name="none", gain=0.0, loss=0.0, why=reason)
            dimensions.append(plan)
        return replace(self, dimensions=tuple(dimensions), checked=True)

    def table(self) -> list[str]:
        """Return lines for the log and the report."""
        if not self.dimensions:
            return ["ranks send each other nothing: there is nothing to compress"]
        header = ["dimension", "link as measured", "choice", "expected gain", "cost in loss", "why"]
        rows = [header]
        for plan in self.dimensions:
            gain = "-"
            loss = "-"
            if plan.chosen:
                gain = f"{100 * plan.gain:.1f} %"
                loss = f"+{plan.loss:.3g} %"
            dimension = plan.dimension.replace("_", " ")
            rows.append([dimension, plan.link, plan.name, gain, loss, plan.why])
        return table(*rows, aligned=True)


_JSON_TYPES: dict[str, Any] = {"float": (float, int), "bool": bool, "str": str}
"""Name of a field's type -> what JSON may hold for it."""


def _typed(cls: type, values: Any) -> Any:
    """Return a dataclass of values out of JSON; null stands for a number that JSON lacks.

    Raises:
        TypeError: it is no object, or a value is not of its field's type.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r} is no {cls.__name__}")
    # Checked field by field: a plan of another version, or one that somebody edited, is measured
    # anew.
    fields = {}
    for name, value in values.items():
        annotation = cls.__annotations__.get(name)
        type_name = getattr(annotation, "__name__", annotation)
        if value is None and type_name == "float":
            value = math.nan
        # To Python True is a number.
        is_flag_for_number = type_name == "float" and isinstance(value, bool)
        if is_flag_for_number or not isinstance(value, _JSON_TYPES.get(type_name, object)):
            raise TypeError(f"{name} is {value!r}")
        fields[name] = value
    return cls(**fields)


def _recipe_of(plan: DimensionPlan) -> Recipe:
    """Return the recipe that a plan names; nothing is parsed or imported.

    Raises:
        TypeError: there is none.
    """
    for recipe in RECIPES.get(plan.dimension, ()):
        if recipe.name == plan.name:
            return recipe
    raise TypeError(f"{plan.name!r} is no choice for {plan.dimension!r}")


def within(budget: float, dimension: str) -> list[Recipe]:
    """Return the recipes of a dimension that a budget allows by themselves.

    Args:
        budget: percent of validation loss; 0 allows what changes no bit.
        dimension: the dimension's name.
    """
    return [
        recipe
        for recipe in RECIPES[dimension]
        if recipe.exact or (budget > 0 and recipe.loss <= budget + ROUNDING)
    ]


@dataclass(frozen=True)
class Combination:
    """One choice for every dimension."""

    recipes: dict[str, Recipe]
    """By dimension; a dimension that is left out stays uncompressed."""
    gain: float
    """Part of an iteration that it saves."""
    loss: float
    """Percent of validation loss that it costs."""


def choose(gains: Mapping[str, Mapping[Recipe, float]], budget: float) -> dict[str, Recipe]:
    """Return the recipes with the largest gain whose losses add up to no more than the budget.

    Args:
        gains: dimension -> recipe -> the part of an iteration that it saves.
        budget: percent of validation loss.

    Returns:
        Recipes by dimension; dimensions that are left out stay uncompressed.
    """
    # Five dimensions of a few recipes each: every combination is looked at. The one without a
    # recipe costs nothing, so at least it is within the budget.
    combinations = [
        combination for combination in _combinations(gains) if combination.loss <= budget + ROUNDING
    ]
    best_gain = max(combination.gain for combination in combinations)
    # Settings whose gains differ by less than ALIKE count as equally fast: the smaller loss
    # decides.
    as_fast = [choice for choice in combinations if choice.gain >= best_gain - ALIKE]
    chosen = min(as_fast, key=lambda combination: (combination.loss, -combination.gain))
    return chosen.recipes


def _combinations(gains: Mapping[str, Mapping[Recipe, float]]) -> list[Combination]:
    """Return every combination of recipes that are worth a try, the one without any included."""
    options_by_dimension: list[list[tuple[str, Recipe | None, float]]] = []
    for dimension, gain_of in gains.items():
        options: list[tuple[str, Recipe | None, float]] = [(dimension, None, 0.0)]
        options += [(dimension, recipe, gain) for recipe, gain in gain_of.items() if gain >= TRIED]
        options_by_dimension.append(options)
    combinations = []
    for options in product(*options_by_dimension):
        recipes = {dimension: recipe for dimension, recipe, _ in options if recipe is not None}
        # Gains add up: each is a part of the same uncompressed iteration.
        gain = sum(gain for _, _, gain in options)
        loss = sum(recipe.loss for recipe in recipes.values())
        combinations.append(Combination(recipes, gain, loss))
    return combinations


WARM_UP = 3
"""Iterations before the first block: kernels and allocations of training."""
BLOCK = 4
"""Iterations of a block, of which the first is not timed: it begins with what the block before has
left."""
ROUNDS = 2
"""Blocks of each kind; one where each block is captured anew."""


class Check:
    """Times blocks of iterations with everything on, or one dimension uncompressed, and decides.

    Ranks switch by the iteration, which all of them know, so nothing is sent to agree on a switch.
    After ``WARM_UP`` iterations blocks follow each other, in two rounds::

        all on | without A | without B | all on | without A | without B | decision

    Args:
        dimensions: those that are compressed.
        first: the first iteration, counted from 0, that compresses anything.
        iteration: the zero-based one that all ranks are in.
        decided: called on all ranks with the part of an iteration that each dimension saves. A
            dimension that could not be timed is not in it, and stays as it was decided.
        capturing: further iterations of a block, in which a CUDA graph is captured; replays are
            timed.
    """

    def __init__(
        self,
        dimensions: Sequence[str],
        first: int,
        iteration: Callable[[], int],
        decided: Callable[[dict[str, float]], None],
        capturing: int = 0,
    ) -> None:
        self._dimensions = dimensions
        self._first = first
        self._iteration = iteration
        self._decided = decided
        self._untimed = 1 + capturing
        self._block_length = BLOCK + capturing
        rounds = 1 if capturing else ROUNDS
        # Interleaved, so that a slow drift of the machine is in every kind of block.
        self._blocks: list[str | None] = [None, *dimensions] * rounds
        """The dimension that is uncompressed in each block; None: everything is on."""
        self._times: dict[str | None, list[float]] = {block: [] for block in self._blocks}
        """Seconds of iterations, by what is uncompressed."""
        self._first_block_begins: int | None = None
        self._last_index: int | None = None
        """The last iteration seen, from the first block on; Megatron skips those of
        --iterations-to-skip."""
        self._last_time = 0.0
        self.off: set[str] = set()
        """Dimensions that stay uncompressed."""
        self.done = not dimensions

    @property
    def iterations(self) -> int:
        """The number of iterations of all blocks."""
        return self._block_length * len(self._blocks)

    def left_out(self, traffic: str) -> bool:
        """Return whether a traffic class goes uncompressed now, for ``Policy.left_out``."""
        if any(_belongs(traffic, dimension) for dimension in self.off):
            return True
        if self.done or self._first_block_begins is None:
            return False
        index = self._iteration() - self._first_block_begins
        if not 0 <= index < self.iterations:
            return False
        uncompressed = self._blocks[index // self._block_length]
        return uncompressed is not None and _belongs(traffic, uncompressed)

    def on_training_log(self, iteration: int) -> None:
        """Time the iteration that has just ended, counted from 1; decide after the last block.

        The decision is collective over all ranks.
        """
        if self.done:
            return
        # ``iteration`` counts from 1, the blocks from 0: this is the one after the warm-up that
        # follows this iteration, or the first that compresses.
        if self._first_block_begins is None:
            self._first_block_begins = max(iteration, self._first) + WARM_UP
        index = iteration - 1 - self._first_block_begins
        # -1 is the last one of the warm-up, from whose end the first block is timed.
        if index < -1:
            return
        # Without it the clock would tell when kernels were launched.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        block, position = divmod(index, self._block_length)
        is_in_a_block = 0 <= index < self.iterations
        follows_the_last = self._last_index == index - 1
        if is_in_a_block and position >= self._untimed and follows_the_last:
            self._times[self._blocks[block]].append(now - self._last_time)
        self._last_time = now
        self._last_index = index
        # ">=", since a run may skip past the last block; it decides by what it has timed.
        if index + 1 >= self.iterations:
            self.done = True
            self._decide()

    def _decide(self) -> None:
        """Compare the medians of the slowest rank, switch off what does not gain, and tell."""
        medians = [
            statistics.median(times) if times else math.nan for times in self._times.values()
        ]
        # All ranks switch alike, so all decide by the slowest one's times.
        seconds = dict(zip(self._times, largest(*medians), strict=True))
        gains = {}
        for dimension in self._dimensions:
            gain = 1 - seconds[None] / seconds[dimension]
            # A block that no timed iteration fell into says nothing.
            if not math.isnan(gain):
                gains[dimension] = gain
        self.off = {dimension for dimension, gain in gains.items() if gain < LEAST_GAIN}
        self._decided(gains)


def device_of_rank() -> torch.device:
    """Return the device on which this rank's collectives run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def largest(*values: float) -> list[float]:
    """Return the largest of each value over all ranks of the job. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device_of_rank())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _belongs(traffic: str, dimension: str) -> bool:
    """Return whether a traffic class is one of a dimension's."""
    return traffic.startswith(PARALLELISMS[dimension].traffic)


_DECIDING_ARGUMENTS = """
    world_size tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    virtual_pipeline_model_parallel_size
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    multi_latent_attention padded_vocab_size seq_length micro_batch_size global_batch_size
    sequence_parallel params_dtype accumulate_allreduce_grads_in_fp32
    transformer_impl cuda_graph_impl
    use_distributed_optimizer num_distributed_optimizer_instances ddp_bucket_size
    overlap_grad_reduce overlap_param_gather overlap_p2p_comm
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    num_experts moe_token_dispatcher_type moe_router_topk moe_router_dtype
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_layer_freq moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_overlap overlap_moe_expert_parallel_comm
""".split()
"""Arguments of Megatron that a plan holds for: another value of one of them makes it another
run."""


def circumstances(args: Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan is made for, as JSON-ready values; for another run it is made anew.

    Args:
        args: Megatron's arguments.
        settings: those of compression, without what does not change results.
    """
    arguments = {name: getattr(args, name, None) for name in _DECIDING_ARGUMENTS}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    values = {**arguments, "device": device, "settings": settings}
    # Through JSON and back, so that it equals what is read from a file.
    return dict(json.loads(json.dumps(values, default=str)))


def read(
    folder: str | None, made_for: dict[str, Any], log: Callable[[str], None]
) -> RunPlan | None:
    """Return the plan of an earlier part of this run, or None: the run measures.

    Args:
        folder: of the checkpoint that is loaded; None: there is none.
        made_for: the ``circumstances`` of this run.
        log: takes a line that says why a file is not used.
    """
    path = Path(folder or "", FILE)
    if folder is None or not path.is_file():
        return None
    try:
        stored = read_json(path)
        plan = RunPlan.from_dict(stored["decision"])
        plan_made_for = dict(stored["made_for"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"{path} cannot be read ({error}); the run measures anew")
        return None
    changed = sorted(name for name in made_for if plan_made_for.get(name) != made_for[name])
    if changed:
        log(f"{path} is of another run ({', '.join(changed)}); this one measures anew")
        return None
    return plan


def write(
    folder: str | None, plan: RunPlan, made_for: dict[str, Any], log: Callable[[str], None]
) -> None:
    """Keep a plan for a resumed run; a folder that cannot be written to is a line, and no error.

    Args:
        folder: where the run saves checkpoints; None: nowhere.
        plan: the decision.
        made_for: the ``circumstances`` of this run.
        log: takes a line.
    """
    if folder is None:
        return
    path = Path(folder, FILE)
    text = to_json({"decision": asdict(plan), "made_for": made_for}, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        log(f"{path} cannot be written ({error.strerror}); a resumed run measures anew")
