"""Recipes: codecs whose cost in loss is measured, for each kind of parallelism.

``--compression auto`` and the estimate choose among them. Five have names, which stand for their
codecs wherever a dimension's flag takes a codec:

    --tp-compression tensor-6bit            # int6:outliers=on
    --dp-compression gradients-4bit         # sdp4bit

Costs are those of docs/results/accuracy.md, on two kinds of model: one of 111 M parameters in the
last quarter of its training (means of two or three seeds; context parallelism and 5 bits between
stages: one), measured without ``outliers=on``, except between stages; and a pretrained one with
massive activations, SmolLM2-135M (one order of its data). The worse of the two counts. A setting
that was better than uncompressed has a cost of 0, which does not say that no bit changes: ``exact``
does.
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
    """Codec of the activations' gradients; None: what ``compression`` implies, as for sharded
    weights."""
    small: float = 0.0
    """Percent of validation loss above uncompressed, of a small model in the last quarter of its
    training."""
    pretrained: float | None = None
    """The same of a pretrained model with massive activations; None: not measured."""
    named: str = ""
    """What the flags call it; empty: only ``auto`` and the estimate use it."""
    source: str = "docs/results/accuracy.md, final-quarter continuation runs"
    """Where ``small`` was measured."""

    @property
    def loss(self) -> float:
        """Percent of validation loss above uncompressed, of the model that pays more."""
        return self.small if self.pretrained is None else max(self.small, self.pretrained)

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


# Lossless sends 11.4 bits of bf16's 16: the smallest gain, and no cost at all. It does not encode
# single tokens, so expert parallelism has no such recipe.
_LOSSLESS = Recipe("lossless", source=_NO_BIT)

# Integers of 5 and 6 bits with the few largest values of a message sent exactly.
_SIX_BITS = "int6:outliers=on"
_FIVE_BITS = "int5:outliers=on"

# Between stages: activations have a mean that the tokens share, which is sent once. Gradients have
# no such mean; they get smaller groups.
_STANDARDIZED = "scales=single,normalize=standardize,outliers=on"
_STAGE_GRADIENTS = "int6:group=32,scales=single,hadamard=off,outliers=on"

# ``pretrained``: tuned for 290 steps with the codec and validated with it. That of 5 bits is of an
# earlier trial, in which 6 bits had 0.138.
_TENSOR_PARALLEL = (
    # 6 bits for activations and for their gradients.
    Recipe(_SIX_BITS, small=0.067, pretrained=0.123, named="tensor-6bit"),
    # For runs that may not lose anything measurable: a third more bytes.
    Recipe("int8:outliers=on", small=0.006, pretrained=0.018, named="tensor-8bit"),
    # The fifth bit costs less in gradients of activations than in activations (the last row but
    # one). ``pretrained`` of this row and the next is not measured: ``small`` times the ratio of
    # 6 bits (1.84), so that no row looks better than one with more bits.
    Recipe(_SIX_BITS, _FIVE_BITS, small=0.092, pretrained=0.169),
    # 5 bits for the partial sums of an all-reduce, 6 for their sum, whose error every rank gets.
    Recipe(f"{_FIVE_BITS}/{_SIX_BITS}", _FIVE_BITS, small=0.143, pretrained=0.263),
    Recipe(_FIVE_BITS, small=0.277, pretrained=0.658),
    _LOSSLESS,
)

_DATA_PARALLEL = (
    # SDP4Bit: 8 bits inside a node, 4 between nodes, and 4 for the change of the distributed
    # optimizer's weights.
    Recipe("sdp4bit", small=0.030, named="gradients-4bit"),
    _LOSSLESS,
)

# ``pretrained``: activations alone, as the model is, 35 sequences.
_PIPELINE_PARALLEL = (
    # The usual choice between stages. Fewer bits cost more each: see the two rows below.
    Recipe(
        f"int6:group=64,{_STANDARDIZED}",
        _STAGE_GRADIENTS,
        small=0.052,
        pretrained=0.130,
        named="pipeline-6bit",
    ),
    Recipe(f"int5:group=64,{_STANDARDIZED}", _STAGE_GRADIENTS, small=0.244, pretrained=0.47),
    Recipe(
        "int4:group=32,normalize=standardize,outliers=on",
        _STAGE_GRADIENTS,
        small=0.401,
        pretrained=1.17,
    ),
    _LOSSLESS,
)

# Measured when int6 had a uniform grid. Lists of outliers would be one for each token here.
_EXPERT_PARALLEL = (
    Recipe("int6", small=0.014, source=_EXPERTS),
    # Half the bytes, at a cost within the noise of three seeds.
    Recipe("int8", small=0.001, source=_EXPERTS, named="experts-8bit"),
)

# Measured when int6 had a uniform grid.
_CONTEXT_PARALLEL = (Recipe("int6", small=0.052), Recipe("int8", small=0.005), _LOSSLESS)

RECIPES: dict[str, tuple[Recipe, ...]] = {
    "tensor_parallel": _TENSOR_PARALLEL,
    "data_parallel": _DATA_PARALLEL,
    "pipeline_parallel": _PIPELINE_PARALLEL,
    "expert_parallel": _EXPERT_PARALLEL,
    "context_parallel": _CONTEXT_PARALLEL,
}
"""By dimension, the most promising first: where time runs out ``auto`` does not time the last
ones."""

TACO_PAPER = {
    "tensor_parallel": "taco:outliers=off",
    "data_parallel": "sdp4bit",
    "pipeline_parallel": "tah-quant",
}
"""``--compression taco-paper``: as the TACO paper does (arXiv 2604.24088), each codec as in its own
paper."""

NAMED: dict[str, tuple[str, Recipe]] = {
    recipe.named: (dimension, recipe)
    for dimension, recipes in RECIPES.items()
    for recipe in recipes
    if recipe.named
}
"""Recipe's name -> its dimension and the recipe."""


