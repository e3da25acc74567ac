"""What is compared: uncompressed, what docs/choosing.md recommends, and the command line's own."""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.advise.cluster import Cluster
from megatron.compression.advise.phases import Prediction, predict
from megatron.compression.advise.shapes import Layout, Model
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import InputError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.flags import resolve
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig

RECOMMENDED: dict[str, dict[str, float]] = {
    "tp": {"auto": 0.085, "int8": 0.006, "lossless": 0.0},
    "pp": {
        "auto": 0.401,
        "int6:group=64,scales=single,normalize=standardize,outliers=on": 0.052,
        "lossless": 0.0,
    },
    "dp": {"sdp4bit": 0.03, "lossless": 0.0},
    "ep": {"int8": 0.001, "int6": 0.014},
}
"""By dimension: specs and what they cost in validation loss over the last quarter of a training, percent
(docs/results/accuracy.md)."""
LEAST_GAIN = 1.02
"""Below it a dimension is left uncompressed: two runs of one setting differ by as much."""


@dataclass(frozen=True)
class Setting:
    """One row's choice."""

    specs: dict[str, str]
    """By dimension (tp, pp, dp, ep), as its flag takes it."""
    loss: float
    """Cost in validation loss, percent."""

    @property
    def flags(self) -> str:
        """What to type; empty: uncompressed."""
        return " ".join(f"--{dimension}-compression {spec}" for dimension, spec in self.specs.items())

    @property
    def config(self) -> CompressionConfig:
        """For ``predict``."""
        tp, pp, dp, ep = (self.specs.get(dimension, "none") for dimension in RECOMMENDED)
        return CompressionConfig(
            tensor_parallel=TensorParallelConfig(compression=tp),
            pipeline_parallel=PipelineParallelConfig(compression=pp),
            data_parallel=DataParallelConfig(compression=dp),
            expert_parallel=ExpertParallelConfig(compression=ep),
        )


@dataclass(frozen=True)
class Advice:
    """One row of the table."""

    flags: str
    loss: float | None
    """None: not known."""
    prediction: Prediction
    speed_up: float


def config_of(args: Namespace, layout: Layout) -> CompressionConfig:
    """What parsed flags compress.

    Raises: InputError: an impossible setting, or one that only a run decides.
    """
    args.data_parallel_size, args.micro_batch_size = layout.data, layout.micro_batch
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = layout.tensor, layout.pipeline
    config = resolve(args)
    if config.auto:
        raise InputError(
            "--compression auto is decided by measuring in a run; leave it out for the settings that are "
            "recommended, or give a codec by its flag"
        )
    return config


def advise(model: Model, layout: Layout, cluster: Cluster, settings: list[Setting]) -> list[Advice]:
    """Uncompressed first, then each setting."""
    plain = predict(model, layout, cluster)
    rows = [Advice("", 0.0, plain, 1.0)]
    for one in settings:
        found = predict(model, layout, cluster, one.config)
        rows.append(Advice(one.flags, one.loss, found, plain.milliseconds / found.milliseconds))
    return rows


def recommended(model: Model, layout: Layout, cluster: Cluster) -> tuple[list[Setting], list[Setting]]:
    """Each recommendation for a dimension in use; and the best of each dimension with, where several gain,
    all of these together. The best: the fastest, of several within 1 % that which costs least."""
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data * layout.context}
    sizes["ep"] = layout.expert
    every: list[Setting] = []
    fastest: list[Setting] = []
    gaining: list[Setting] = []
    for dimension, specs in RECOMMENDED.items():
        if sizes[dimension] == 1:
            continue
        choices = [Setting({dimension: spec}, loss) for spec, loss in specs.items()]
        gains = [row.speed_up for row in advise(model, layout, cluster, choices)[1:]]
        best = min(
            (one for one, gain in zip(choices, gains, strict=True) if gain > 0.99 * max(gains)),
            key=lambda one: one.loss,
        )
        every, fastest = every + choices, [*fastest, best]
        if max(gains) >= LEAST_GAIN:
            gaining.append(best)
    together_specs = {dimension: spec for one in gaining for dimension, spec in one.specs.items()}
    together = [Setting(together_specs, sum(one.loss for one in gaining))] if len(gaining) > 1 else []
    return every + together, fastest + together
