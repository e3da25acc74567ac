"""What is compared: uncompressed, what docs/choosing.md recommends, and the command line's own."""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.advise.cluster import Cluster
from megatron.compression.advise.phases import Prediction, predict
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.config import CompressionConfig
from megatron.compression.flags import resolve

RECOMMENDED: dict[str, dict[str, str]] = {
    "tp": {"auto": "+0.08 %", "int8": "+0.006 %", "lossless": "0"},
    "pp": {
        "auto": "+0.7 to +1.0 %",
        "int6:group=64,scales=single,normalize=standardize": "+0.02 %",
        "lossless": "0",
    },
    "dp": {"sdp4bit": "0 to +0.2 %", "lossless": "0"},
}
"""By dimension: specs and what they cost in validation loss (docs/choosing.md)."""
_PARTS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel"}
LEAST_GAIN = 1.02
"""Below it a dimension is left uncompressed: two runs of one setting differ by as much."""


@dataclass(frozen=True)
class Advice:
    """One row of the table."""

    flags: str
    """What to type; empty: uncompressed."""
    loss: str
    """Cost in validation loss, where it has been measured."""
    prediction: Prediction
    speed_up: float


def config_of(args: Namespace, layout: Layout) -> CompressionConfig:
    """What parsed flags compress.

    Raises: CompressionConfigError: an impossible setting.
    """
    args.data_parallel_size = layout.data
    return resolve(args)


def chosen(specs: dict[str, str]) -> CompressionConfig:
    """By dimension (tp, pp, dp), as its flag takes it."""
    kinds = {part: type(getattr(CompressionConfig(), part)) for part in _PARTS.values()}
    return CompressionConfig(**{_PARTS[d]: kinds[_PARTS[d]](compression=spec) for d, spec in specs.items()})


def advise(
    model: Model, layout: Layout, cluster: Cluster, own: tuple[str, CompressionConfig] | None = None
) -> list[Advice]:
    """Uncompressed first; then each recommendation alone; then every dimension's fastest that gains together.

    Args:
        own: the user's setting and its flags, which becomes the last row.
    """
    plain = predict(model, layout, cluster)
    rows = [Advice("", "0", plain, 1.0)]

    def add(flags: str, loss: str, config: CompressionConfig) -> float:
        found = predict(model, layout, cluster, config)
        rows.append(Advice(flags, loss, found, plain.milliseconds / found.milliseconds))
        return rows[-1].speed_up

    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data * layout.context}
    if model.experts:  # refused by both
        sizes["tp"] = sizes["dp"] = 1
    fastest: dict[str, str] = {}
    for dimension, specs in RECOMMENDED.items():
        if sizes[dimension] > 1:
            gains = {
                s: add(f"--{dimension}-compression {s}", loss, chosen({dimension: s}))
                for s, loss in specs.items()
            }
            best = max(gains, key=lambda spec: gains[spec])
            if gains[best] >= LEAST_GAIN:
                fastest[dimension] = best
    if len(fastest) > 1:
        flags = " ".join(f"--{dimension}-compression {spec}" for dimension, spec in fastest.items())
        add(flags, "their sum", chosen(fastest))
    if own is not None:
        add(own[0], "", own[1])
    return rows
