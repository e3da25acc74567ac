"""The recipes: names that stand for codecs, with the costs of the results."""

import re
from pathlib import Path

import pytest

from megatron.compression import CompressionConfig, CompressionConfigError, parse_codec
from megatron.compression.codecs.recipes import NAMED, RECIPES, TACO_PAPER, Recipe
from megatron.compression.flags import resolve
from megatron.compression.names import PARALLELISMS
from tests.unit.megatron_args import EXPERTS, parsed

ACCURACY = (Path(__file__).parents[2] / "docs" / "results" / "accuracy.md").read_text()
TENSOR_ROWS = (
    "int6-quadratic",
    "int8-nearest",
    "int6655-quadratic",
    "int5655-quadratic",
    "int5-quadratic",
)
"""Rows of the table of tensor parallelism's codecs, in the order of its recipes."""
SPEC_ROWS = {
    "pipeline_parallel": ("int6:group=64[^`]*", "int5:group=64[^`]*", "auto"),
    "data_parallel": ("sdp4bit",),
    "context_parallel": ("int6", "int8"),
}
"""Specs (patterns) by which the rows of other dimensions begin, in the order of their recipes."""


def rows() -> list[tuple[str, float, str]]:
    """Return the name of each recipe, its cost, and the pattern of its row in the results."""
    result = []
    for recipe, row in zip(RECIPES["tensor_parallel"], TENSOR_ROWS, strict=False):
        pattern = rf"^\| {row} \|(?:[^|]*\|){{2}} \+([\d.]+) ±"
        result.append((recipe.name, recipe.small, pattern))
    for dimension, specs in SPEC_ROWS.items():
        flag = PARALLELISMS[dimension].flag
        for recipe, spec in zip(RECIPES[dimension], specs, strict=False):
            pattern = rf"^\| `{flag} {spec}`.*?\| \+([\d.]+) [±|]"
            result.append((recipe.name, recipe.small, pattern))
    for recipe in RECIPES["expert_parallel"]:
        pattern = rf"^\| `--ep-compression {recipe.name}` \|[^|]*\|[^|]*\| ([-+][\d.]+) ±"
        result.append((recipe.name, recipe.small, pattern))
    return result


@pytest.mark.parametrize(("name", "loss", "row"), rows())
def test_costs_are_those_of_the_results(name: str, loss: float, row: str) -> None:
    assert float(re.findall(row, ACCURACY, re.M)[0]) == loss


def test_five_recipes_have_names() -> None:
    assert set(NAMED) == {
        "tensor-6bit",
        "tensor-8bit",
        "pipeline-6bit",
        "experts-8bit",
        "gradients-4bit",
    }


@pytest.mark.parametrize("name", NAMED)
def test_what_a_recipe_with_a_name_costs_at_most(name: str) -> None:
    """A tenth of a percent of a small model, and little more of a pretrained one."""
    _, recipe = NAMED[name]
    assert recipe.small <= 0.1
    assert recipe.loss <= 0.15


def test_the_worse_cost_counts() -> None:
    assert Recipe("int8", small=0.1, pretrained=0.2).loss == 0.2
    assert Recipe("int8", small=0.3, pretrained=0.2).loss == 0.3
    assert Recipe("int8", small=0.3).loss == 0.3


@pytest.mark.parametrize("dimension", RECIPES)
def test_a_dimension_is_measured_on_pretrained_models_as_a_whole_or_not(dimension: str) -> None:
    """A recipe without that cost would look better than one of more bits that has it."""
    measured = {recipe.pretrained is None for recipe in RECIPES[dimension] if not recipe.exact}
    assert len(measured) == 1


PRETRAINED = ACCURACY[ACCURACY.index("### A pretrained model") :]
PRETRAINED = PRETRAINED[: PRETRAINED.index("\n### ", 4)]
TRIAL, TUNED = PRETRAINED.split("**Fine-tuned, by the script**")
"""The tables of a trial, and of the script."""


