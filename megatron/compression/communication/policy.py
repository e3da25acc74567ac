"""One decision a message: which codec encodes it, or why none does."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
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
    """Return which of SITES a site is, by its name, such as ``decoder.layers.0.mlp.linear_fc2``;
    None: none."""
    last = name.rpartition(".")[2].removeprefix("linear_")
    if last == "self_attention":  # the gather of what qkv gives
        return "qkv"
    return last if last in SITES else None


@dataclass(frozen=True)
class Choice:
    """Another codec for some sites."""

    codec: Codec | None
    site: str | None
    """One of SITES; None: any."""
    layers: frozenset[int | str] | None
    """The layers that it is for, as in ``Rule``."""

    def names(self, site: str, layer: int | str | None) -> bool:
        """Return whether it is for this site of a layer."""
        if self.site is not None and self.site != site_kind(site):
            return False
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class Rule[Encoder]:
    """What the settings say of one traffic class. ``Encoder`` is what encodes its messages: ``Codec
    | None``, and ``GradientCompressor | None`` for dp.gradient; None is off."""

    codec: Encoder
    min_bytes: int = 0
    """Smaller messages (uncompressed bytes of the whole tensor) go uncompressed."""
    layers: frozenset[int | str] | None = None
    """Layers that compress: numbers from 0, ``embedding``, ``output``; None: all."""
    start_iteration: int = 0
    """The first iteration that compresses, counted from 0."""
    activations: bool = True
    """Whether ``--validate-uncompressed`` concerns it."""
    choices: tuple[Choice, ...] = ()
    """Sites that have another codec; the first that names a site counts."""

    @cached_property
    def codecs(self) -> tuple[Any, ...]:
        """Every codec that some site uses."""
        codecs = [self.codec] + [choice.codec for choice in self.choices]
        return tuple(codec for codec in codecs if codec is not None)

    @cached_property
    def compressed(self) -> Decision:
        """The decision that ``codec`` encodes a message; made once."""
        return Decision(cast("Codec | None", self.codec), "compressed")

    def codec_at(self, site: str, layer: int | str | None) -> "Encoder | Codec | None":
        """Return the codec of a site; None: it goes uncompressed."""
        for choice in self.choices:
            if choice.names(site, layer):
                return choice.codec
        return self.codec


@dataclass
class Policy:
    """Decides for every message of a run whether a codec encodes it.

    All ranks of a message decide alike without synchronisation, since they know the same: the
    rules, the message's size over all ranks, the training iteration, and the sites whose error has
    passed the bound.

    Args:
        rules: by traffic class; a class without one goes uncompressed.
        ledger: knows which phase of the run sends, and whether a CUDA graph is captured.
        iteration: the training iteration that all ranks are in, counted from 0.
        validate_uncompressed: ``--validate-uncompressed``.
        meter: measures errors, and knows the sites past the bound.
    """

    rules: dict[str, Rule]
    ledger: Ledger
    iteration: Callable[[], int] = lambda: 0
    validate_uncompressed: bool = False
    meter: ErrorMeter = field(default_factory=ErrorMeter)
    left_out: Callable[[str], bool] | None = None
    """Whether a traffic class goes uncompressed in this iteration, as ``--compression auto`` has
    it."""
    schedule: Hashable = None
    """How the run is scheduled, where ``--compression auto`` tries several ways."""
    overflow: Overflow = field(default_factory=Overflow)
    """Says whether lossless codecs are on. Its ``Run`` replaces it by the run's."""
    revision: int = 0
    """How often ``replace_rules`` was called."""

    def replace_rules(self, rules: dict[str, Rule]) -> None:
        """Decide by other rules from now on; sites hold the policy, so they follow."""
        self.rules = rules
        self.revision += 1

    @contextmanager
    def only(self, prefixes: tuple[str, ...]) -> Iterator[None]:
        """Send uncompressed, while the body runs, what does not begin with one of these prefixes.

        Args:
            prefixes: of traffic classes, such as ``tp.``; none: everything goes uncompressed.
        """
        before = self.left_out

        def left_out(traffic: str) -> bool:
            if not traffic.startswith(prefixes):
                return True
            return before is not None and before(traffic)

        self.left_out = left_out
        try:
            yield
        finally:
            self.left_out = before

    def rule(self, traffic: str) -> Rule:
        """Return the settings of a traffic class."""
        return self.rules.get(traffic, _OFF)

    def measures(self, site: str, traffic: str) -> bool:
        """Return whether the error meter measures this message of a site.

        It measures none in evaluation and in passes of the loss meter, nor while a CUDA graph is
        captured, whose replays would all measure it.
        """
        meter = self.meter
        ledger = self.ledger
        is_training = ledger.phase == "train"
        if not meter.interval or not is_training or ledger.captures.captured is not None:
            return False
        return meter.due(site, traffic, self.iteration())

    def circumstances(self) -> Hashable:
        """Return what decisions and measures depend on besides class, site and size.

        It is equal while none of it changes, and a CUDA graph of an iteration stays true that long.
        """
        iteration = self.iteration()
        started = tuple(iteration >= rule.start_iteration for rule in self.rules.values())
        left_out: tuple[str, ...] = ()
        if self.left_out is not None:
            left_out = tuple(filter(self.left_out, self.rules))
        tripped = frozenset(self.meter.tripped)
        return self.revision, started, left_out, self.schedule, tripped, self.meter.interval

    def decide(
        self,
        traffic: str,
        nbytes: int | None = None,
        site: str = "",
        layer: int | str | None = None,
    ) -> Decision:
        """Return how a message is sent now: with which codec, or without one and why.

        Args:
            traffic: class of the message, one of ``ledger.TRAFFIC``.
            nbytes: its uncompressed size over all ranks, which all of them know; None: it does not
                matter.
            site: name of the site that sends it.
            layer: what ``--tp-compression-layers`` calls the site's layer.
        """
        # One function, since a call costs each message: from what holds for the whole run to what
        # holds for this message. The first reason to leave it uncompressed is the one that is
        # counted.
        rule = self.rules.get(traffic)
        if rule is None or not rule.codecs:
            return _UNCOMPRESSED["off"]
        # Gradients and weights are not sent in evaluation, and keep their rule.
        if self.validate_uncompressed and self.ledger.phase == "eval" and rule.activations:
            return _UNCOMPRESSED["evaluation"]
        if self.left_out is not None and self.left_out(traffic):
            return _UNCOMPRESSED["auto"]
        # Few settings have choices: the common case costs no call.
        codec = rule.codec_at(site, layer) if rule.choices else rule.codec
        if codec is None or (rule.layers is not None and layer not in rule.layers):
            return _UNCOMPRESSED["excluded"]
        if self.meter.tripped and (site, traffic) in self.meter.tripped:
            return _UNCOMPRESSED["guarded"]
        if rule.start_iteration and self.iteration() < rule.start_iteration:
            return _UNCOMPRESSED["warmup"]
        if nbytes is not None and nbytes < rule.min_bytes:
            return _UNCOMPRESSED["small"]
        if codec.lossless:
            capturing = self.ledger.captures.captured is not None
            if self.overflow.turns_off(traffic, capturing):
                return _UNCOMPRESSED["overflow"]
        # The usual decision is one object, made once.
        return rule.compressed if codec is rule.codec else Decision(codec, "compressed")


_OFF: Rule[None] = Rule(None)
_UNCOMPRESSED = {reason: Decision(None, reason) for reason in KINDS}
"""The decisions without a codec, made once: every message asks."""
