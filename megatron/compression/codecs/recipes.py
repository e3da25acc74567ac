"""Codecs whose cost in loss is measured: what ``--compression auto`` and the estimate choose among.

Five have names, which stand for them wherever a dimension's flag takes a codec, as in
``--tp-compression tensor-6bit``. Costs in loss are those of docs/results/accuracy.md: a model of 111 M
parameters, means of two or three seeds (context parallelism and 5 bits between stages: one seed). They were
measured without ``outliers=on``, except between stages: that setting protects models that have outliers, and
lowers a codec's error. A setting that was better than uncompressed has a cost of 0, which does not say that
no bit changes: ``exact`` does.
"""

from dataclasses import dataclass

from megatron.compression.errors import SettingError, setting
from megatron.compression.names import PARALLELISMS

_EXPERTS = "docs/results/accuracy.md, a mixture of experts"
_NO_BIT = "no bit changes"


@dataclass(frozen=True)
class Recipe:
    """One way to compress a dimension."""

    compression: str
    """Codec of activations, or of data parallelism's gradients."""
    backward: str | None = None
    """Codec of the activations' gradients; None: what ``compression`` implies, as for sharded weights."""
    loss: float = 0.0
    """Percent of validation loss above uncompressed."""
    named: str = ""
    """The name that flags take; empty: only ``auto`` and the estimate use it."""
    source: str = "docs/results/accuracy.md, final-quarter continuation runs"
    """The table that ``loss`` is from."""

    @property
    def exact(self) -> bool:
        """True where no bit of what is sent changes."""
        return self.source == _NO_BIT

    @property
    def name(self) -> str:
        """The specs, for logs and tables."""
        if self.backward is None:
            return self.compression
        return f"{self.compression}, back {self.backward}"


_LOSSLESS = Recipe("lossless", source=_NO_BIT)
_STANDARDIZED = "scales=single,normalize=standardize,outliers=on"
"""Between stages: activations have a mean that the tokens share, which is sent once."""
_STAGE_GRADIENTS = "int6:group=32,scales=single,hadamard=off,outliers=on"
"""Between stages: gradients, which have no such mean."""
_SIX = "int6:outliers=on"
_FIVE = "int5:outliers=on"

RECIPES: dict[str, tuple[Recipe, ...]] = {
    # Signed int4 to int6 have the quadratic grid. Measured with it: 0.067, 0.092, 0.143, 0.277.
    "tensor_parallel": (
        Recipe(_SIX, loss=0.067, named="tensor-6bit"),
        Recipe("int8:outliers=on", loss=0.006, named="tensor-8bit"),
        Recipe(_SIX, _FIVE, loss=0.092),
        Recipe(f"{_FIVE}/{_SIX}", _FIVE, loss=0.143),
        Recipe(_FIVE, loss=0.277),
        _LOSSLESS,
    ),
    "data_parallel": (Recipe("sdp4bit", loss=0.030, named="gradients-4bit"), _LOSSLESS),
    "pipeline_parallel": (
        Recipe(
            f"int6:group=64,{_STANDARDIZED}", _STAGE_GRADIENTS, loss=0.052, named="pipeline-6bit"
        ),
        Recipe(f"int5:group=64,{_STANDARDIZED}", _STAGE_GRADIENTS, loss=0.244),
        Recipe("int4:group=32,normalize=standardize,outliers=on", _STAGE_GRADIENTS, loss=0.401),
        _LOSSLESS,
    ),
    # Measured with int6's uniform grid, the default then; outliers=on would give each token lists of its own.
    "expert_parallel": (
        Recipe("int6", loss=0.014, source=_EXPERTS),
        Recipe("int8", loss=0.001, source=_EXPERTS, named="experts-8bit"),
    ),
    # Measured with int6's uniform grid, the default then.
    "context_parallel": (Recipe("int6", loss=0.052), Recipe("int8", loss=0.005), _LOSSLESS),
}
"""Recipes by dimension, the most promising first: where time runs out ``auto`` does not time the last ones."""

TACO_PAPER = {
    "tensor_parallel": "taco",
    "data_parallel": "sdp4bit",
    "pipeline_parallel": "tah-quant",
}
"""``--compression taco-paper``: as the TACO paper does (arXiv 2604.24088), each codec as in its own paper."""

NAMED: dict[str, tuple[str, Recipe]] = {
    recipe.named: (dimension, recipe)
    for dimension, recipes in RECIPES.items()
    for recipe in recipes
    if recipe.named
}
"""Name of a recipe -> its dimension and the recipe."""


def expand(dimension: str, compression: str, second: str | None) -> tuple[str, str | None]:
    """Replace the names of recipes in both specs of a dimension by codecs.

    Parts by site of a tensor-parallel spec (``int8;fc2=tensor-6bit``) may name recipes too.

    Args:
        dimension: the settings' field of ``CompressionConfig``, such as ``tensor_parallel``.
        compression: the first spec.
        second: the second spec, of gradients or of data parallelism's weights; None leaves it to the recipe.

    Returns:
        Both specs.

    Raises:
        SettingError: a recipe of another dimension, or one as the second spec.
    """
    kind = PARALLELISMS[dimension]
    path = f"{dimension}.compression"
    parts = []
    for part in compression.split(";"):
        site, _, spec = part.partition("=")
        by_site = spec in NAMED
        recipe = _recipe(path, spec if by_site else part.strip())
        if recipe is None:
            parts.append(part)
        elif by_site:
            parts.append(f"{site}={recipe.compression}")
        else:
            parts.append(recipe.compression)
            if second is None:
                second = recipe.backward
    second_path = f"{dimension}.{kind.second}"
    if second is not None and _recipe(second_path, second) is not None:
        if dimension == "data_parallel":
            reason = "is a recipe for gradients"
            fix = f"give it as {setting(path)}, and lossless or int8 for the weights"
        else:
            reason = "is a recipe, which stands for both codecs"
            fix = f"give it alone as {setting(path)}, or give two codecs"
        raise SettingError(second_path, second, reason, fix)
    return ";".join(parts), second


def _recipe(path: str, name: str) -> Recipe | None:
    """Return the recipe of a name; None: it is a codec's. ``path`` is the setting that has the name."""
    dimension, _, field = path.partition(".")
    local = [recipe for recipe, (owner, _) in NAMED.items() if owner == dimension]
    if name == "auto":
        if field == "weights":
            fix = "give a codec such as int8 or lossless"
        elif local:
            fix = f"give the recipe {' or '.join(local)}"
        else:
            fix = "give a codec such as int8"
        raise SettingError(path, name, "is neither a codec nor a recipe", fix)
    if name not in NAMED:
        return None
    owner, recipe = NAMED[name]
    if owner != dimension:
        fix = f"{setting(path)} has {' and '.join(local)}" if local else "give a codec such as int8"
        raise SettingError(path, name, f"is a recipe of {setting(f'{owner}.compression')}", fix)
    return recipe