@pytest.mark.parametrize(
    ("dimension", "recipe", "tables", "row"),
    [
        ("tensor_parallel", 0, TUNED, r"`int6:outliers=on` .*?\|.*?\|.*?\| \+([\d.]+) ±"),
        ("tensor_parallel", 1, TUNED, r"`int8:outliers=on` .*?\|.*?\|.*?\| \+([\d.]+) ±"),
        ("tensor_parallel", 4, TRIAL, r"`int5:outliers=on` .*?\|.*?\|.*?\| \+([\d.]+)"),
        ("pipeline_parallel", 0, TRIAL, r"`pipeline-6bit`, its forward codec \| \+([\d.]+)"),
        ("pipeline_parallel", 1, TRIAL, r"the same in 5 bits \| \+([\d.]+)"),
        ("pipeline_parallel", 2, TRIAL, r"the same in 4 bits \| \+([\d.]+)"),
    ],
)
def test_costs_on_a_pretrained_model_are_those_of_the_results(
    dimension: str, recipe: int, tables: str, row: str
) -> None:
    [cost] = re.findall(rf"^\| {row}", tables, re.M)
    assert float(cost) == RECIPES[dimension][recipe].pretrained


@pytest.mark.parametrize("dimension", RECIPES)
def test_recipes_of_a_dimension_differ(dimension: str) -> None:
    names = [recipe.name for recipe in RECIPES[dimension]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("dimension", RECIPES)
def test_the_specs_of_a_recipe_are_codecs(dimension: str) -> None:
    for recipe in RECIPES[dimension]:
        for spec in recipe.name.split(", back "):
            assert parse_codec(spec)


def test_the_papers_combination_is_of_dimensions_with_recipes() -> None:
    assert set(TACO_PAPER) < set(RECIPES)


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_is_stored_as_the_codecs_that_it_stands_for(name: str) -> None:
    dimension, recipe = NAMED[name]
    args = parsed(PARALLELISMS[dimension].flag, name, **EXPERTS)
    config = getattr(resolve(args), dimension)
    assert config.compression == recipe.compression
    assert getattr(config, "backward", None) == recipe.backward


@pytest.mark.parametrize("name", ["tensor-6bit", "tensor-8bit"])
def test_a_recipe_may_be_a_part_of_a_spec(name: str) -> None:
    _, recipe = NAMED[name]
    args = parsed("--tp-compression", f"{name};fc2=tensor-8bit;@0=int8")
    config = resolve(args).tensor_parallel
    assert config.compression == f"{recipe.compression};fc2=int8:outliers=on;@0=int8"


WITH_BACKWARD = [name for name, (dimension, _) in NAMED.items() if dimension != "data_parallel"]
"""Recipes of dimensions whose gradients may have a codec of their own."""


@pytest.mark.parametrize("name", WITH_BACKWARD)
def test_a_second_codec_wins_over_the_recipes(name: str) -> None:
    dimension, _ = NAMED[name]
    settings_class = type(getattr(CompressionConfig(), dimension))
    assert settings_class(compression=name, backward="int8").backward == "int8"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--tp-compression auto",
            "--tp-compression auto is neither a codec nor a recipe; "
            "drop it and give --compression auto",
        ),
        ("--pp-compression auto", "drop it and give --compression auto"),
        ("--cp-compression auto", "drop it and give --compression auto"),
        (
            "--tp-compression pipeline-6bit",
            "is a recipe of --pp-compression; --tp-compression has tensor-6bit",
        ),
        (
            "--cp-compression tensor-8bit",
            "--cp-compression tensor-8bit is a recipe of --tp-compression; give a codec",
        ),
        ("--tp-compression int8;fc2=gradients-4bit", "is a recipe of --dp-compression"),
        ("--pp-compression int8 pipeline-6bit", "stands for both codecs"),
    ],
)
def test_what_is_no_recipe_of_a_dimension_is_one_line(words: str, line: str) -> None:
    with pytest.raises(CompressionConfigError) as error:
        resolve(parsed(*words.split()))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
