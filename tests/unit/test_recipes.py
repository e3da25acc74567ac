"""The recipes: names that stand for codecs, with the costs of the results."""

import re
from pathlib import Path

import pytest

from megatron.compression import CompressionConfigError, parse_codec
from megatron.compression.codecs.recipes import NAMED, RECIPES, TACO_PAPER
from megatron.compression.flags import resolve
from megatron.compression.names import PARALLELISMS
from tests.unit.megatron_args import EXPERTS, parsed

ACCURACY = (Path(__file__).parents[2] / "docs" / "results" / "accuracy.md").read_text()
TENSOR = (
    "int6-quadratic",
    "int8-nearest",
    "int6655-quadratic",
    "int5655-quadratic",
    "int5-quadratic",
)


def rows() -> list[tuple[str, float, str]]:
    """Recipe, its cost, and the pattern of its row in the results."""
    found = [
        (one.name, one.loss, rf"^\| {row} \|(?:[^|]*\|){{2}} \+([\d.]+) ±")
        for one, row in zip(RECIPES["tensor_parallel"], TENSOR, strict=False)
    ]
    for dimension, specs in {
        "pipeline_parallel": ("int6:group=64[^`]*", "int5:group=64[^`]*", "auto"),
        "data_parallel": ("sdp4bit",),
        "context_parallel": ("int6", "int8"),
    }.items():
        for one, spec in zip(RECIPES[dimension], specs, strict=False):
            found.append(
                (
                    one.name,
                    one.loss,
                    rf"^\| `{PARALLELISMS[dimension].flag} {spec}`.*?\| \+([\d.]+) [±|]",
                )
            )
    row = r"^\| `--ep-compression {}` \|[^|]*\|[^|]*\| ([-+][\d.]+) ±"
    return found + [
        (one.name, one.loss, row.format(one.name)) for one in RECIPES["expert_parallel"]
    ]


@pytest.mark.parametrize(("name", "loss", "row"), rows())
def test_costs_are_those_of_the_results(name: str, loss: float, row: str) -> None:
    assert float(re.findall(row, ACCURACY, re.M)[0]) == loss


def test_five_recipes_have_names() -> None:
    """Each name's specs parse, and no two recipes of a dimension are alike."""
    assert set(NAMED) == {
        "tensor-6bit",
        "tensor-8bit",
        "pipeline-6bit",
        "experts-8bit",
        "gradients-4bit",
    }
    assert all(recipe.loss <= 0.1 for _, recipe in NAMED.values())
    for known in RECIPES.values():
        assert len({one.name for one in known}) == len(known)
        for one in known:
            assert all(parse_codec(spec) for spec in one.name.split(", back "))
    assert set(TACO_PAPER) < set(RECIPES)


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_stands_for_its_codecs(name: str) -> None:
    """It is stored as what it stands for; a second codec wins over the recipe's."""
    dimension, recipe = NAMED[name]
    flag = PARALLELISMS[dimension].flag
    config = getattr(resolve(parsed(flag, name, **EXPERTS)), dimension)
    assert (
        config.compression == recipe.compression
        and getattr(config, "backward", None) == recipe.backward
    )
    if dimension == "tensor_parallel":
        config = resolve(parsed(flag, f"{name};fc2=tensor-8bit;@0=int8")).tensor_parallel
        assert config.compression == f"{recipe.compression};fc2=int8:outliers=on;@0=int8"
    if hasattr(config, "backward"):
        assert type(config)(compression=name, backward="int8").backward == "int8"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--tp-compression auto",
            "--tp-compression auto is neither a codec nor a recipe; drop it and give --compression auto",
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
    assert line in str(error.value) and "\n" not in str(error.value)
