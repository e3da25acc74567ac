"""Predicts rounds of local steps for 2 to 64 data centres: bytes, seconds and the bandwidth needed.

    python -m megatron.compression.auto.estimate --gpus 8 --outer 1:30 -- FLAGS_OF_A_SCRIPT

estimate.py calls this with its prediction of an iteration inside a data centre. With N values, b
bits a value, C data centres, H local steps of t seconds, a delay of D iterations and P fragments:

    sent      N b / 8                     bytes by each of two data centres in a round
              2 (C - 1) / C N b / 8       of more: a piece for each, and the sum of a piece to all
    seconds   8 sent / bandwidth + P times the latencies of an exchange: 1, or 1 + (C - 1)
    waits     what does not fit into D iterations, P times a round
    least     the bandwidth at which a fragment passes in D iterations, and a round in H

Encoding and decoding are not counted: kernels take microseconds where a link takes seconds.
"""

import math
from dataclasses import dataclass

from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.errors import InputError
from megatron.compression.local_steps.config import LocalStepsConfig

NUMBERS = (2, 4, 8, 16, 32, 64)
"""Data centres of the table."""


@dataclass(frozen=True)
class OuterLink:
    """The link of one data centre to the others."""

    bandwidth: float
    """Bits a second that it sends."""
    latency: float
    """Seconds one way."""


def outer_link(text: str) -> OuterLink:
    """Return the link of a ``GBIT/S[:MS]``, such as ``1:30``.

    Raises:
        InputError: it is none.
    """
    bandwidth, _, latency = text.partition(":")
    try:
        link = OuterLink(1e9 * float(bandwidth), 1e-3 * float(latency or 0))
    except ValueError:
        link = OuterLink(0.0, 0.0)
    if not (0 < link.bandwidth < math.inf and 0 <= link.latency < math.inf):
        raise InputError(f"--outer {text}: give Gbit/s and milliseconds one way, such as 1:30")
    return link


@dataclass(frozen=True)
class PredictedRound:
    """One round of local steps between some number of data centres."""

    data_centres: int
    sent: float
    """Bytes that a data centre sends."""
    seconds: float
    """How long the link is busy."""
    waits: float
    """Seconds that training waits, in a round."""
    least_bandwidth: float
    """Bits a second at which no step waits, with the delay; infinite where latency alone is
    longer."""


def predict(
    settings: LocalStepsConfig, values: int, iteration: float, data_centres: int, link: OuterLink
) -> PredictedRound:
    """Return the prediction of a round.

    Args:
        settings: local steps, codec, fragments and delay; without a delay each exchange is waited
            for, and the least bandwidth is that with the longest delay, of H - 1 iterations.
        values: parameters of the model.
        iteration: seconds of an iteration without an exchange.
        data_centres: how many there are.
        link: of each of them.
    """
    codec = settings.codec or IdentityCodec()
    bits = values * codec.bits_per_value()
    messages = 1
    if data_centres > 2:
        bits *= 2 * (data_centres - 1) / data_centres
        # The sums are passed on from one to the next.
        messages = data_centres
    fragments = settings.fragments
    latency = messages * link.latency
    seconds_of_fragment = bits / fragments / link.bandwidth + latency
    seconds = fragments * seconds_of_fragment
    # Fragments are sent one after the other. A fragment has its delay, and all of them together
    # have the round: the link may keep up with neither, and the worse of the two is waited for.
    hidden = settings.delay * iteration
    waits = fragments * max(0.0, seconds_of_fragment - hidden)
    if settings.delay:
        waits = max(waits, seconds - settings.steps * iteration)
    delay = (settings.delay or max(1, settings.steps - 1)) * iteration
    least = max(
        _bandwidth(bits / fragments, delay - latency),
        _bandwidth(bits, settings.steps * iteration - fragments * latency),
    )
    return PredictedRound(data_centres, bits / 8, seconds, waits, least)


def _bandwidth(bits: float, seconds: float) -> float:
    """Return the bits a second that a link needs; infinity where its latency alone is too long."""
    if seconds <= 0:
        return math.inf
    return bits / seconds


def rows(
    settings: LocalStepsConfig, values: int, iteration: float, link: OuterLink
) -> list[list[str]]:
    """Return the table for 2 to 64 data centres, the header first.

    Args:
        settings: as for ``predict``.
        values: parameters of the model.
        iteration: seconds of an iteration without an exchange.
        link: of each data centre.
    """
    cells = [
        [
            "data centres",
            "sent a round, MB",
            "round, s",
            "link busy, s",
            "training waits, s",
            "speed without exchange = 1",
            "no step waits from, Gbit/s",
        ]
    ]
    local = settings.steps * iteration
    for number in NUMBERS:
        predicted = predict(settings, values, iteration, number, link)
        cells.append(
            [
                str(number),
                f"{predicted.sent / 1e6:,.0f}",
                f"{local + predicted.waits:,.1f}",
                f"{predicted.seconds:,.2f}",
                f"{predicted.waits:,.2f}",
                f"{local / (local + predicted.waits):.3f}",
                f"{predicted.least_bandwidth / 1e9:,.3g}",
            ]
        )
    return cells


def explanation(settings: LocalStepsConfig, link: OuterLink) -> str:
    """Return what the table's numbers are of, as a line."""
    codec = settings.codec or IdentityCodec()
    delay = settings.delay or max(1, settings.steps - 1)
    return (
        f"Data centres: each is such a job, sends {link.bandwidth / 1e9:g} Gbit/s and is "
        f"{1e3 * link.latency:g} ms from the others. {settings.steps} local steps a round, "
        f"{codec.bits_per_value():.4g} bits a value, --outer-fragments {settings.fragments}, "
        f"--outer-delay {settings.delay}. The last column is for --outer-delay {delay}."
    )
