"""What ``--compression auto`` decides and by which rule, how the run checks it, where a resume finds it."""

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
from megatron.compression.communication.ledger import DIMENSIONS
from megatron.compression.report.history import to_json

BUDGET = 0.1
"""Percent of validation loss, where ``--compression-loss-budget`` is not given."""
LEAST_GAIN = 0.02
"""Of an iteration, as the run itself measures it: a dimension that gains less stays uncompressed."""
TRIED = 0.005
"""Of an iteration, as predicted: what would gain less is not tried. Predictions are off by more than what
lies between these two."""
ALIKE = 0.005
"""Of an iteration: settings that differ by less count as equally fast, and the smaller loss decides."""
FILE = "compression-auto.json"
"""In the folder of --save."""


@dataclass(frozen=True)
class DimensionPlan:
    """What one dimension does."""

    dimension: str
    link: str
    """As measured, uncompressed."""
    chosen: bool
    """Whether a recipe was chosen here; False: uncompressed, or its own flag decides."""
    name: str
    """The codecs, or ``none``."""
    gain: float
    """Part of the uncompressed iteration that it is expected to save."""
    loss: float
    """Percent of validation loss that it costs."""
    why: str


@dataclass(frozen=True)
class RunPlan:
    """For the whole run; the same on all ranks."""

    dimensions: tuple[DimensionPlan, ...]
    budget: float
    """Percent."""
    iteration_ms: float
    """Of an uncompressed iteration, as predicted."""
    computation_ms: float
    """The part of it that is no communication."""
    seconds: float
    """That the timings took."""
    checked: bool = False
    """Whether the run has compared iterations with and without."""

    def recipes(self) -> dict[str, Recipe]:
        """Of the dimensions that compress."""
        return {one.dimension: _known(one) for one in self.dimensions if one.chosen}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunPlan":
        """Raises: TypeError, KeyError: not as ``asdict`` gives it, or what ``auto`` cannot have chosen."""
        dimensions = tuple(_typed(DimensionPlan, one) for one in values["dimensions"])
        plan = _typed(cls, {**values, "dimensions": dimensions})
        plan.recipes()
        return plan

    def after_check(self, useless: Mapping[str, str]) -> "RunPlan":
        """The plan after the run's own check, which gives by dimension that does not gain why."""
        off = {"chosen": False, "name": "none", "gain": 0.0, "loss": 0.0}
        why = {name: {**off, "why": text} for name, text in useless.items()}
        after = tuple(replace(one, **why.get(one.dimension, {})) for one in self.dimensions)
        return replace(self, dimensions=after, checked=True)

    def table(self) -> list[str]:
        """Lines for the log and the report."""
        if not self.dimensions:
            return ["ranks send each other nothing: there is nothing to compress"]
        rows = [["dimension", "link as measured", "choice", "expected gain", "cost in loss", "why"]]
        for one in self.dimensions:
            numbers = (
                (f"{100 * one.gain:.1f} %", f"+{one.loss:.3g} %") if one.chosen else ("-", "-")
            )
            rows.append([one.dimension.replace("_", " "), one.link, one.name, *numbers, one.why])
        return aligned(rows)


