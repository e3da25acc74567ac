"""The decision of ``--compression auto``: by which rule, and where a resume finds it."""

import copy
import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
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
    reason: str
    """Why, in words."""
    exposed: float = math.nan
    """Part of the uncompressed iteration by which its messages lengthen it; NaN: not known."""


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
    halves: bool = False
    """Whether halves of a micro-batch are interleaved, as the run has found to be faster."""
    cost_iterations: float = 0.0
    """As how many iterations the timings and the comparison took beyond training; 0: not known."""

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
        dimensions = tuple(_typed(DimensionPlan, _renamed(plan)) for plan in values["dimensions"])
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
                plan = replace(plan, chosen=False, name="none", gain=0.0, loss=0.0, reason=reason)
            dimensions.append(plan)
        return replace(self, dimensions=tuple(dimensions), checked=True)

    def of(self, dimension: str) -> DimensionPlan | None:
        """Return the decision about a dimension; None: it has no ranks."""
        for plan in self.dimensions:
            if plan.dimension == dimension:
                return plan
        return None

    def with_recipe(self, dimension: str, recipe: Recipe, reason: str) -> "RunPlan":
        """Return the plan with another recipe of a dimension that compresses.

        Args:
            dimension: its name.
            recipe: in place of the one that was chosen.
            reason: why, in words.
        """
        dimensions = []
        for plan in self.dimensions:
            if plan.dimension == dimension:
                plan = replace(plan, name=recipe.name, loss=recipe.loss, reason=reason)
            dimensions.append(plan)
        return replace(self, dimensions=tuple(dimensions))

    def table(self) -> list[str]:
        """Return lines for the log and the report."""
        if not self.dimensions:
            return ["ranks send each other nothing: there is nothing to compress"]
        header = [
            "dimension",
            "link as measured",
            "choice",
            "expected gain",
            "cost in loss",
            "reason",
        ]
        rows = [header]
        for plan in self.dimensions:
            gain = "-"
            loss = "-"
            if plan.chosen:
                # What a safer setting gains was not timed.
                if not math.isnan(plan.gain):
                    gain = f"{100 * plan.gain:.1f} %"
                loss = f"+{plan.loss:.3g} %"
            dimension = plan.dimension.replace("_", " ")
            choice = plan.name
            if self.halves and plan.dimension == "tensor_parallel":
                choice += ", in halves"
            rows.append([dimension, plan.link, choice, gain, loss, plan.reason])
        return table(*rows, aligned=True)


def _renamed(values: Any) -> Any:
    """Return a dimension's plan out of JSON by today's names of its fields."""
    if isinstance(values, Mapping) and "why" in values:
        values = dict(values)
        values["reason"] = values.pop("why")  # until 0.3.0
    return values


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


def flag(dimension: str, recipe: Recipe) -> str:
    """Return what to type for a recipe of a dimension."""
    spec = recipe.named
    if not spec:
        spec = recipe.compression
        if recipe.backward is not None:
            spec += f" {recipe.backward}"
    return f"{PARALLELISMS[dimension].flag} {spec}"


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
    # One option of every dimension at a time.
    for options in product(*options_by_dimension):
        recipes = {dimension: recipe for dimension, recipe, _ in options if recipe is not None}
        # Gains add up: each is a part of the same uncompressed iteration.
        gain = sum(gain for _, _, gain in options)
        loss = sum(recipe.loss for recipe in recipes.values())
        combinations.append(Combination(recipes, gain, loss))
    return combinations


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
    settings = copy.deepcopy(settings)
    tensor_parallel = settings.get("tensor_parallel")
    if tensor_parallel is not None and tensor_parallel["overlap"] is None:
        tensor_parallel["overlap"] = "weights"  # so the files of 0.3.0 have it
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
