"""What ``--compression auto`` chooses among, and what each costs in validation loss.

The costs are those of docs/results, of the codec as it was measured; ``outliers=on``, which protects the
models that have massive activations, was on for int4 between stages alone and lowers a codec's error. Two
seeds or more are averaged, and what is better than uncompressed counts as 0.
"""

from dataclasses import dataclass
from typing import Any

BUDGET = 0.1
"""Percent, where ``--compression-loss-budget`` is not given."""


@dataclass(frozen=True)
class Candidate:
    """One way to compress a dimension."""

    settings: tuple[tuple[str, Any], ...]
    """Fields of the dimension's config."""
    loss: float
    """Percent of validation loss above uncompressed."""
    source: str
    """Where that was measured."""

    @property
    def name(self) -> str:
        """As the log has it: the specs."""
        specs = [str(value) for field, value in self.settings if field != "min_mb"]
        return ", back ".join(specs)


def _tensor(loss: float, source: str, compression: str, backward: str | None = None) -> Candidate:
    # All messages of a layer have one size, which is timed: no threshold is needed beside that.
    more = () if backward is None else (("backward", backward),)
    return Candidate((("compression", compression), *more, ("min_mb", 0.0)), loss, source)


def _pipeline(loss: float, source: str, compression: str, backward: str | None = None) -> Candidate:
    more = () if backward is None else (("backward", backward),)
    return Candidate((("compression", compression), *more), loss, source)


_NONE = "no bit changes"
_ENDINGS = "docs/results/accuracy.md, the last quarter of training"
_STAGES = "docs/results/pipeline_parallel.md, from scratch"
_DENSE = "outliers=on,grid=quadratic"
_BACK = "int6:group=32,scales=single,hadamard=off,outliers=on"

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "tensor_parallel": (
        _tensor(0.085, _ENDINGS, "int6:outliers=on"),
        _tensor(0.006, _ENDINGS, "int8:outliers=on"),
        _tensor(0.092, _ENDINGS, f"int6:{_DENSE}", f"int5:{_DENSE}"),
        _tensor(0.143, _ENDINGS, f"int5:{_DENSE}/int6:{_DENSE}", f"int5:{_DENSE}"),
        _tensor(0.277, _ENDINGS, f"int5:{_DENSE}"),
        _tensor(0.0, _NONE, "lossless"),
    ),
    "data_parallel": (
        # seeds -0.01 and +0.21 %; "lossless" and "sdp4bit" compress the distributed optimizer's weights too
        Candidate((("compression", "sdp4bit"),), 0.10, "docs/results/data_parallel.md, from scratch"),
        Candidate((("compression", "lossless"),), 0.0, _NONE),
    ),
    "pipeline_parallel": (
        _pipeline(0.015, _STAGES, "int6:group=64,scales=single,normalize=standardize,outliers=on", _BACK),
        _pipeline(0.21, _STAGES, "int5:group=64,scales=single,normalize=standardize,outliers=on", _BACK),
        _pipeline(0.401, _ENDINGS, "int4:group=32,normalize=standardize,outliers=on", _BACK),
        _pipeline(0.0, _NONE, "lossless"),
    ),
    # "expert_parallel" and "context_parallel": an entry here, their messages in messages.py and how one of
    # them is sent in timing.py.
}
"""By dimension, the most promising first: where time runs out the last ones are not timed."""


def within(budget: float, dimension: str) -> list[Candidate]:
    """A dimension's candidates that a budget (percent) allows by themselves."""
    return [one for one in CANDIDATES[dimension] if one.loss <= budget + 1e-9]
