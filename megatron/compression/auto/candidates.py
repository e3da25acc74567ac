"""What ``--compression auto`` chooses among, and what each costs in validation loss.

The costs are those of docs/results, of the codec as it was measured; ``outliers=on``, which protects the
models that have massive activations, was on between stages alone and lowers a codec's error. They are means
of two seeds or more, of context parallelism and of int5 between stages of one. What is better than
uncompressed counts as 0: a cost of 0 is no promise that no bit changes, which ``exact`` is.
"""

from dataclasses import dataclass
from typing import Any

from megatron.compression.pipeline_parallel.config import RECOMMENDED as STAGES
from megatron.compression.pipeline_parallel.config import RECOMMENDED_BACKWARD as STAGES_BACK
from megatron.compression.tensor_parallel.config import RECOMMENDED as TENSOR
from megatron.compression.tensor_parallel.turns_checks import HALVES

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
    def exact(self) -> bool:
        """Whether no bit changes."""
        return self.source == _NONE

    @property
    def name(self) -> str:
        """As the log has it: the specs."""
        specs = [str(value) for field, value in self.settings if field != "min_mb"]
        return ", back ".join(specs)


def _candidate(
    loss: float, source: str, compression: str, backward: str | None = None, **more: Any
) -> Candidate:
    """``more``: further fields."""
    back = {} if backward is None else {"backward": backward}
    return Candidate(tuple({"compression": compression, **back, **more}.items()), loss, source)


_NONE = "no bit changes"
_ENDINGS = "docs/results/accuracy.md, the last quarter of training"
_EXPERTS = "docs/results/accuracy.md, a mixture of experts"
_DENSE = "outliers=on"
_STANDARDIZED = "scales=single,normalize=standardize,outliers=on"

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    # All messages of a layer have one size, which is timed: no threshold is needed beside that.
    "tensor_parallel": (
        _candidate(0.067, _ENDINGS, TENSOR, min_mb=0.0),
        _candidate(0.006, _ENDINGS, "int8:outliers=on", min_mb=0.0),
        _candidate(0.092, _ENDINGS, f"int6:{_DENSE}", f"int5:{_DENSE}", min_mb=0.0),
        _candidate(0.143, _ENDINGS, f"int5:{_DENSE}/int6:{_DENSE}", f"int5:{_DENSE}", min_mb=0.0),
        _candidate(0.277, _ENDINGS, f"int5:{_DENSE}", min_mb=0.0),
        _candidate(0.0, _NONE, "lossless", min_mb=0.0),
    ),
    "data_parallel": (
        # both compress the distributed optimizer's weights too, with which the cost was measured
        _candidate(0.030, _ENDINGS, "sdp4bit"),
        _candidate(0.0, _NONE, "lossless"),
    ),
    "pipeline_parallel": (
        _candidate(0.052, _ENDINGS, f"int6:group=64,{_STANDARDIZED}", STAGES_BACK),
        _candidate(0.244, _ENDINGS, f"int5:group=64,{_STANDARDIZED}", STAGES_BACK),
        _candidate(0.401, _ENDINGS, STAGES, STAGES_BACK),
        _candidate(0.0, _NONE, "lossless"),
    ),
    # As docs/choosing.md and docs/experts.md recommend for --ep-compression and as the costs were measured:
    # without outliers=on, of which each token would have lists of its own. fp8 costs more loss than int8 and
    # more bytes; "lossless" cannot send tokens.
    "expert_parallel": (
        _candidate(0.014, _EXPERTS, "int6"),
        _candidate(0.001, _EXPERTS, "int8"),
    ),
    "context_parallel": (
        _candidate(0.052, _ENDINGS, "int6"),
        _candidate(0.005, _ENDINGS, "int8"),
        _candidate(0.0, _NONE, "lossless"),
    ),
}
"""By dimension, the most promising first: where time runs out the last ones are not timed."""

SCHEDULES: dict[str, dict[str, Any]] = {
    HALVES: {"overlap": "halves"},
}
"""How tensor parallelism may hide what its codec leaves, by flag: fields of its config. What they gain
depends on how fast a host launches kernels (0.75 to 1.14 of the speed, docs/results/iterations.md), so that a
run tries them."""


def within(budget: float, dimension: str) -> list[Candidate]:
    """A dimension's candidates that a budget (percent) allows by themselves; of 0, what changes no bit."""
    known = CANDIDATES[dimension]
    return [one for one in known if one.exact or (budget > 0 and one.loss <= budget + 1e-9)]