def expand(dimension: str, compression: str, second: str | None) -> tuple[str, str | None]:
    """Replace the names of recipes in both specs of a dimension by codecs.

    Parts by site of a tensor-parallel spec (``int8;fc2=tensor-6bit``) may name recipes too.

    Args:
        dimension: the settings' field of ``CompressionConfig``, such as ``tensor_parallel``.
        compression: the first spec.
        second: the second spec, of gradients or of data parallelism's weights; None leaves it to
            the recipe.

    Returns:
        Both specs.

    Raises:
        SettingError: a recipe of another dimension, or one as the second spec.
    """
    parallelism = PARALLELISMS[dimension]
    path = f"{dimension}.compression"
    specs = []
    for entry in compression.split(";"):
        # SITE=RECIPE is a part by site. Any other "=" is a setting of a codec (int6:group=64).
        site, _, spec = entry.partition("=")
        by_site = spec in NAMED
        recipe = _recipe(path, spec if by_site else entry.strip())
        if recipe is None:
            specs.append(entry)
        elif by_site:
            specs.append(f"{site}={recipe.compression}")
        else:
            specs.append(recipe.compression)
            if second is None:
                second = recipe.backward
    second_path = f"{dimension}.{parallelism.second}"
    if second is not None and _recipe(second_path, second) is not None:
        if dimension == "data_parallel":
            reason = "is a recipe for gradients"
            fix = f"give it as {setting(path)}, and lossless or int8 for the weights"
        else:
            reason = "is a recipe, which stands for both codecs"
            fix = f"give it alone as {setting(path)}, or give two codecs"
        raise SettingError(second_path, second, reason, fix)
    return ";".join(specs), second


def _recipe(path: str, name: str) -> Recipe | None:
    """Return the recipe of a name; None: it is a codec's. ``path`` is the setting that has the
    name."""
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