def _typed(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass of values out of JSON; null stands for a number that JSON lacks.

    Raises: TypeError: a value is not of its field's type.
    """
    kinds: dict[str, Any] = {"float": (float, int), "bool": bool, "str": str}
    found = {}
    for name, value in values.items():
        kind = cls.__annotations__.get(name)
        kind = getattr(kind, "__name__", kind)
        found[name] = math.nan if value is None and kind == "float" else value
        if not isinstance(found[name], kinds.get(kind, object)):
            raise TypeError(f"{name} is {value!r}")
    return cls(**found)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown of rows of cells, columns aligned; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _known(plan: DimensionPlan) -> Recipe:
    """The recipe of a plan's name; nothing is parsed or imported. Raises: TypeError: there is none."""
    for recipe in RECIPES.get(plan.dimension, ()):
        if recipe.name == plan.name:
            return recipe
    raise TypeError(f"{plan.name!r} is no choice for {plan.dimension!r}")


def within(budget: float, dimension: str) -> list[Recipe]:
    """A dimension's recipes that a budget (percent) allows by themselves; of 0, what changes no bit."""
    return [
        one for one in RECIPES[dimension] if one.exact or (budget > 0 and one.loss <= budget + 1e-9)
    ]


def choose(gains: Mapping[str, Mapping[Recipe, float]], budget: float) -> dict[str, Recipe]:
    """The recipes, by dimension, with the largest gain (the part of an iteration that each saves) whose
    losses add up to no more than the budget (percent); dimensions that are left out stay uncompressed."""
    options: list[list[tuple[str, Recipe | None, float]]] = []
    for dimension, by_recipe in gains.items():
        good = [(dimension, one, gain) for one, gain in by_recipe.items() if gain >= TRIED]
        options.append([(dimension, None, 0.0), *good])
    found = [
        (
            sum(one.loss for _, one, _ in ways if one is not None),
            -sum(gain for _, _, gain in ways),
            ways,
        )
        for ways in product(*options)
    ]
    found = [one for one in found if one[0] <= budget + 1e-9]
    fastest = min(gain for _, gain, _ in found)
    _, _, best = min((one for one in found if one[1] <= fastest + ALIKE), key=lambda one: one[:2])
    return {dimension: one for dimension, one, _ in best if one is not None}


WARM_UP = 3
"""Iterations before the first block: kernels and allocations of training."""
BLOCK = 4
"""Iterations of a block, of which the first is not timed: it begins with what the block before has left."""
ROUNDS = 2
"""Blocks of each kind; one where each block is captured anew."""


class Check:
    """Times blocks of iterations with everything on, or one dimension uncompressed, and decides. Ranks switch
    by the iteration, which all of them know.

    Args:
        dimensions: that are compressed.
        first: the first iteration, counted from 0, that compresses anything.
        iteration: the zero-based one that all ranks are in.
        decided: called on all ranks with the part of an iteration that each dimension saves. A dimension that
            could not be timed is not in it, and stays as it was decided.
        capturing: further iterations of a block, in which a CUDA graph is captured; replays are timed.
    """

    def __init__(
        self,
        dimensions: Sequence[str],
        first: int,
        iteration: Callable[[], int],
        decided: Callable[[dict[str, float]], None],
        capturing: int = 0,
    ) -> None:
        self._dimensions, self._first = dimensions, first
        self._iteration, self._decided = iteration, decided
        self._untimed, self._length = 1 + capturing, BLOCK + capturing
        self._blocks: list[str | None] = [None, *dimensions] * (1 if capturing else ROUNDS)
        self._times: dict[str | None, list[float]] = {block: [] for block in self._blocks}
        self._begin: int | None = None
        self._place: int | None = None
        """Of the last iteration seen; Megatron skips those of --iterations-to-skip."""
        self._last = 0.0
        self.off: set[str] = set()
        """Dimensions that stay uncompressed."""
        self.done = not dimensions

    @property
    def iterations(self) -> int:
        """Of all blocks."""
        return self._length * len(self._blocks)

    def left_out(self, traffic: str) -> bool:
        """Whether a traffic class goes uncompressed now, for ``Policy.left_out``."""
        if any(_belongs(traffic, dimension) for dimension in self.off):
            return True
        if self.done or self._begin is None:
            return False
        place = self._iteration() - self._begin
        block = self._blocks[place // self._length] if 0 <= place < self.iterations else None
        return block is not None and _belongs(traffic, block)

    def on_training_log(self, iteration: int) -> None:
        """After each iteration, counted from 1; decides after the last block. Collective then."""
        if self.done:
            return
        if self._begin is None:
            self._begin = max(iteration, self._first) + WARM_UP
        place = iteration - 1 - self._begin  # of the iteration that has just ended
        if place < -1:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        block, position = divmod(place, self._length)
        if 0 <= place < self.iterations and position >= self._untimed and self._place == place - 1:
            self._times[self._blocks[block]].append(now - self._last)
        self._last, self._place = now, place
        if place + 1 >= self.iterations:
            self.done = True
            self._decide()

    def _decide(self) -> None:
        found = [statistics.median(times) if times else math.nan for times in self._times.values()]
        seconds = dict(zip(self._times, largest(*found), strict=True))
        gains = {name: 1 - seconds[None] / seconds[name] for name in self._dimensions}
        gains = {name: gain for name, gain in gains.items() if not math.isnan(gain)}
        self.off = {name for name, gain in gains.items() if gain < LEAST_GAIN}
        self._decided(gains)


def device_of_rank() -> torch.device:
    """On which this rank's collectives run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def largest(*values: float) -> list[float]:
    """The largest of each over all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device_of_rank())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _belongs(traffic: str, dimension: str) -> bool:
    return traffic.startswith(DIMENSIONS[dimension.replace("_", " ")])


_SAME = (
    *(
        "world_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_size",
    ),
    *(
        "context_parallel_size",
        "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
    ),
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
    ),
    *(
        "sequence_parallel",
        "params_dtype",
        "accumulate_allreduce_grads_in_fp32",
        "transformer_impl",
    ),
    *(
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_p2p_comm",
    ),
    "num_distributed_optimizer_instances",
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("ddp_bucket_size", "padded_vocab_size", "num_experts", "num_attention_heads"),
    *("num_query_groups", "kv_channels", "multi_latent_attention", "cuda_graph_impl"),
    *(
        "expert_tensor_parallel_size",
        "moe_token_dispatcher_type",
        "moe_router_topk",
        "moe_router_dtype",
    ),
    *(
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_layer_freq",
        "moe_latent_size",
    ),
    *(
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm",
    ),
)
"""Arguments of Megatron that a plan holds for."""


def circumstances(args: Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """What a plan was made for, as JSON-ready values; for another run it is made anew. ``settings`` are
    compression's, less what does not change results."""
    kept = {name: getattr(args, name, None) for name in _SAME}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return dict(
        json.loads(json.dumps({**kept, "device": device, "settings": settings}, default=str))
    )


def read(folder: str | None, wanted: dict[str, Any], say: Callable[[str], None]) -> RunPlan | None:
    """The plan of an earlier part of this run; None: there is none, or it was made for something else."""
    path = Path(folder or "", FILE)
    if folder is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        plan, made_for = RunPlan.from_dict(found["decision"]), dict(found["made_for"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"{path} cannot be read ({error}); the run measures anew")
        return None
    if changed := sorted(name for name in wanted if made_for.get(name) != wanted[name]):
        say(f"{path} is of another run ({', '.join(changed)}); this one measures anew")
        return None
    return plan


def write(
    folder: str | None, plan: RunPlan, made_for: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Keep a plan; where the folder cannot be written to, ``say`` tells so, and a resume measures anew."""
    if folder is None:
        return
    path = Path(folder, FILE)
    new = path.with_name(path.name + ".new")
    data = {"decision": asdict(plan), "made_for": made_for}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(to_json(data, indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}); a resumed run measures anew")
