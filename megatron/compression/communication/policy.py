"""One decision a message: which codec encodes it, or why none does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.compression.codecs import Codec
from megatron.compression.communication.error_bound import ErrorBound
from megatron.compression.communication.ledger import Ledger


class Decision(NamedTuple):
    """How a message travels."""

    codec: Codec | None
    """None: uncompressed, for the reason ``why``."""
    why: str
    """The ledger's kind: compressed, off, auto, evaluation, excluded, guarded, warmup or small."""


@dataclass(frozen=True)
class Rule:
    """What the settings say of one traffic class, such as tp.forward."""

    codec: Any
    """A ``Codec``, or the ``GradientCompressor`` of dp.gradient; None: off."""
    min_bytes: int = 0
    """Smaller messages (uncompressed bytes of the whole tensor) go uncompressed."""
    layers: frozenset[int | str] | None = None
    """Those that compress: numbers from 0, ``embedding``, ``output``; None for all."""
    start_iteration: int = 0
    """The first iteration that compresses, counted from 0."""
    activations: bool = True
    """Whether ``--validate-uncompressed`` concerns it."""


@dataclass
class Policy:
    """Decides for every message of a run; what it is asked needs no tensor and no synchronisation.

    Args:
        rules: by traffic class; one that has none is off.
        iteration: the zero-based training iteration that all ranks are in, asked at each decision.
        validate_uncompressed: evaluation sends activations uncompressed.
        error_bound: the sites whose error has passed ``--compression-error-bound``; None without it.
    """

    rules: dict[str, Rule]
    ledger: Ledger
    iteration: Callable[[], int] = lambda: 0
    validate_uncompressed: bool = False
    error_bound: ErrorBound | None = field(default=None)
    left_out: Callable[[str], bool] = field(default=lambda traffic: False)
    """Whether a traffic class goes uncompressed in this iteration, as ``--compression auto`` has it."""

    def rule(self, traffic: str) -> Rule:
        """The settings of a traffic class."""
        return self.rules.get(traffic, _OFF)

    def decide(
        self, traffic: str, nbytes: int | None = None, site: str = "", layer: int | str | None = None
    ) -> Decision:
        """What to do with a message.

        Args:
            nbytes: size of the uncompressed tensor over all ranks; None where the size does not matter any
                more.
            layer: what ``--tp-compression-layers`` calls the site's layer.
        """
        rule = self.rules.get(traffic, _OFF)
        if rule.codec is None:
            return _NOT_CHOSEN
        if self.validate_uncompressed and self.ledger.evaluating and rule.activations:
            return Decision(None, "evaluation")
        if self.left_out(traffic):
            return Decision(None, "auto")
        if rule.layers is not None and layer not in rule.layers:
            return Decision(None, "excluded")
        if self.error_bound is not None and (site, traffic) in self.error_bound.tripped:
            return Decision(None, "guarded")
        if self.iteration() < rule.start_iteration:
            return Decision(None, "warmup")
        if nbytes is not None and nbytes < rule.min_bytes:
            return Decision(None, "small")
        return Decision(rule.codec, "compressed")


_OFF = Rule(None)
_NOT_CHOSEN = Decision(None, "off")
