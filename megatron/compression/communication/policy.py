"""One decision a message: which codec encodes it, or why none does."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import KINDS, Ledger
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.communication.overflow import Overflow


class Decision(NamedTuple):
    """How a message travels."""

    codec: Codec | None
    """None: uncompressed, for this reason."""
    reason: str
    """One of ``ledger.KINDS``."""


SITES = ("qkv", "proj", "fc1", "fc2")
"""What settings call the layers of a transformer layer that communicate."""


@cache
def site_kind(name: str) -> str | None:
    """One of SITES of a site's name, such as ``decoder.layers.0.mlp.linear_fc2``; None of another's."""
    last = name.rpartition(".")[2].removeprefix("linear_")
    last = "qkv" if last == "self_attention" else last  # the gather of what qkv gives
    return last if last in SITES else None


@dataclass(frozen=True)
class Choice:
    """Another codec for some sites."""

    codec: Codec | None
    site: str | None
    """One of SITES; None: any."""
    layers: frozenset[int | str] | None
    """As in ``Rule``."""

    def names(self, site: str, layer: int | str | None) -> bool:
        """Whether it is for this site of a layer."""
        return self.site in (None, site_kind(site)) and (
            self.layers is None or layer in self.layers
        )


@dataclass(frozen=True)
class Rule[Encoder]:
    """What the settings say of one traffic class. ``Encoder`` is what encodes its messages: ``Codec | None``,
    and ``GradientCompressor | None`` for dp.gradient; None is off."""

    codec: Encoder
    min_bytes: int = 0
    """Smaller messages (uncompressed bytes of the whole tensor) go uncompressed."""
    layers: frozenset[int | str] | None = None
    """Those that compress: numbers from 0, ``embedding``, ``output``; None for all."""
    start_iteration: int = 0
    """The first iteration that compresses, counted from 0."""
    activations: bool = True
    """Whether ``--validate-uncompressed`` concerns it."""
    choices: tuple[Choice, ...] = ()
    """Sites that have another codec; the first that names a site counts."""

    @cached_property
    def codecs(self) -> tuple[Any, ...]:
        """Every codec that some site uses."""
        every = (self.codec, *(choice.codec for choice in self.choices))
        return tuple(codec for codec in every if codec is not None)

    @cached_property
    def compressed(self) -> Decision:
        """That ``codec`` encodes a message; made once."""
        return Decision(cast("Codec | None", self.codec), "compressed")

    def codec_at(self, site: str, layer: int | str | None) -> "Encoder | Codec | None":
        """The codec of a site; None: it goes uncompressed."""
        for choice in self.choices:
            if choice.names(site, layer):
                return choice.codec
        return self.codec


@dataclass
class Policy:
    """Decides for every message of a run, without synchronisation: by the rules of traffic classes, the
    zero-based training iteration that all ranks are in, and the sites whose error has passed the meter's
    bound."""

    rules: dict[str, Rule]
    ledger: Ledger
    iteration: Callable[[], int] = lambda: 0
    validate_uncompressed: bool = False
    meter: ErrorMeter = field(default_factory=ErrorMeter)
    left_out: Callable[[str], bool] | None = None
    """Whether a traffic class goes uncompressed in this iteration, as ``--compression auto`` has it."""
    overflow: Overflow = field(default_factory=Overflow)
    """Says whether lossless codecs are on. Its ``Run`` replaces it by the run's."""

    def rule(self, traffic: str) -> Rule:
        """The settings of a traffic class."""
        return self.rules.get(traffic, _OFF)

    def measures(self, site: str, traffic: str) -> bool:
        """Return whether the error meter measures this message of a site: not in evaluation, nor while a
        CUDA graph is captured, whose replays would all measure it."""
        meter, ledger = self.meter, self.ledger
        if not meter.interval or ledger.evaluating or ledger.captures.captured is not None:
            return False
        return meter.due(site, traffic, self.iteration())

    def circumstances(self) -> Hashable:
        """What decisions and measures depend on besides class, site and size; equal while none changes."""
        iteration, left_out = self.iteration(), self.left_out
        return (
            tuple(iteration >= rule.start_iteration for rule in self.rules.values()),
            () if left_out is None else tuple(map(left_out, self.rules)),
            (frozenset(self.meter.tripped), self.meter.interval),
        )

    def decide(
        self,
        traffic: str,
        nbytes: int | None = None,
        site: str = "",
        layer: int | str | None = None,
    ) -> Decision:
        """What to do with a message of ``nbytes`` over all ranks (None: its size does not matter).

        ``layer`` is what ``--tp-compression-layers`` calls the site's layer.
        """
        rule = self.rules.get(traffic)
        if rule is None or not rule.codecs:
            return _UNCOMPRESSED["off"]
        if self.validate_uncompressed and self.ledger.evaluating and rule.activations:
            return _UNCOMPRESSED["evaluation"]
        if self.left_out is not None and self.left_out(traffic):
            return _UNCOMPRESSED["auto"]
        codec = rule.codec_at(site, layer) if rule.choices else rule.codec
        if codec is None or (rule.layers is not None and layer not in rule.layers):
            return _UNCOMPRESSED["excluded"]
        if self.meter.tripped and (site, traffic) in self.meter.tripped:
            return _UNCOMPRESSED["guarded"]
        if rule.start_iteration and self.iteration() < rule.start_iteration:
            return _UNCOMPRESSED["warmup"]
        if nbytes is not None and nbytes < rule.min_bytes:
            return _UNCOMPRESSED["small"]
        if codec.lossless and self.overflow.turns_off(
            traffic, capturing=self.ledger.captures.captured is not None
        ):
            return _UNCOMPRESSED["overflow"]
        return rule.compressed if codec is rule.codec else Decision(codec, "compressed")


_OFF: Rule[None] = Rule(None)
_UNCOMPRESSED = {reason: Decision(None, reason) for reason in KINDS}
"""Made once: a message of a layer asks twice."""
